"""The unit-step model when not everything is known at the start: lengths that turn out longer, requests that arrive.

The exact kernel (``kernel.py``) needs true lengths to promise that nothing will be thrown out. Here a running request
is believed to end at its lower end, later as soon as possible; where memory runs out all the same, one is evicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait._numba import njit
from plait.table import F64, I64

LARGEST_AREA, SMALLEST_LOWER = 0, 1
"""Whom an overflow evicts: the request that is most memory area away from its end, or the one with the smallest lower
bound (A_min)."""
OVERDUE_TOKENS = 8
"""Tokens that a request is expected to make beyond its lower end, as far as its place in the list is concerned."""

STEP, HEAD, TAIL, ACTIVE, EVICTED, SPELLS = range(6)
"""Places in ``Flow.counts``."""


class Flow(NamedTuple):
    """State of a run of n requests; waiting rows are ``waiting[HEAD:TAIL]``, running ones ``running[:ACTIVE]``."""

    s: I64  # [n] prompt tokens
    o: I64  # [n] true output tokens; decisions read them only to see that a request has just ended
    lower: I64  # [n] lower bound on the output, raised as tokens appear
    rank: F64  # [n] smaller is served first
    key: F64  # [n] measure that bounds overtaking
    made: I64  # [n] tokens generated and kept
    finish: I64  # [n] completion step, -1 before
    waiting: I64  # [n] rows by rank
    running: I64  # [n] rows by believed end
    end: I64  # [n] believed completion step of a running row
    spell: I64  # [n] place of the row's current spell in ``spells``
    spells: I64  # [k, 4] row, start step, tokens it had then, end step: what anyone needs to check memory
    counts: I64  # [6]


class Rules(NamedTuple):
    """How a list is followed and what an overflow does."""

    window: int = 1
    kappa: float = 1.0
    victim: int = LARGEST_AREA
    keep_progress: bool = True


def new_flow(s: I64, o: I64, lower: I64, rank: F64, key: F64) -> Flow:
    """An empty machine at step 0; rows enter by ``enter``. Spells: room for a few a row."""
    n = len(s)
    zero, none = np.zeros(n, np.int64), np.full(n, -1, np.int64)
    return Flow(
        *(s, o, lower.copy(), rank.copy(), key.copy()),
        *(zero, none, zero.copy(), zero.copy(), zero.copy(), zero.copy()),
        spells=np.zeros((4 * n + 16, 4), np.int64),
        counts=np.zeros(6, np.int64),
    )


@njit
def enter(f: Flow, row: int) -> None:
    """A row joins the waiting ones at the place of its rank, behind its equals."""
    low, high = f.counts[HEAD], f.counts[TAIL]
    while low < high:
        middle = (low + high) // 2
        if f.rank[f.waiting[middle]] <= f.rank[row]:
            low = middle + 1
        else:
            high = middle
    if f.counts[HEAD] > 0 and (low - f.counts[HEAD] < f.counts[TAIL] - low or f.counts[TAIL] == len(f.waiting)):
        f.counts[HEAD] -= 1
        for i in range(f.counts[HEAD], low - 1):
            f.waiting[i] = f.waiting[i + 1]
        f.waiting[low - 1] = row
    else:
        for i in range(f.counts[TAIL], low, -1):
            f.waiting[i] = f.waiting[i - 1]
        f.counts[TAIL] += 1
        f.waiting[low] = row


@njit
def fits(f: Flow, row: int, kv_tokens: int) -> bool:
    """Whether believed usage stays within ``kv_tokens`` at every believed completion if the row starts now. From the
    last completion backwards: ``rows`` are those still running then, ``tokens`` what they hold now."""
    t = f.counts[STEP]
    size = f.s[row] + f.made[row]
    end = t + max(1, f.lower[row] - f.made[row])
    tokens = rows = 0
    placed = False
    for k in range(f.counts[ACTIVE] - 1, -1, -1):
        other = f.running[k]
        if not placed and f.end[other] <= end:
            tokens += size
            rows += 1
            placed = True
            if tokens + rows * (end - t) > kv_tokens:
                return False
        tokens += f.s[other] + f.made[other]
        rows += 1
        if tokens + rows * (f.end[other] - t) > kv_tokens:
            return False
    return placed or tokens + size + (rows + 1) * (end - t) <= kv_tokens


@njit
def start(f: Flow, row: int) -> None:
    """A waiting row (taken off the list by the caller) runs."""
    t = f.counts[STEP]
    f.end[row] = t + max(1, f.lower[row] - f.made[row])
    k = f.counts[ACTIVE]
    while k > 0 and f.end[f.running[k - 1]] > f.end[row]:
        f.running[k] = f.running[k - 1]
        k -= 1
    f.running[k] = row
    f.counts[ACTIVE] += 1
    f.spell[row] = f.counts[SPELLS]
    spell = f.spells[f.counts[SPELLS]]
    spell[0], spell[1], spell[2], spell[3] = row, t, f.made[row], -1
    f.counts[SPELLS] += 1


@njit
def stop(f: Flow, k: int) -> int:
    """Take the k-th running row out; returns it."""
    row = f.running[k]
    f.spells[f.spell[row], 3] = f.counts[STEP]
    for i in range(k, f.counts[ACTIVE] - 1):
        f.running[i] = f.running[i + 1]
    f.counts[ACTIVE] -= 1
    return int(row)


@njit
def area_left(f: Flow, row: int) -> float:
    """Expected memory area up to the row's end, and never less than it entered the list with: what has outlived its
    lower end falls behind as it grows, what is near its end does not jump ahead of those that were served first."""
    left = max(0, f.lower[row] - f.made[row]) + OVERDUE_TOKENS
    return float(max(f.rank[row], (f.s[row] + f.made[row]) * left + left * (left + 1) / 2))


@njit
def evict(f: Flow, rules: Rules) -> None:
    """One running row goes back to wait."""
    chosen = 0
    for k in range(1, f.counts[ACTIVE]):
        row, best = f.running[k], f.running[chosen]
        if rules.victim == LARGEST_AREA:
            better = area_left(f, row) > area_left(f, best)
        else:
            better = f.lower[row] < f.lower[best]
        if better:
            chosen = k
    row = stop(f, chosen)
    if rules.victim == LARGEST_AREA:
        f.rank[row] = f.key[row] = area_left(f, row)
    if not rules.keep_progress:
        f.made[row] = 0
    f.counts[EVICTED] += 1
    enter(f, row)


@njit
def admit(f: Flow, rules: Rules, kv_tokens: int) -> None:
    """Pass the waiting list once: what fits starts; behind the first misfit up to ``window`` - 1 more are passed over
    and only rows of rank <= its rank + (kappa - 1) x its key may start: kappa times its key where both are the same."""
    i = f.counts[HEAD]
    misfits = 0
    limit = np.inf
    while i < f.counts[TAIL] and misfits < rules.window:
        row = f.waiting[i]
        if f.rank[row] <= limit and fits(f, row, kv_tokens):
            for j in range(i, f.counts[HEAD], -1):
                f.waiting[j] = f.waiting[j - 1]
            f.counts[HEAD] += 1
            start(f, row)
        else:
            if misfits == 0:
                limit = f.rank[row] + (rules.kappa - 1.0) * f.key[row]
            misfits += 1
        i += 1


@njit
def advance(f: Flow, rules: Rules, kv_tokens: int, until: int) -> bool:
    """Steps up to ``until``, or until nothing waits or runs. False if ``spells`` is full: give more room."""
    while f.counts[STEP] < until and f.counts[ACTIVE] + f.counts[TAIL] - f.counts[HEAD] > 0:
        if f.counts[SPELLS] + f.counts[TAIL] - f.counts[HEAD] > len(f.spells):
            return False
        _evict_until_it_fits(f, rules, kv_tokens)
        admit(f, rules, kv_tokens)
        f.counts[STEP] += 1
        _make_tokens(f)
    if f.counts[STEP] < until and until < np.iinfo(np.int64).max:
        f.counts[STEP] = until
    return True


@njit
def _evict_until_it_fits(f: Flow, rules: Rules, kv_tokens: int) -> None:
    """What runs fits with one more token each."""
    while True:
        used = 0
        for k in range(f.counts[ACTIVE]):
            used += f.s[f.running[k]] + f.made[f.running[k]] + 1
        if used <= kv_tokens:
            return
        evict(f, rules)


@njit
def _make_tokens(f: Flow) -> None:
    """A token for every running row. What outlives its belief is believed to end with the next token: the list stays
    in order, since nothing else can end earlier."""
    t = f.counts[STEP]
    for k in range(f.counts[ACTIVE] - 1, -1, -1):
        row = f.running[k]
        f.made[row] += 1
        if f.made[row] == f.o[row]:
            stop(f, k)
            f.finish[row] = t
        elif f.made[row] >= f.lower[row]:
            f.lower[row] = f.made[row] + 1
            f.end[row] = t + 1


def run(f: Flow, rules: Rules, kv_tokens: int, until: int = np.iinfo(np.int64).max) -> Flow:
    """``advance`` with as much room for spells as it takes; the flow returned may hold a longer array of them."""
    while not advance(f, rules, kv_tokens, until):
        f = f._replace(spells=np.concatenate([f.spells, np.zeros_like(f.spells)]))
    return f


def spells_of(f: Flow) -> npt.NDArray[np.int64]:
    """Every stretch in which a row ran, int64 [k, 4]: row, start step, tokens it had then, end step."""
    return f.spells[: f.counts[SPELLS]]
