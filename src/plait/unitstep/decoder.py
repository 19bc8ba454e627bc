"""List scheduling in the unit-step model: which request starts at which step."""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.table import F64, I64
from plait.unitstep.running import ZERO, insert, not_before, retire
from plait.unitstep.sharing import Prefixes, add_shared, shared_not_before
from plait.unitstep.steptree import StepTree, add, greatest, move_on, tree_not_before

NEVER = np.iinfo(np.int64).max


@njit
def list_starts(
    s: I64,
    o: I64,
    order: I64,
    key: F64,
    kv_tokens: int,
    window: int,
    kappa: float,
    every_step: bool,
    tree: StepTree | None,
    prefixes: Prefixes | None,
) -> I64:
    """kernel.decode, compiled. ``s`` are the tokens of a request beyond its shared prefix.

    The window is a stretch of arrays by place in the list: what starts out of it is replaced by shifting what stands
    before it, so it is always ``begin .. begin + window - 1``.
    """
    n = len(order)
    starts = np.full(n, -1, np.int64)
    rows, s, o, key = order.copy(), s[order], o[order], key[order]
    bound = np.zeros(n, np.int64)  # no start before this step
    ends, peaks = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    most, most_end = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    longest = int(np.max(o))
    begin = first = last = t = latest = ZERO
    while begin < n:
        if tree is None:
            first = retire(t, ends, peaks, most, most_end, first, last)
            if first == last:
                first = last = ZERO
        else:
            move_on(tree, t, longest)
        k = begin
        wake = NEVER
        while begin < n:
            end = min(begin + window, n)
            top, at = -1, t
            if tree is None:
                if last > first:
                    top, at = most[last - 1], most_end[last - 1]
            elif latest > t:
                top, at = greatest(tree, t + 1, latest)
            limit = kappa * key[begin]
            wake = _raise_bounds(s, o, key, bound, begin, end, limit, t, kv_tokens + t - top, at)
            started = False
            while wake <= t and k < end and not started:
                if bound[k] <= t and key[k] <= limit:
                    if tree is None:
                        bound[k] = not_before(s[k], o[k], t, kv_tokens, ends, peaks, most, most_end, first, last)
                    elif prefixes is None:
                        bound[k] = tree_not_before(tree, s[k], o[k], t, kv_tokens)
                    else:
                        bound[k] = shared_not_before(tree, prefixes, rows[k], s[k], o[k], t, kv_tokens)
                    started = bound[k] <= t
                k += 1
            if wake > t:
                break
            if not started:
                continue  # the bounds have risen
            row, prompt, steps = rows[k - 1], s[k - 1], o[k - 1]
            starts[row] = t
            latest = max(latest, t + steps)
            if tree is None:
                last = insert(prompt, steps, t, ends, peaks, most, most_end, first, last)
            elif prefixes is None:
                add(tree, prompt, steps, t)
            else:
                add_shared(tree, prefixes, row, prompt, steps, t)
            for j in range(k - 1, begin, -1):
                rows[j], s[j], o[j], key[j], bound[j] = rows[j - 1], s[j - 1], o[j - 1], key[j - 1], bound[j - 1]
            begin += 1
        t = t + 1 if every_step else max(t + 1, wake)
    return starts


@njit
def _raise_bounds(
    s: I64, o: I64, key: F64, bound: I64, begin: int, end: int, limit: float, t: int, room: int, at: int
) -> int:
    """Raise the bounds of what is in the way of the greatest peak, at step ``at``, whose completion leaves ``room``
    tokens to a request that starts now; the least bound of a row whose key is within ``limit``.

    Where a prefix is shared ``s`` is the least that a request adds, so its bound stays one.
    """
    s, o, key, bound = s[begin:end], o[begin:end], key[begin:end], bound[begin:end]  # from 0: vectorised
    least = NEVER
    for k in range(len(s)):
        earliest = bound[k]
        over = s[k] - room
        if (earliest <= t) & (over > 0) & (t + o[k] > at):
            earliest = min(t + over, at)
        bound[k] = earliest
        least = min(least, earliest if key[k] <= limit else NEVER)
    return least
