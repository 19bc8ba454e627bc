"""Survival curves of output lengths per class, from finished, running and cut-off answers.

S(t) = P(answer longer than t tokens) is the Kaplan-Meier curve of the answers seen, where running answers and those cut
off by ``max_tokens`` count as censored, shrunk towards the curve of the class above: that curve counts like ``weight``
answers more (Susarla & Van Ryzin 1976: the mean of a Dirichlet process after censored observations). The weight is not
a setting but estimated: variance inside classes over variance between them (credibility, Buhlmann 1967). Past the
oldest answer that goes on, the curve above is bent by how many ends were due and did not come (``_beyond``).

Everything here is compiled and works on ``LengthState``, so that compiled loops (the simulator) may call it too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from plait._numba import njit, prefetch
from plait.lengths.classes import PREFIX_LEVELS
from plait.table import F64, I32, I64

PRIOR_TOKENS = 256.0
"""Mean of an answer's curve until answers are seen (a Lomax curve, which has a long tail), or its ``max_tokens`` where
that is less: whoever asks for so little expects little, and a quarter of such answers are cut off. The job's curve is
that of its rows together; it counts like one answer."""
PREFIX_RATIO, LENGTH_RATIO = 1.0, 0.05
"""First guess of the variance between classes over the variance inside, for classes cut by prefix and by prompt length:
a guess gives way to the data as these get more exact than the guess itself (standard deviation = value)."""
EVEN_ANSWERS = 2.0
"""A class above takes its parts as evenly seen up to about so many answers: below that, unevenness is chance."""
DONE, UNSEEN = -2, -1
FETCH_AHEAD = 16
"""Observations ahead of which what is known of a row is fetched: rows end in no order that memory knows."""


def grid() -> I64:
    """Tokens at which curves are kept: 0, 1, 2, ... then 8 an octave, up to 2**20."""
    octaves = np.unique(np.round(2.0 ** (np.arange(20 * 8 + 1) / 8)))
    return np.concatenate(([0], octaves)).astype(np.int64)


@njit
def prior_curve(at: I64, cap_rows: F64) -> F64:
    """The job's curve before answers are seen, float64 [g]: at each length the hazards of the rows that may become so
    long, on average. ``at``: grid; ``cap_rows`` [g]: rows whose ``max_tokens`` is in (at[j], at[j + 1]]."""
    caps = np.flatnonzero(cap_rows[:-1] > 0)
    means = np.minimum(PRIOR_TOKENS, at[caps + 1].astype(np.float64))
    curve = np.ones(len(at))
    first = 0
    for j in range(len(at) - 1):
        while first < len(caps) - 1 and caps[first] < j:
            first += 1
        ends, of_rows = 0.0, 0.0
        for k in range(first, len(caps)):
            ends += cap_rows[caps[k]] * (1.0 - ((means[k] + at[j]) / (means[k] + at[j + 1])) ** 2)
            of_rows += cap_rows[caps[k]]
        curve[j + 1] = curve[j] * (1.0 - ends / max(of_rows, 1.0))
    return curve


class LengthState(NamedTuple):
    """What ``observe`` and ``refit`` work on: n rows, c classes, g grid points; bin j is (grid[j], grid[j + 1]]."""

    classes: I32  # [n]
    max_tokens: I64  # [n]
    min_tokens: I64  # [n]
    parent: I32  # [c]
    level: I32  # [c]
    class_rows: F64  # [c] rows in the class and below
    prior: F64  # [g] the job's curve before answers are seen
    grid_tokens: I64  # [g]
    seen: I64  # [n] tokens a running row was last seen with, or UNSEEN, or DONE
    finished: F64  # [c, g] answers that ended in bin j
    finished_tokens: F64  # [c, g] their tokens
    running: F64  # [c, g] answers last seen in [grid[j], grid[j + 1])
    running_part: F64  # [c, g] share of the bin those have lived through, summed
    survival: F64  # [c, g] P(answer > grid[j])
    centre: F64  # [c, g] mean length of answers that end in bin j
    area: F64  # [c, g] sum of the survival curve up to grid[j]: the expected length if capped there


@njit
def _bin(at: I64, tokens: int) -> int:
    """Largest j with at[j] <= tokens, by bisection."""
    low, high = 0, len(at)
    while high - low > 1:
        middle = (low + high) // 2
        if at[middle] <= tokens:
            low = middle
        else:
            high = middle
    return low


@njit
def observe(state: LengthState, row: int, output_tokens: int, finished: bool) -> None:
    """Count one observation. A row is counted once, where it was seen last; after it finished nothing changes it. An
    answer as long as its ``max_tokens`` was cut off: it would have been longer. One that has not passed its
    ``min_tokens`` says nothing."""
    observe_rows(state, np.array([row]), np.array([output_tokens]), finished)


@njit
def observe_rows(state: LengthState, rows: I64, output_tokens: I64, finished: bool) -> None:
    """``observe`` for many rows: their tokens so far, int64 [k]."""
    at, seen, classes = state.grid_tokens, state.seen, state.classes
    most, least = state.max_tokens, state.min_tokens
    ended, ended_tokens = state.finished, state.finished_tokens
    running, part = state.running, state.running_part
    columns = (np.int64(seen.ctypes.data), np.int64(most.ctypes.data), np.int64(least.ctypes.data))
    for i in range(len(rows)):
        if i + FETCH_AHEAD < len(rows):
            ahead = rows[i + FETCH_AHEAD]
            for column in columns:
                prefetch(column + 8 * ahead)
            prefetch(np.int64(classes.ctypes.data) + 4 * ahead)
        row = rows[i]
        c = classes[row]
        if seen[row] == DONE:
            continue
        if seen[row] != UNSEEN:
            _count_running(at, running[c], part[c], seen[row], -1.0)
        if output_tokens[i] <= least[row]:
            seen[row] = DONE if finished else UNSEEN
            continue
        tokens = min(max(output_tokens[i], 1), at[-1] - 1)
        if finished and output_tokens[i] < most[row]:
            j = _bin(at, tokens - 1)
            ended[c, j] += 1.0
            ended_tokens[c, j] += tokens
        else:
            _count_running(at, running[c], part[c], tokens, 1.0)
        seen[row] = DONE if finished else tokens


@njit
def _count_running(at: I64, running: F64, part: F64, tokens: int, by: float) -> None:
    """Count (1.0) or take back (-1.0) an answer that is longer than ``tokens``."""
    j = _bin(at, tokens)
    running[j] += by
    part[j] += by * (tokens - at[j]) / (at[j + 1] - at[j])


@njit
def refit(state: LengthState) -> None:
    """Recompute ``survival``, ``centre`` and ``area`` of every class."""
    parent, at = state.parent, state.grid_tokens
    ended, tokens = state.finished.copy(), state.finished_tokens.copy()
    running, part = state.running.copy(), state.running_part.copy()
    _pool(state, ended, tokens, running, part)
    weight = _weights(state.parent, state.level, ended)
    middle = np.empty(len(at))
    middle[:-1] = (at[:-1] + 1 + at[1:]) / 2
    middle[-1] = at[-1]
    _curve(state, 0, ended[0], tokens[0], running[0], part[0], state.prior, middle, 1.0)
    for c in range(1, len(parent)):
        p = parent[c]
        above, centre = state.survival[p], state.centre[p]
        _curve(state, c, ended[c], tokens[c], running[c], part[c], above, centre, weight[c])


@njit
def _pool(state: LengthState, ended: F64, tokens: F64, running: F64, part: F64) -> None:
    """Add the counts of each class to the class above, in place, weighted so that each class has its share of the job:
    a plan runs some classes before others, and a sample meets small ones too often. Totals stay what they are."""
    parent, rows = state.parent, state.class_rows
    seen, of_seen = np.zeros(len(parent)), np.zeros(len(parent))
    for c in range(len(parent) - 1, -1, -1):
        seen[c] += ended[c].sum() + running[c].sum()
        if c > 0 and seen[c] > 0:
            seen[parent[c]] += seen[c]
            of_seen[parent[c]] += rows[c]
    for c in range(len(parent) - 1, 0, -1):
        if seen[c] > 0:
            fair = rows[c] / of_seen[parent[c]] * seen[parent[c]]
            weight = (fair + EVEN_ANSWERS) / (seen[c] + EVEN_ANSWERS)
            ended[parent[c]] += weight * ended[c]
            tokens[parent[c]] += weight * tokens[c]
            running[parent[c]] += weight * running[c]
            part[parent[c]] += weight * part[c]


@njit
def _curve(
    state: LengthState,
    c: int,
    ended: F64,
    tokens: F64,
    running: F64,
    part: F64,
    above: F64,
    centre_above: F64,
    weight: float,
) -> None:
    """Curve of class c: its own counts plus ``weight`` answers distributed as ``above`` says, bent past the oldest
    answer that goes on."""
    at = state.grid_tokens
    at_risk = ended.sum() + running.sum()
    oldest, log_ratio = _beyond(at, ended, running, part, above, weight)
    state.survival[c, 0], state.area[c, 0], alive = 1.0, 0.0, 1.0
    for j in range(len(at) - 1):
        stays = above[j + 1] / above[j] if above[j] > 0 else 0.0
        if log_ratio < 0.0 and at[j] >= oldest:
            stays **= math.exp(log_ratio * oldest / at[j])
        at_risk = max(0.0, at_risk - running[j])
        expected = weight * alive * (1.0 - stays)
        events = ended[j] + expected
        exposed = at_risk + part[j] + weight * alive
        hazard = min(1.0, events / exposed) if exposed > 1e-9 else 1.0 - stays
        s = state.survival[c, j]
        centre = (tokens[j] + expected * centre_above[j]) / events if events > 0 else centre_above[j]
        state.survival[c, j + 1] = s * (1.0 - hazard)
        state.centre[c, j] = centre
        state.area[c, j + 1] = state.area[c, j] + s * ((1.0 - hazard) * (at[j + 1] - at[j]) + hazard * (centre - at[j]))
        at_risk = max(0.0, at_risk - ended[j])
        alive *= stays
    state.centre[c, -1] = at[-1]


@njit
def _beyond(at: I64, ended: F64, running: F64, part: F64, above: F64, weight: float) -> tuple[float, float]:
    """What answers may expect past the oldest one that goes on (running or cut off): that one's age, and log of the
    hazard over that of ``above`` there, at most 0.

    The ratio is (weight + ends seen) / (weight + ends that ``above`` expects of the answers seen): Poisson counts under
    a gamma prior (frailty, Vaupel 1979), where what was seen at an age counts by (age / oldest) squared. It fades with
    1 / age, to its root at twice the age: a class whose answers do not end is not like the class above, but how long
    that lasts nobody has seen (``benchmarks/lengths.py --together``: weaker in time or age costs jobs that run to
    their caps, stronger those that do not). Not above 0, since the answers that end first are the short ones.
    """
    oldest = 0.0
    for j in range(len(at) - 1):
        if running[j] > 0:
            oldest = float(at[j])
    if oldest == 0.0:
        return 0.0, 0.0
    at_risk = ended.sum() + running.sum()
    ends, expects = weight, weight
    for j in range(len(at) - 1):
        at_risk = max(0.0, at_risk - running[j])
        near = min(1.0, at[j] / oldest) ** 2
        if above[j] > 0:
            expects += near * (1.0 - above[j + 1] / above[j]) * (at_risk + part[j])
        ends += near * ended[j]
        at_risk = max(0.0, at_risk - ended[j])
    return oldest, min(0.0, math.log(ends / expects))


@njit
def _weights(parent: I32, level: I32, ended: F64) -> F64:
    """Answers that the curve of the class above counts for, float64 [c]."""
    count, bins = ended.shape
    n, mean, spread = np.zeros(count), np.zeros(count), np.zeros(count)
    index = np.arange(bins).astype(np.float64)  # of bins: a log scale, so that one huge answer does not decide
    for c in range(count):
        n[c] = ended[c].sum()
        if n[c] > 0:
            mean[c] = (ended[c] * index).sum() / n[c]
            spread[c] = (ended[c] * (index - mean[c]) ** 2).sum()
    weight = np.ones(count)
    for k in range(level.max() + 1):
        ratio = _variance_ratio(parent, level, k, n, mean, spread)
        for c in range(1, count):
            if level[c] == k:
                weight[c] = 1.0 / ratio
    return weight


@njit
def _variance_ratio(parent: I32, level: I32, k: int, n: F64, mean: F64, spread: F64) -> float:
    """Variance of class means around the class above, over the variance inside classes, for level k.
    ``spread``: sum of squares around the class's mean. The job's own variance counts like two answers inside."""
    inside, inside_n = 0.0, 0.0
    if n[0] > 1:
        inside, inside_n = 2.0 * spread[0] / (n[0] - 1.0), 2.0
    between, free, gain = 0.0, 0.0, 0.0
    for c in range(1, len(n)):
        if level[c] == k and n[c] > 0:
            share = 1.0 - n[c] / n[parent[c]]  # a class is part of the mean it is compared with
            inside += spread[c]
            inside_n += max(0.0, n[c] - 1.0)
            between += n[c] * (mean[c] - mean[parent[c]]) ** 2
            free += share
            gain += n[c] * share
    guess = PREFIX_RATIO if k < PREFIX_LEVELS else LENGTH_RATIO
    if gain <= 1e-9 or free <= 1e-9 or inside <= 0.0 or inside_n <= 0.0:
        return guess
    variance = inside / inside_n
    found = (between / variance - free) / gain
    noise = 2.0 * free * ((1.0 + guess * gain / free) / gain) ** 2
    ratio = (found / noise + 1.0 / guess) / (1.0 / noise + 1.0 / guess**2)
    return float(max(ratio, 1e-3))


@njit
def _capped(at: I64, area: F64, survival: F64, tokens: int) -> tuple[float, float]:
    """Expected length of an answer capped at ``tokens``, and P(answer > tokens), from one class's curves [g]; straight
    lines between grid points."""
    if tokens >= at[-1]:
        return area[-1], survival[-1]
    j = _bin(at, tokens)
    inside = (tokens - at[j]) / (at[j + 1] - at[j])
    return area[j] + inside * (area[j + 1] - area[j]), survival[j] + inside * (survival[j + 1] - survival[j])


@njit
def expected_tokens(state: LengthState) -> F64:
    """Expected output tokens of each row before it starts, float64 [n]: an answer that would end before ``min_tokens``
    ends there, one that would pass ``max_tokens`` is cut there."""
    classes, most, least, at = state.classes, state.max_tokens, state.min_tokens, state.grid_tokens
    area, survival = state.area, state.survival
    out = np.empty(len(classes))
    for row in range(len(out)):
        c = classes[row]
        if most[row] >= at[-1]:
            out[row] = area[c, -1]
        elif row > 0 and most[row] == most[row - 1] and least[row] == least[row - 1] and c == classes[row - 1]:
            out[row] = out[row - 1]
            continue
        else:
            out[row] = _capped(at, area[c], survival[c], most[row])[0]
        if least[row] > 0:
            out[row] += least[row] - _capped(at, area[c], survival[c], least[row])[0]
    return np.maximum(out, 1.0)


@njit
def remaining(state: LengthState, row: int, generated: int) -> float:
    """Expected further tokens of a running row: at least one, at most what ``max_tokens`` leaves."""
    c, most = state.classes[row], state.max_tokens[row] - generated
    at, area, survival = state.grid_tokens, state.area[c], state.survival[c]
    sure = max(0, state.min_tokens[row] - generated)
    if sure > 0:
        return (
            float(sure)
            + _capped(at, area, survival, state.max_tokens[row])[0]
            - _capped(at, area, survival, state.min_tokens[row])[0]
        )
    now, alive = _capped(at, area, survival, generated)
    if alive <= 1e-12:
        return float(max(1, min(most, generated)))  # longer than anything expected: as much again
    total = _capped(at, area, survival, state.max_tokens[row])[0]
    return float(max(1.0, min(float(most), (total - now) / alive)))
