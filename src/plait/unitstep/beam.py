"""Beam search over starts in the unit-step model, guided by what the rest costs if memory were divisible.

States have made the same number of starts. Each is extended by SEGMENT starts in several ways: once greedily, else
passing over feasible requests at random. A state's worth is the completions made plus, for each waiting request, the
mean-busy-time estimate of its completion behind all memory already spent or left idle (bounds.mean_busy_time).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait._numba import njit
from plait.table import F64, I64
from plait.unitstep.bounds import centroid
from plait.unitstep.kernel import area
from plait.unitstep.running import ZERO, insert, not_before, retire

SEGMENT = 8
WINDOW = 96
LIMIT = 3.0
"""A blocked head is overtaken by up to this many times its area: the search, not a rule, decides what is too much."""


class States(NamedTuple):
    """Arrays of a set of states, one row each; ``totals`` are the columns named by the constants below."""

    ends: I64
    peaks: I64
    most: I64
    most_end: I64
    waiting: I64
    bounds: I64
    counts: I64
    totals: F64
    rows: I64
    starts: I64
    parent: I64


ACTIVE, BUFFERED, NEXT, STEP = 0, 1, 2, 3
"""Columns of counts: running requests, waiting ones in the buffer, next of the list beyond it, current step."""
COMPLETED, STARTED_AREA, BEHIND, TAILS, WORTH = 0, 1, 2, 3, 4
"""Columns of totals: sum of completions of started requests, their area; of waiting requests the area served before
each one's middle, and the sum of 1/2 + o - centroid; estimate of TEL."""


class Backlog(NamedTuple):
    """Requests by ascending area: lengths int64 [n], area and tail (1/2 + o - centroid) float64 [n], the budget."""

    s: I64
    o: I64
    areas: F64
    tails: F64
    kv_tokens: int


def _states(count: int, active: int) -> States:
    def integers(columns: int) -> I64:
        return np.zeros((count, columns), np.int64)

    return States(
        ends=integers(active),
        peaks=integers(active),
        most=integers(active),
        most_end=integers(active),
        waiting=integers(WINDOW),
        bounds=integers(WINDOW),
        counts=integers(4),
        totals=np.zeros((count, 5)),
        rows=integers(SEGMENT),
        starts=integers(SEGMENT),
        parent=integers(1),
    )


