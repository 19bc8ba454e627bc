"""Exact schedules of the unit-step model: a list of requests in, the start step of each out.

A request started at step p holds s + j tokens at step p + j, j = 1..o, and completes at p + o. Usage between two
completions only grows, so it peaks at completions: an admission is checked at every completion it overlaps and at its
own. A waiting request may become feasible strictly between two completions; ``not_before`` finds that step.
"""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.errors import CapacityError, InputError
from plait.table import F64, I64


def check_requests(prompt_tokens: I64, output_tokens: I64, kv_tokens: int) -> None:
    """Raise InputError for a length below 1 and CapacityError for a request that never fits, naming the row."""
    if kv_tokens < 1:
        raise CapacityError(f"the KV budget is {kv_tokens} tokens; at least 1 is needed")
    for name, column in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        bad = np.flatnonzero(column < 1)
        if len(bad):
            raise InputError(f"row {bad[0]}: {name} is {column[bad[0]]}; an integer >= 1 is needed")
    bad = np.flatnonzero(prompt_tokens > kv_tokens - output_tokens)
    if len(bad):
        row = bad[0]
        raise CapacityError(
            f"row {row}: {prompt_tokens[row]} prompt + {output_tokens[row]} output tokens exceed the KV budget of "
            f"{kv_tokens}; raise --kv-tokens or drop the row"
        )


def area(prompt_tokens: I64, output_tokens: I64) -> F64:
    """Memory area of each request: tokens held summed over its steps, s o + o (o + 1) / 2, float64 [n]."""
    o = output_tokens.astype(np.float64)
    return prompt_tokens * o + o * (o + 1) / 2


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


@njit
def decode(s: I64, o: I64, order: I64, key: F64, kv_tokens: int, window: int, kappa: float, every_step: bool) -> I64:
    """Start step of each request, int64 [n], by list scheduling of ``order``.

    At each step the list is passed once: what fits starts; behind the first misfit (the head) up to ``window`` - 1
    more misfits are passed over, and only rows with key <= kappa x key[head] may start. window 1 is the strict list.
    ``every_step`` tries each step instead of jumping to the next one that can matter: same result, for tests.
    """
    n = len(order)
    starts = np.full(len(s), -1, np.int64)
    s, o, key = s[order], o[order], key[order]  # by position: neighbours in memory are visited together
    following = np.arange(1, n + 2)  # linked list over positions 1..n of the order; 0 is its anchor
    bound = np.zeros(n + 1, np.int64)  # no start before this step, by position
    ends = np.empty(n + 1, np.int64)
    peaks = np.empty(n + 1, np.int64)
    most = np.empty(n + 1, np.int64)
    most_end = np.empty(n + 1, np.int64)
    first = last = 0
    t = 0
    while following[0] <= n:
        first = retire(t, ends, peaks, most, most_end, first, last)
        if first == last:
            first = last = 0
        wake = np.iinfo(np.int64).max
        misfits = 0
        limit = np.inf
        before = 0
        position = following[0]
        while position <= n and misfits < window:
            p = position - 1
            if key[p] > limit:
                misfits += 1
            else:
                if bound[position] <= t:
                    bound[position] = not_before(s[p], o[p], t, kv_tokens, ends, peaks, most, most_end, first, last)
                if bound[position] <= t:
                    starts[order[p]] = t
                    last = insert(s[p], o[p], t, ends, peaks, most, most_end, first, last)
                    following[before] = following[position]
                    position = following[before]
                    continue
                wake = min(wake, bound[position])
                if misfits == 0:
                    limit = kappa * key[p]
                misfits += 1
            before = position
            position = following[position]
        t = t + 1 if every_step else max(t + 1, wake)
    return starts


def schedule(
    prompt_tokens: I64,
    output_tokens: I64,
    order: I64,
    kv_tokens: int,
    key: F64 | None = None,
    window: int = 1,
    kappa: float = np.inf,
    every_step: bool = False,
) -> I64:
    """Checked form of ``decode``: int64 [n] start steps. Without a key, overtaking is bounded by the window alone.

    Raises InputError or CapacityError naming the first row that cannot be scheduled.
    """
    check_requests(prompt_tokens, output_tokens, kv_tokens)
    used = np.ones(len(prompt_tokens)) if key is None else key
    return decode(prompt_tokens, output_tokens, order, used, kv_tokens, window, kappa, every_step)


def total_completion(starts: I64, output_tokens: I64) -> int:
    """TEL: the sum of completion steps."""
    return int(np.sum(starts + output_tokens))
