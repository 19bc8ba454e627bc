"""How long answers will be: what a planner may know about output lengths, and the only way it gets to know it.

Every class of requests (``plait.tree.classes``) has a survival curve S(t) = P(answer longer than t tokens). It is the
Kaplan-Meier curve of the answers seen, where running answers and those cut off by ``max_tokens`` count as censored,
shrunk towards the curve of the class above: that curve counts like ``weight`` answers more (Susarla & Van Ryzin 1976:
the mean of a Dirichlet process after censored observations). The weight is not a setting: it is the ratio of the
variance inside classes to the variance between them, estimated from the same answers (credibility theory, Buhlmann
1967). Before any answer is seen the job's own curve is a Lomax curve with a mean of ``PRIOR_TOKENS``.

``observe`` and ``refit`` are compiled functions over ``LengthState``, so that a compiled loop may call them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plait._numba import njit
from plait.errors import InputError
from plait.table import F64, I32, I64, RequestTable
from plait.tree.classes import Classes, cut_classes
from plait.tree.prefix import PrefixTree

PRIOR_TOKENS = 256.0
"""Mean answer assumed until answers are seen; counts like one answer."""
SAMPLE_FRACTION = 0.01
"""Share of a job that is run first to learn its lengths (BlendServe section 5.1: 1 %)."""
_DONE = -2
_UNSEEN = -1


def _grid() -> I64:
    """Tokens at which curves are kept: 0, 1, 2, ... then 8 an octave, up to 2**20."""
    octaves = np.unique(np.round(2.0 ** (np.arange(20 * 8 + 1) / 8)))
    return np.concatenate(([0], octaves)).astype(np.int64)


class LengthState(NamedTuple):
    """What ``observe`` and ``refit`` work on: n rows, c classes, g grid points; bin j is (grid[j], grid[j + 1]]."""

    classes: I32  # [n]
    max_tokens: I64  # [n]
    parent: I32  # [c]
    level: I32  # [c]
    grid_tokens: I64  # [g]
    seen_bin: I32  # [n] where a running row is counted, or _UNSEEN, or _DONE
    finished: F64  # [c, g] answers that ended in bin j
    finished_tokens: F64  # [c, g] their tokens
    running: F64  # [c, g] answers known to be longer than grid[j], and no more than that
    survival: F64  # [c, g] P(answer > grid[j])
    centre: F64  # [c, g] mean length of answers that end in bin j
    area: F64  # [c, g] sum of the survival curve up to grid[j]: the expected length if capped there


class Lengths:
    """Output-length estimates of one job. True lengths enter through ``observe`` or ``known`` only."""

    def __init__(self, table: RequestTable, classes: Classes, seed: int = 0) -> None:
        n, c, grid = table.n, len(classes.parent), _grid()
        self.state = LengthState(
            classes=classes.of_row,
            max_tokens=table.max_tokens,
            parent=classes.parent,
            level=classes.level,
            grid_tokens=grid,
            seen_bin=np.full(n, _UNSEEN, np.int32),
            finished=np.zeros((c, len(grid))),
            finished_tokens=np.zeros((c, len(grid))),
            running=np.zeros((c, len(grid))),
            survival=np.zeros((c, len(grid))),
            centre=np.zeros((c, len(grid))),
            area=np.zeros((c, len(grid))),
        )
        self._rows_by_class = classes.rows
        self._seed = seed
        self._expected: F64 | None = None
        self._known: I64 | None = None
        refit(self.state)

    @staticmethod
    def unknown(table: RequestTable, tree: PrefixTree, seed: int = 0) -> Lengths:
        """Nothing seen yet: every row has the prior until rows are observed."""
        return Lengths(table, cut_classes(tree, table.prompt_tokens), seed)

    @staticmethod
    def sampled(
        table: RequestTable,
        tree: PrefixTree,
        output_tokens_of: Callable[[I64], I64],
        fraction: float = SAMPLE_FRACTION,
        seed: int = 0,
    ) -> Lengths:
        """After the sample has run: ``output_tokens_of(rows)`` returns the true lengths of the planned rows only."""
        lengths = Lengths.unknown(table, tree, seed)
        rows = lengths.sample_rows(fraction)
        lengths.observe_rows(rows, output_tokens_of(rows))
        lengths.refresh()
        return lengths

    @staticmethod
    def known(table: RequestTable, output_tokens: I64, seed: int = 0) -> Lengths:
        """True lengths, given away. Rows of one length bin form a class whose curve drops in that bin."""
        true = np.minimum(np.maximum(np.asarray(output_tokens, np.int64), 1), table.max_tokens)
        if len(true) != table.n:
            raise InputError(f"{len(true)} output lengths for {table.n} rows")
        bins, of_row = np.unique(np.searchsorted(_grid(), true), return_inverse=True)
        c = len(bins) + 1
        parent, level = np.zeros(c, np.int32), np.zeros(c, np.int32)
        parent[0] = -1
        rows = np.argsort(true, kind="stable")
        lengths = Lengths(table, Classes((of_row + 1).astype(np.int32), parent, level, rows), seed)
        lengths._know(true)
        return lengths

    def _know(self, true: I64) -> None:
        state = self.state
        self._known, self._expected = true, true.astype(np.float64)
        for c in range(1, len(state.parent)):
            own = true[state.classes == c]
            state.survival[c] = (state.grid_tokens < own.min()).astype(np.float64)
            state.centre[c] = own.mean()
            state.area[c] = np.minimum(state.grid_tokens, own.mean())

    @property
    def exact(self) -> bool:
        """Whether the lengths are known."""
        return self._known is not None

    @property
    def classes(self) -> I32:
        """Class of each row, int32 [n]."""
        return self.state.classes

    @property
    def grid_tokens(self) -> I64:
        """Tokens at which curves are kept, int64 [g]."""
        return self.state.grid_tokens

    @property
    def survival(self) -> F64:
        """P(answer longer than ``grid_tokens``) of each class, float64 [c, g]; changed in place by ``refresh``."""
        return self.state.survival

    @property
    def expected(self) -> F64:
        """Expected output tokens of each row, float64 [n], at most its ``max_tokens``; computed when first asked for
        after a ``refresh``. A row that has been observed keeps the expectation of its class."""
        if self._expected is None:
            self._expected = _expected(self.state)
        return self._expected

    def expected_remaining(self, row: int, generated: int) -> float:
        """Expected further tokens of a row that has produced ``generated`` and goes on."""
        if self._known is not None:
            return float(max(1, self._known[row] - generated))
        return remaining(self.state, row, generated)

    def sample_rows(self, fraction: float = SAMPLE_FRACTION) -> I64:
        """Rows to run first, int64 [k]: every (1 / fraction)-th of the rows sorted by class and prompt length, from a
        random start, so each class is met in proportion; then one row of each class cut by prefix that was missed."""
        rows, state = self._rows_by_class, self.state
        n = len(rows)
        if n == 0:
            return np.zeros(0, np.int64)
        rng = np.random.default_rng(self._seed)
        k = min(n, max(1, math.ceil(fraction * n)))
        picked = rows[((np.arange(k) + rng.random()) * (n / k)).astype(np.int64)]
        top = np.arange(len(state.parent))
        for c in range(1, len(top)):
            if state.level[c] > 0:
                top[c] = top[state.parent[c]]
        of_row = top[state.classes]
        by_chance = rng.permutation(n)
        classes, first = np.unique(of_row[by_chance], return_index=True)
        missed = by_chance[first[~np.isin(classes, of_row[picked])]]
        return np.concatenate((picked, missed))

    def observe(self, row: int, output_tokens: int, finished: bool) -> None:
        """A row has produced ``output_tokens`` so far. O(1); estimates change at the next ``refresh``."""
        observe(self.state, row, output_tokens, finished)

    def observe_rows(self, rows: I64, output_tokens: I64, finished: bool = True) -> None:
        """``observe`` for many rows at once."""
        _observe_rows(self.state, rows, output_tokens, finished)

    def refresh(self) -> None:
        """Recompute curves and estimates from all that was observed. O(classes x grid). Known lengths stay."""
        if self._known is None:
            refit(self.state)
            self._expected = None


@njit
def observe(state: LengthState, row: int, output_tokens: int, finished: bool) -> None:
    """Count one observation. A row is counted once, where it was seen last; after it finished nothing changes it. An
    answer as long as its ``max_tokens`` was cut off: it would have been longer."""
    if state.seen_bin[row] == _DONE:
        return
    c, grid = state.classes[row], state.grid_tokens
    if state.seen_bin[row] >= 0:
        state.running[c, state.seen_bin[row]] -= 1.0
    tokens = min(max(output_tokens, 1), grid[-1])
    if finished and output_tokens < state.max_tokens[row]:
        j = np.searchsorted(grid, tokens) - 1
        state.finished[c, j] += 1.0
        state.finished_tokens[c, j] += tokens
        state.seen_bin[row] = _DONE
    else:
        j = np.searchsorted(grid, tokens, side="right") - 1
        state.running[c, j] += 1.0
        state.seen_bin[row] = _DONE if finished else j


@njit
def _observe_rows(state: LengthState, rows: I64, output_tokens: I64, finished: bool) -> None:
    for i in range(len(rows)):
        observe(state, rows[i], output_tokens[i], finished)


@njit
def refit(state: LengthState) -> None:
    """Recompute ``survival``, ``centre`` and ``area`` of every class."""
    parent, grid = state.parent, state.grid_tokens
    ended, tokens, running = state.finished.copy(), state.finished_tokens.copy(), state.running.copy()
    for c in range(len(parent) - 1, 0, -1):
        ended[parent[c]] += ended[c]
        tokens[parent[c]] += tokens[c]
        running[parent[c]] += running[c]
    weight = _weights(state.parent, state.level, ended)
    mean = (PRIOR_TOKENS + tokens[0].sum() + (running[0] * grid).sum()) / (1.0 + ended[0].sum())
    prior = (1.0 + grid / mean) ** -2.0
    middle = np.empty(len(grid))
    middle[:-1] = (grid[:-1] + 1 + grid[1:]) / 2
    middle[-1] = grid[-1]
    for c in range(len(parent)):
        if c == 0:
            _curve(state, 0, ended[0], tokens[0], running[0], prior, middle, 1.0)
        else:
            p = parent[c]
            _curve(
                state, c, ended[c], tokens[c], running[c], state.survival[p], state.centre[p], weight[state.level[c]]
            )


@njit
def _curve(
    state: LengthState, c: int, ended: F64, tokens: F64, running: F64, above: F64, centre_above: F64, weight: float
) -> None:
    """Curve of class c: its own counts plus ``weight`` answers distributed as ``above`` says."""
    grid = state.grid_tokens
    at_risk = ended.sum() + running.sum()
    state.survival[c, 0], state.area[c, 0] = 1.0, 0.0
    for j in range(len(grid) - 1):
        at_risk -= running[j]  # seen up to grid[j] only: says nothing about this bin
        expected = weight * (above[j] - above[j + 1])
        events = ended[j] + expected
        exposed = at_risk + weight * above[j]
        if exposed > 0:
            hazard = min(1.0, events / exposed)
        else:
            hazard = 1.0 - above[j + 1] / above[j] if above[j] > 0 else 1.0
        s = state.survival[c, j]
        centre = (tokens[j] + expected * centre_above[j]) / events if events > 0 else centre_above[j]
        state.survival[c, j + 1] = s * (1.0 - hazard)
        state.centre[c, j] = centre
        state.area[c, j + 1] = state.area[c, j] + s * (
            (1.0 - hazard) * (grid[j + 1] - grid[j]) + hazard * (centre - grid[j])
        )
        at_risk -= ended[j]
    state.centre[c, -1] = grid[-1]


@njit
def _weights(parent: I32, level: I32, ended: F64) -> F64:
    """Answers that the class above counts for, by level, float64 [levels]: variance inside classes over variance
    between them, both of the bin number (a log scale, so that one huge answer does not decide it)."""
    c_count, bins = ended.shape
    n, mean, spread = np.zeros(c_count), np.zeros(c_count), np.zeros(c_count)
    index = np.arange(bins).astype(np.float64)
    for c in range(c_count):
        n[c] = ended[c].sum()
        if n[c] > 0:
            mean[c] = (ended[c] * index).sum() / n[c]
            spread[c] = (ended[c] * (index - mean[c]) ** 2).sum()
    weight = np.empty(level.max() + 1)
    for k in range(len(weight)):
        inside, inside_n, between, lost, gain = 0.0, 0.0, 0.0, 0.0, 0.0
        for c in range(1, c_count):
            if level[c] == k and n[c] > 0:
                share = 1.0 - n[c] / n[parent[c]]
                inside += spread[c]
                inside_n += n[c] - 1.0
                between += n[c] * (mean[c] - mean[parent[c]]) ** 2
                lost += share
                gain += n[c] * share
        variance = inside / inside_n if inside_n > 0 else 0.0
        excess = between - variance * lost
        if excess > 0 and gain > 0:
            weight[k] = variance * gain / excess
        else:
            weight[k] = 1e9 if inside_n > 0 else 1.0
    return weight


@njit
def _capped(state: LengthState, c: int, tokens: int) -> tuple[float, float]:
    """Expected length of a class-c answer capped at ``tokens``, and P(answer > tokens); straight lines in a bin."""
    grid = state.grid_tokens
    if tokens >= grid[-1]:
        return state.area[c, -1], state.survival[c, -1]
    j = np.searchsorted(grid, tokens, side="right") - 1
    inside = (tokens - grid[j]) / (grid[j + 1] - grid[j])
    area = state.area[c, j] + inside * (state.area[c, j + 1] - state.area[c, j])
    return area, state.survival[c, j] + inside * (state.survival[c, j + 1] - state.survival[c, j])


@njit
def _expected(state: LengthState) -> F64:
    out = np.empty(len(state.classes))
    for row in range(len(out)):
        out[row] = max(1.0, _capped(state, state.classes[row], state.max_tokens[row])[0])
    return out


@njit
def remaining(state: LengthState, row: int, generated: int) -> float:
    """Expected further tokens of a running row: at least one, at most what ``max_tokens`` leaves."""
    c, most = state.classes[row], state.max_tokens[row] - generated
    now, alive = _capped(state, c, generated)
    if alive <= 1e-12:
        return float(max(1, min(most, generated)))  # longer than anything expected: as much again
    total = _capped(state, c, state.max_tokens[row])[0]
    return float(max(1.0, min(float(most), (total - now) / alive)))


def paper_estimate(tree: PrefixTree, sample_rows: I64, sample_tokens: I64) -> F64:
    """BlendServe's rule, float64 [n]: a row gets the mean of the sampled answers in its subtree; a subtree without a
    sample takes its sibling's, that is the mean of the nearest subtree above that has one."""
    total, count = np.zeros(tree.n_nodes), np.zeros(tree.n_nodes)
    np.add.at(total, tree.node_of[sample_rows], sample_tokens)
    np.add.at(count, tree.node_of[sample_rows], 1.0)
    _subtree_means(tree.parent, total, count)
    return total[tree.node_of]


@njit
def _subtree_means(parent: I32, total: F64, count: F64) -> None:
    """Turn per-node sums into subtree means, in place; without a sample the mean above."""
    for v in range(len(parent) - 1, 0, -1):
        total[parent[v]] += total[v]
        count[parent[v]] += count[v]
    total[0] = total[0] / count[0] if count[0] > 0 else PRIOR_TOKENS
    for v in range(1, len(parent)):
        total[v] = total[v] / count[v] if count[v] > 0 else total[parent[v]]
