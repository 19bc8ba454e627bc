"""Time-boxed improvement of a schedule in the unit-step model: beam search, then annealing of the list.

The caller owns the clock: ``keep_going()`` is asked every few milliseconds at usual sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plait._numba import njit
from plait.table import I64
from plait.unitstep.beam import Beam
from plait.unitstep.kernel import decode
from plait.unitstep.running import ZERO, insert, not_before, retire

BEAM_WIDTHS = (8, 16, 32, 64)
BEAM_CHILDREN = 4
BEAM_SKIP = 0.4
STARTS_A_ROUND = 20_000
"""Work between two questions to the clock, in starts of requests."""
ANNEALED_ROWS = 600
"""Up to this many requests annealing gains more than further beams."""
HOT, COLD = 3e-3, 3e-5
"""First and last temperature of a cycle of annealing, as a share of TEL / sqrt(n)."""
CYCLE_ROUNDS = 100
REACH = 0.05
"""Mean distance that a move carries a request, as a share of the list."""


def improve(s: I64, o: I64, starts: I64, kv_tokens: int, keep_going: Callable[[], bool], seed: int = 0) -> I64:
    """A schedule no worse than ``starts``, int64 [n], after searching while ``keep_going()``."""
    best = starts
    for turn, width in enumerate(BEAM_WIDTHS if len(s) > ANNEALED_ROWS else BEAM_WIDTHS[1:2]):
        best = _beam(s, o, best, kv_tokens, width, keep_going, seed + turn)
    if len(s) <= ANNEALED_ROWS:
        return anneal(s, o, best, kv_tokens, keep_going, seed)
    while keep_going():
        turn += 1
        best = _beam(s, o, best, kv_tokens, BEAM_WIDTHS[-1], keep_going, seed + turn)
    return best


def _beam(s: I64, o: I64, starts: I64, kv_tokens: int, width: int, keep_going: Callable[[], bool], seed: int) -> I64:
    """The better of ``starts`` and one beam search, unless the clock stops it."""
    if not keep_going():
        return starts
    beam = Beam(s, o, kv_tokens, width, BEAM_CHILDREN, BEAM_SKIP, seed << 20)
    while not beam.advance(max(1, STARTS_A_ROUND // (8 * width * BEAM_CHILDREN))):
        if not keep_going():
            return starts
    found = beam.best_starts()
    return found if np.sum(found) < np.sum(starts) else starts


def anneal(s: I64, o: I64, starts: I64, kv_tokens: int, keep_going: Callable[[], bool], seed: int = 0) -> I64:
    """Simulated annealing of the strict list, in cycles of doubling length, each from the best list so far."""
    n = len(s)
    best_order = np.argsort(starts, kind="stable")
    best = int(np.sum(_strict(s, o, best_order, kv_tokens)))
    rounds, turn = CYCLE_ROUNDS, 0
    while n > 1:
        order, total = best_order.copy(), best
        for k in range(rounds):
            if not keep_going():
                found = _strict(s, o, best_order, kv_tokens)
                return found if np.sum(found) < np.sum(starts) else starts
            heat = HOT * (COLD / HOT) ** (k / rounds) * (total + float(np.sum(o))) / np.sqrt(n)
            moves = max(1, STARTS_A_ROUND // (4 * n))
            turn += 1
            total, best = _moves(s, o, order, kv_tokens, moves, heat, REACH * n, total, best_order, best, seed + turn)
        rounds *= 2
    return starts


def _strict(s: I64, o: I64, order: I64, kv_tokens: int) -> I64:
    return decode(s, o, order, np.ones(len(s)), kv_tokens, 1, 1.0)


@njit
def _moves(
    s: I64,
    o: I64,
    order: I64,
    kv_tokens: int,
    moves: int,
    heat: float,
    reach: float,
    total: int,
    best_order: I64,
    best: int,
    seed: int,
) -> tuple[int, int]:
    """Try ``moves`` changes of ``order``, in place; ``total`` is its sum of starts, ``best`` that of ``best_order``.

    A change that raises the sum by x is kept with probability exp(-x / heat): the level is drawn first, so that a
    decode stops once it is sure to end above it.
    """
    np.random.seed(seed)
    n = len(order)
    scratch = np.empty((4, n + 1), np.int64)
    trial = order.copy()
    for _ in range(moves):
        source = np.random.randint(n)
        step = 1 + int(-np.log(1 - np.random.random()) * reach)
        target = source + step if np.random.random() < 0.5 else source - step
        target = min(max(target, 0), n - 1)
        length = 1 + np.random.randint(3)  # rows moved together
        change = np.random.random()
        _change(order, trial, source, target, length, change)
        level = total - heat * np.log(1 - np.random.random())
        now = _sum_of_starts(s, o, trial, kv_tokens, level, scratch)
        if now <= level:
            order[:] = trial
            total = now
            if now < best:
                best = now
                best_order[:] = order
    return total, best


@njit
def _change(order: I64, trial: I64, source: int, target: int, length: int, change: float) -> None:
    """Write into ``trial`` the order with a swap, or with a row or a short block of rows moved to ``target``."""
    n = len(order)
    trial[:] = order
    if change < 0.4:
        trial[source], trial[target] = order[target], order[source]
        return
    if change < 0.8:
        length = 1
    source, target = min(source, n - length), min(target, n - length)
    if target > source:
        for k in range(source, target):
            trial[k] = order[k + length]
    else:
        for k in range(target, source):
            trial[k + length] = order[k]
    for k in range(length):
        trial[target + k] = order[source + k]


@njit
def _sum_of_starts(s: I64, o: I64, order: I64, kv_tokens: int, level: float, scratch: I64) -> int:
    """Sum of start steps of the strict list; or, once above ``level`` for sure, some sum above it."""
    ends, peaks, most, most_end = scratch[0], scratch[1], scratch[2], scratch[3]
    n = len(order)
    first = last = t = total = ZERO
    for k in range(n):
        row = order[k]
        first = retire(t, ends, peaks, most, most_end, first, last)
        start = not_before(s[row], o[row], t, kv_tokens, ends, peaks, most, most_end, first, last)
        while start > t:
            t = start
            first = retire(t, ends, peaks, most, most_end, first, last)
            start = not_before(s[row], o[row], t, kv_tokens, ends, peaks, most, most_end, first, last)
        total += t
        if total + t * (n - 1 - k) > level:
            return total + t * (n - 1 - k)
        last = insert(s[row], o[row], t, ends, peaks, most, most_end, first, last)
    return total
