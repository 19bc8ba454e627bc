"""Running requests of the unit-step model in arrays by completion: checks in O(log active), changes in O(active).

``ends[first:last]`` are the completions of running requests, ascending, ``peaks`` the usage + step at each, ``most``
the running maximum of ``peaks`` and ``most_end`` the completion where it is reached.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from plait._numba import njit
from plait.table import I64

ZERO = cast(int, np.int64(0))
"""Where a compiled function starts to count for another: the literal 0 would compile that one once more."""


@njit
def search_ends(ends: I64, end: int, first: int, last: int) -> int:
    """First k in [first, last] with ends[k] >= end (last where there is none)."""
    while first < last:
        middle = (first + last) >> 1
        if ends[middle] < end:
            first = middle + 1
        else:
            last = middle
    return first


@njit
def not_before(
    s: int, o: int, t: int, kv_tokens: int, ends: I64, peaks: I64, most: I64, most_end: I64, first: int, last: int
) -> int:
    """A lower bound > t on the first feasible start, or t itself if the request may start at step t. O(log active).

    ``ends[first:last]`` are the completions of running requests, ascending, ``peaks`` the usage + step at each,
    ``most`` the running maximum of ``peaks`` and ``most_end`` the completion where it is reached. Later admissions
    only add usage, so the bound stays valid. The own end moves past the completion that blocks it; a peak at e that
    is over by x either needs x steps more, or is over once e has passed.
    """
    end = t + o
    if last > first and most_end[last - 1] < end:  # the common case of a full memory, without a search
        excess = most[last - 1] + s - t - kv_tokens
        if excess > 0:
            return int(min(t + excess, most_end[last - 1]))
    k = search_ends(ends, end, first, last)
    earliest = t
    if k > first:
        excess = most[k - 1] + s - t - kv_tokens
        if excess > 0:
            earliest = min(t + excess, most_end[k - 1])
    if k < last:
        usage_at_end = peaks[k] - ends[k] - (ends[k] - end) * (last - k)
        if usage_at_end + s + o > kv_tokens:
            earliest = max(earliest, ends[k] - o + 1)
    return earliest


@njit
def insert(s: int, o: int, t: int, ends: I64, peaks: I64, most: I64, most_end: I64, first: int, last: int) -> int:
    """Add a request started at t to the running ones; returns the new ``last``. One pass over them."""
    end = t + o
    k = last
    while k > first and ends[k - 1] > end:
        ends[k] = ends[k - 1]
        peaks[k] = peaks[k - 1]
        most[k] = most[k - 1]
        most_end[k] = most_end[k - 1]
        k -= 1
    ends[k] = end
    peaks[k] = s + o
    if k < last:
        peaks[k] += peaks[k + 1] - ends[k + 1] - (ends[k + 1] - end) * (last - k)
    peaks[k] += end
    add = s - t
    earlier, raised = ends[first:k], peaks[first:k]  # views from 0: their loop is vectorised
    for j in range(len(raised)):
        raised[j] += add + earlier[j]
    top, at = np.int64(-1), np.int64(-1)
    j = first
    while j <= k:
        record = j
        while record <= k and peaks[record] <= top:
            record += 1
        most[j:record] = top
        most_end[j:record] = at
        if record <= k:
            top, at = peaks[record], ends[record]
            most[record], most_end[record] = top, at
        j = record + 1
    j = k + 1
    while j <= last and most[j] < top:
        most[j] = top
        most_end[j] = at
        j += 1
    return last + 1


@njit
def retire(t: int, ends: I64, peaks: I64, most: I64, most_end: I64, first: int, last: int) -> int:
    """Drop completions up to step t; returns the new ``first``. Repairs the maxima that were reached at them."""
    while first < last and ends[first] <= t:
        first += 1
    top, at = np.int64(-1), np.int64(-1)
    j = first
    while j < last and most_end[j] <= t:
        if peaks[j] > top:
            top, at = peaks[j], ends[j]
        most[j] = top
        most_end[j] = at
        j += 1
    return first
