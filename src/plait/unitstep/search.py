"""Iterated local search on the list, the exact decoder as judge."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plait._numba import njit
from plait.table import F64, I64
from plait.unitstep.kernel import decode

MOVES_A_ROUND = 16
REACH = 40
"""Mean distance, in positions, that a move carries a request."""


@njit
def improve(
    s: I64, o: I64, order: I64, key: F64, kv_tokens: int, window: int, kappa: float, places: I64, shifts: I64, tel: int
) -> int:
    """Try each move (take the row at ``places[m]``, put it ``shifts[m]`` further) and keep it unless TEL grows.

    Changes ``order`` in place; ``tel`` is its TEL, and the new one is returned.
    """
    n = len(order)
    for m in range(len(places)):
        source = places[m]
        target = min(max(source + shifts[m], 0), n - 1)
        trial = order.copy()
        row = order[source]
        if target > source:
            trial[source:target] = order[source + 1 : target + 1]
        else:
            trial[target + 1 : source + 1] = order[target:source]
        trial[target] = row
        starts = decode(s, o, trial, key, kv_tokens, window, kappa, False)
        now = int(np.sum(starts) + np.sum(o))
        if now <= tel:
            order[:] = trial
            tel = now
    return tel


def local_search(
    s: I64,
    o: I64,
    order: I64,
    key: F64,
    kv_tokens: int,
    window: int,
    kappa: float,
    keep_going: Callable[[], bool],
    seed: int = 0,
) -> I64:
    """Improve ``order`` while ``keep_going()``, asked every MOVES_A_ROUND decodes; int64 [n] start steps.

    Never worse than the order it was given. The caller owns the clock.
    """
    generator = np.random.default_rng(seed)
    order = order.copy()
    tel = int(np.sum(decode(s, o, order, key, kv_tokens, window, kappa, False) + o))
    while keep_going():
        places = generator.integers(0, len(order), MOVES_A_ROUND)
        shifts = generator.geometric(1 / REACH, MOVES_A_ROUND) * generator.choice([-1, 1], MOVES_A_ROUND)
        tel = improve(s, o, order, key, kv_tokens, window, kappa, places, shifts, tel)
    return decode(s, o, order, key, kv_tokens, window, kappa, False)