class Beam:
    """A search of one width: ``advance`` until it says done, then ``best_starts``."""

    def __init__(self, s: I64, o: I64, kv_tokens: int, width: int, children: int, skip: float, seed: int) -> None:
        areas = area(s, o)
        self._order = np.argsort(areas, kind="stable")
        s, o, areas = s[self._order], o[self._order], areas[self._order]
        self._backlog = Backlog(s, o, areas, 0.5 + o - centroid(s, o), kv_tokens)
        n = len(s)
        smallest = np.sort(s)  # as many as may run at once
        active = min(n, int(np.searchsorted(np.cumsum(smallest + 1), kv_tokens, side="right")) + 1)
        self._now, self._next = _states(width, active + 1), _states(width * children, active + 1)
        self._children, self._skip, self._seed = children, skip, seed
        levels = -(-n // SEGMENT)
        self._rows = np.full((levels, width, SEGMENT), -1, np.int64)
        self._starts = np.zeros((levels, width, SEGMENT), np.int64)
        self._parent = np.zeros((levels, width), np.int64)
        self._level, self._alive = 0, 1
        buffered = min(WINDOW, n)
        self._now.waiting[0, :buffered] = np.arange(buffered)
        self._now.counts[0] = 0, buffered, buffered, 0
        self._now.totals[0, BEHIND] = np.sum(np.cumsum(areas) - areas / 2)
        self._now.totals[0, TAILS] = np.sum(self._backlog.tails)

    def advance(self, levels: int) -> bool:
        """Go ``levels`` segments further; true when every request has started."""
        until = min(self._level + levels, len(self._rows))
        while self._level < until:
            seed = self._seed + self._level
            made = _extend_all(self._backlog, self._now, self._alive, self._next, self._children, self._skip, seed)
            ranked = np.argsort(self._next.totals[:made, WORTH])
            self._alive = _select(self._next, ranked, self._now, len(self._now.counts))
            level = self._level
            self._rows[level], self._starts[level] = self._now.rows, self._now.starts
            self._parent[level] = self._now.parent[:, 0]
            self._level += 1
        return until == len(self._rows)

    def best_starts(self) -> I64:
        """Start steps of the best complete schedule, int64 [n]."""
        starts = np.zeros(len(self._order), np.int64)
        state = 0
        for level in range(len(self._rows) - 1, -1, -1):
            rows = self._rows[level, state]
            used = rows >= 0
            starts[self._order[rows[used]]] = self._starts[level, state][used]
            state = self._parent[level, state]
        return starts


@njit
def _extend_all(
    backlog: Backlog, now: States, alive: int, following: States, children: int, skip: float, seed: int
) -> int:
    """Fill ``following`` with ``children`` extensions of each of the ``alive`` states; how many were made."""
    np.random.seed(seed)
    child = ZERO
    for state in range(alive):
        for turn in range(children):
            _copy(now, state, following, child)
            following.parent[child, 0] = state
            _extend(backlog, following, child, 0.0 if turn == 0 else skip)
            child += 1
    return child


@njit
def _copy(source: States, i: int, target: States, j: int) -> None:
    active, buffered = source.counts[i, ACTIVE], source.counts[i, BUFFERED]
    for k in range(active):
        target.ends[j, k] = source.ends[i, k]
        target.peaks[j, k] = source.peaks[i, k]
        target.most[j, k] = source.most[i, k]
        target.most_end[j, k] = source.most_end[i, k]
    for k in range(buffered):
        target.waiting[j, k] = source.waiting[i, k]
        target.bounds[j, k] = source.bounds[i, k]
    for k in range(source.counts.shape[1]):  # loops: assigning rows of arrays takes seconds to compile
        target.counts[j, k] = source.counts[i, k]
    for k in range(source.totals.shape[1]):
        target.totals[j, k] = source.totals[i, k]


@njit
def _select(made: States, ranked: I64, kept: States, width: int) -> int:
    """Keep the first ``width`` states of ``ranked``, by worth, each once; how many there are."""
    alive = ZERO
    last = np.nan
    for child in ranked:
        worth = made.totals[child, WORTH]
        if worth == last:
            continue
        last = worth
        _copy(made, child, kept, alive)
        for k in range(SEGMENT):
            kept.rows[alive, k], kept.starts[alive, k] = made.rows[child, k], made.starts[child, k]
        kept.parent[alive, 0] = made.parent[child, 0]
        alive += 1
        if alive == width:
            break
    return alive


@njit
def _extend(backlog: Backlog, states: States, i: int, skip: float) -> None:
    """Start SEGMENT more requests in state ``i`` (fewer where none are left), event by event as in kernel.decode."""
    s, o, kv_tokens = backlog.s, backlog.o, backlog.kv_tokens
    ends, peaks, most, most_end = states.ends[i], states.peaks[i], states.most[i], states.most_end[i]
    waiting, bounds, counts, totals = states.waiting[i], states.bounds[i], states.counts[i], states.totals[i]
    last, buffered, t = counts[ACTIVE], counts[BUFFERED], counts[STEP]
    first = ZERO
    started = 0
    states.rows[i, :] = -1
    while started < SEGMENT and buffered > 0:
        last -= _compact(t, ends, peaks, most, most_end, last)
        wake = np.iinfo(np.int64).max
        limit = np.inf
        smaller = 0.0
        k = 0
        while k < buffered and started < SEGMENT:
            row = waiting[k]
            if backlog.areas[row] > limit:
                break
            if bounds[k] <= t:
                bounds[k] = not_before(s[row], o[row], t, kv_tokens, ends, peaks, most, most_end, first, last)
            if bounds[k] <= t and (skip == 0 or np.random.random() >= skip):
                states.rows[i, started], states.starts[i, started] = row, t
                started += 1
                last = insert(s[row], o[row], t, ends, peaks, most, most_end, first, last)
                totals[COMPLETED] += t + o[row]
                totals[STARTED_AREA] += backlog.areas[row]
                left = buffered + len(s) - counts[NEXT]
                totals[BEHIND] -= smaller + backlog.areas[row] * (left - k - 0.5)
                totals[TAILS] -= backlog.tails[row]
                for j in range(k, buffered - 1):
                    waiting[j], bounds[j] = waiting[j + 1], bounds[j + 1]
                buffered -= 1
                if counts[NEXT] < len(s):
                    waiting[buffered], bounds[buffered] = counts[NEXT], 0
                    counts[NEXT] += 1
                    buffered += 1
                continue
            wake = min(wake, max(bounds[k], t + 1))
            limit = min(limit, LIMIT * backlog.areas[row])
            smaller += backlog.areas[row]
            k += 1
        if started < SEGMENT:
            t = wake
    counts[ACTIVE], counts[BUFFERED], counts[STEP] = last, buffered, t
    left = buffered + len(s) - counts[NEXT]
    idle = kv_tokens * float(t) - totals[STARTED_AREA] + _area_left(t, ends, peaks, last)
    totals[WORTH] = totals[COMPLETED] + totals[TAILS]
    totals[WORTH] += (totals[BEHIND] + left * (totals[STARTED_AREA] + idle)) / kv_tokens


@njit
def _compact(t: int, ends: I64, peaks: I64, most: I64, most_end: I64, last: int) -> int:
    """Drop completions up to step t and move the rest to the front; how many were dropped."""
    gone = retire(t, ends, peaks, most, most_end, ZERO, last)
    if gone:
        for k in range(gone, last):
            ends[k - gone], peaks[k - gone] = ends[k], peaks[k]
            most[k - gone], most_end[k - gone] = most[k], most_end[k]
    return gone


@njit
def _area_left(t: int, ends: I64, peaks: I64, last: int) -> float:
    """Memory area that running requests hold after step t: between completions usage rises by their number a step."""
    total = 0.0
    before = t
    for k in range(last):
        steps = ends[k] - before
        if steps > 0:
            total += steps * float(peaks[k] - ends[k]) - (last - k) * steps * (steps - 1.0) / 2
            before = ends[k]
    return total
