"""Who runs, decided anew at every step, where a request's output is a distribution: least memory area a completion.

A request's index is the least, over all lengths at which one might give up, of the memory area it is expected to hold
until then over its chance to complete by then (Gittins). It falls as the request comes near to its likely ends and
rises as it outlives them; who is stopped keeps its tokens.
"""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.table import F64
from plait.unitstep.flow import ACTIVE, EVICTED, HEAD, OVERDUE_TOKENS, SPELLS, STEP, TAIL, Flow, enter, start, stop

WINDOW = 64
"""Waiting requests that may be passed over at a step because they do not fit."""
STAYS = 0.3
"""Share by which the index of a waiting request must be below that of a running one to take its place."""


@njit
def index(s: int, made: int, lengths: F64) -> float:
    """Gittins index of a request that holds s + made tokens; ``lengths``: ascending, equally likely. Beyond all of them
    it is taken to end OVERDUE_TOKENS later."""
    count = len(lengths)
    gone = 0
    while gone < count and lengths[gone] <= made:
        gone += 1
    if gone == count:
        return _area(s + made, OVERDUE_TOKENS)
    least = np.inf
    completed = 0.0
    for k in range(gone, count):
        here = _area(s + made, lengths[k] - made)
        completed += here
        least = min(least, (completed + (count - 1 - k) * here) / (k + 1 - gone))
    return least


@njit
def _area(held: int, steps: float) -> float:
    """Tokens held over the coming ``steps``."""
    return held * steps + steps * (steps + 1) / 2


@njit
def renew(f: Flow, lengths: F64) -> None:
    """All ranks anew from ``lengths``, float64 [n, k]."""
    for k in range(f.counts[ACTIVE]):
        _rank_running(f, f.running[k], lengths)
    waiting = f.waiting[f.counts[HEAD] : f.counts[TAIL]]
    for row in waiting:
        f.rank[row] = index(f.s[row], f.made[row], lengths[row])
    waiting[:] = waiting[np.argsort(f.rank[waiting])]


@njit
def _rank_running(f: Flow, row: int, lengths: F64) -> None:
    f.rank[row] = (1 - STAYS) * index(f.s[row], f.made[row], lengths[row])


@njit
def advance(f: Flow, lengths: F64, kv_tokens: int, left: int) -> bool:
    """Steps until at most ``left`` requests run or wait. False if ``spells`` is full: give more room."""
    while f.counts[ACTIVE] + f.counts[TAIL] - f.counts[HEAD] > left:
        if f.counts[SPELLS] + f.counts[TAIL] - f.counts[HEAD] > len(f.spells):
            return False
        _choose(f, lengths, kv_tokens)
        f.counts[STEP] += 1
        for k in range(f.counts[ACTIVE] - 1, -1, -1):
            row = f.running[k]
            f.made[row] += 1
            if f.made[row] == f.o[row]:
                stop(f, k)
                f.finish[row] = f.counts[STEP]
            else:
                _rank_running(f, row, lengths)
    return True


@njit
def _choose(f: Flow, lengths: F64, kv_tokens: int) -> None:
    """Running and waiting requests by rank, as many as fit with one more token each: others stop, or go on waiting."""
    _sort_running(f)
    started, stopped = [0 for _ in range(0)], [0 for _ in range(0)]  # empty lists of whole numbers
    used = misfits = k = 0
    i = f.counts[HEAD]
    while k < f.counts[ACTIVE] or (i < f.counts[TAIL] and misfits < WINDOW):
        waits = i < f.counts[TAIL] and misfits < WINDOW
        if waits and k < f.counts[ACTIVE]:
            waits = f.rank[f.waiting[i]] < f.rank[f.running[k]]
        row = f.waiting[i] if waits else f.running[k]
        fits = used + f.s[row] + f.made[row] + 1 <= kv_tokens
        if fits:
            used += f.s[row] + f.made[row] + 1
        if waits and fits:
            for j in range(i, f.counts[HEAD], -1):
                f.waiting[j] = f.waiting[j - 1]
            f.counts[HEAD] += 1
            started.append(int(row))
        elif waits:
            misfits += 1
        elif not fits:
            stopped.append(k)
        i += waits
        k += not waits
    for place in stopped[::-1]:
        row = stop(f, place)
        f.rank[row] = index(f.s[row], f.made[row], lengths[row])
        f.counts[EVICTED] += 1
        enter(f, row)
    for row in started:
        start(f, row)


@njit
def _sort_running(f: Flow) -> None:
    """By rank; most are in order."""
    for k in range(1, f.counts[ACTIVE]):
        row, j = f.running[k], k
        while j > 0 and f.rank[f.running[j - 1]] > f.rank[row]:
            f.running[j] = f.running[j - 1]
            j -= 1
        f.running[j] = row


def run(f: Flow, lengths: F64, kv_tokens: int, left: int) -> Flow:
    """``advance`` with as much room for spells as it takes; the flow returned may hold a longer array of them."""
    while not advance(f, lengths, kv_tokens, left):
        f = f._replace(spells=np.concatenate([f.spells, np.zeros_like(f.spells)]))
    return f
