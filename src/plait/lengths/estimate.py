"""The estimates of one job: classes, sample plan, observations, and BlendServe's own rule to compare with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np

from plait._numba import njit
from plait.errors import InputError, UsageError
from plait.lengths.classes import PREFIX_LEVELS, Classes, cut_classes
from plait.lengths.survival import (
    PRIOR_TOKENS,
    UNSEEN,
    LengthState,
    expected_tokens,
    grid,
    observe,
    observe_rows,
    prior_curve,
    refit,
    remaining,
)
from plait.table import F64, I32, I64, RequestTable
from plait.tree.prefix import PrefixTree

SAMPLE_FRACTION = 0.01
"""Share of a job that is run first to learn its lengths (BlendServe: 1 %); its answers are kept."""


GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly over any stretch."""
RAREST = 0.05
"""No answer is drawn that is longer than this share of its class: the far end of a curve is a guess, and the longest of
many draws would be nothing else."""
CLASS_SAMPLES = 8
"""Answers of each class that a sample should hold; five a class serve as well as 5 % of the job (research.md §A)."""


class Lengths:
    """Output-length estimates of one job. True lengths enter through ``observe`` or ``known`` only."""

    def __init__(self, table: RequestTable, classes: Classes, seed: int = 0) -> None:
        n, c, at = table.n, len(classes.parent), grid()
        self.state = LengthState(
            classes=classes.of_row,
            max_tokens=table.max_tokens,
            min_tokens=table.min_tokens,
            parent=classes.parent,
            level=classes.level,
            class_rows=classes.counts(),
            prior=prior_curve(at, _rows_by_cap(table.max_tokens, at)),
            grid_tokens=at,
            seen=np.full(n, UNSEEN, np.int64),
            finished=np.zeros((c, len(at))),
            finished_tokens=np.zeros((c, len(at))),
            running=np.zeros((c, len(at))),
            running_part=np.zeros((c, len(at))),
            survival=np.zeros((c, len(at))),
            centre=np.zeros((c, len(at))),
            area=np.zeros((c, len(at))),
        )
        self.answers: tuple[I64, I64] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        """Rows and output tokens of the sample that was observed before planning."""
        self.begun_with = 0.0
        """Answers seen elsewhere, counted among those that finished."""
        self._rows_by_class = classes.rows
        self._place = np.empty(n, np.int64)
        self._place[classes.rows] = np.arange(n)
        self._seed = seed
        self._expected: F64 | None = None
        self._known: I64 | None = None
        refit(self.state)

    @staticmethod
    def unknown(table: RequestTable, tree: PrefixTree, seed: int = 0) -> Lengths:
        """Nothing seen yet: every row has the prior until rows are observed. Where no row can end before its
        ``max_tokens``, all is known."""
        if table.n and np.array_equal(table.min_tokens, table.max_tokens):
            return Lengths.known(table, table.max_tokens, seed)
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
        lengths.answers = (rows, output_tokens_of(rows))
        lengths.observe_rows(*lengths.answers)
        lengths.refresh()
        return lengths

    @staticmethod
    def known(table: RequestTable, output_tokens: I64, seed: int = 0) -> Lengths:
        """True lengths, given away. Rows of one length bin form a class whose curve drops in that bin."""
        if len(output_tokens) != table.n:
            raise InputError(f"{len(output_tokens)} output lengths for {table.n} rows")
        true = np.minimum(np.maximum(np.asarray(output_tokens, np.int64), 1), table.max_tokens)
        bins, of_row = np.unique(np.searchsorted(grid(), true), return_inverse=True)
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

    def part(self, rows: I64) -> Lengths:
        """Estimates of some of the rows; row k of the result is ``rows[k]``. All parts share counts and curves of the
        classes: what one observes, the others know after their next ``refresh``."""
        part, state = copy.copy(self), self.state
        part.state = state._replace(
            classes=state.classes[rows],
            max_tokens=state.max_tokens[rows],
            min_tokens=state.min_tokens[rows],
            seen=state.seen[rows],
        )
        place = self._place[rows]
        part._rows_by_class = np.argsort(place, kind="stable").astype(np.int64)
        part._place = np.empty(len(rows), np.int64)
        part._place[part._rows_by_class] = np.arange(len(rows))
        part._known = None if self._known is None else self._known[rows]
        part._expected = None if part._known is None else part._known.astype(np.float64)
        local = np.full(len(self._place), -1, np.int64)
        local[rows] = np.arange(len(rows))
        asked, tokens = self.answers
        here = local[asked] >= 0
        part.answers = (local[asked[here]], tokens[here])
        return part

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
            self._expected = expected_tokens(self.state)
        return self._expected

    def drawn(self, rows: I64, generated: I64, shift: float = 0.0) -> F64:
        """Lengths, float64 [k], that ``rows`` may turn out to have, given the tokens generated so far, int64 [k]: each
        row at a quantile of its own, the quantiles of a class spread evenly. ``shift`` (0 to 1) makes another draw."""
        if self._known is not None:
            return self._known[rows].astype(np.float64)
        state, at = self.state, self.state.grid_tokens
        least, most, classes = state.min_tokens[rows], state.max_tokens[rows], state.classes[rows]
        so_far = np.where(generated < least, 0, generated)
        level = np.maximum(((self._place[rows] + 1) * GOLDEN + shift) % 1.0, RAREST)
        lengths = np.empty(len(rows))
        by_class = np.argsort(classes, kind="stable")
        for own in np.split(by_class, np.flatnonzero(np.diff(classes[by_class])) + 1) if len(rows) else ():
            curve = state.survival[classes[own[0]]]
            alive = np.interp(so_far[own], at, curve)
            lengths[own] = np.interp(-level[own] * alive, -curve, at)
        return np.clip(lengths, np.maximum(1.0, np.maximum(least, so_far)), most)

    def expected_remaining(self, row: int, generated: int) -> float:
        """Expected further tokens of a row that has produced ``generated`` and goes on."""
        if self._known is not None:
            return float(max(1, self._known[row] - generated))
        return remaining(self.state, row, generated)

    def sample_rows(self, fraction: float = SAMPLE_FRACTION) -> I64:
        """Rows to run first, int64 [k]: every (1 / fraction)-th of the rows sorted by class and prompt length, from a
        random start, so each class is met in proportion; then more rows of classes cut by prefix that were met fewer
        than CLASS_SAMPLES times, as far as the sample at most doubles (but one of each). Without rows whose length is
        fixed, and classes that begin with as many answers (``begin_with``)."""
        if not 0 < fraction <= 1:
            raise UsageError(f"sample fraction is {fraction}; a number above 0 and at most 1 is needed")
        rows, n = self._rows_by_class, len(self._rows_by_class)
        if n == 0:
            return np.zeros(0, np.int64)
        rng = np.random.default_rng(self._seed)
        k = min(n, max(1, math.ceil(fraction * n)))
        picked = rows[((np.arange(k) + rng.random()) * (n / k)).astype(np.int64)]
        of_row = self.prefix_class()
        count = int(of_row.max()) + 1
        wanted = max(1, min(CLASS_SAMPLES, k // len(np.unique(of_row))))
        lacking = np.maximum(0, wanted - np.bincount(of_row[picked], minlength=count))
        free = np.ones(n, np.bool_)
        free[picked] = False
        others = rng.permutation(np.flatnonzero(free & (lacking[of_row] > 0)))
        others = others[np.argsort(of_row[others], kind="stable")]
        begin = np.searchsorted(of_row[others], np.arange(count))
        rank = np.arange(len(others)) - begin[of_row[others]]
        sample = np.concatenate((picked, others[rank < lacking[of_row[others]]]))
        known = (self.state.finished + self.state.running).sum(axis=1) >= CLASS_SAMPLES
        fixed = self.state.min_tokens[sample] >= self.state.max_tokens[sample]
        unknown: I64 = sample[~known[of_row[sample]] & ~fixed]
        return unknown

    def prefix_class(self) -> I64:
        """Nearest class cut by prefix of each row, int64 [n]."""
        state = self.state
        top = np.arange(len(state.parent))
        for c in range(1, len(top)):
            if state.level[c] >= PREFIX_LEVELS:
                top[c] = top[state.parent[c]]
        found: I64 = top[state.classes]
        return found

    def begin_with(self, c: int, counts: F64) -> None:
        """Let class c begin with answers seen elsewhere, float64 [3, g]: how many ended in each bin, their tokens, and
        how many were cut off there. Estimates change at the next ``refresh``."""
        self.begun_with += float(counts[0].sum())
        self.state.finished[c] += counts[0]
        self.state.finished_tokens[c] += counts[1]
        self.state.running[c] += counts[2]

    def observe(self, row: int, output_tokens: int, finished: bool) -> None:
        """A row has produced ``output_tokens`` so far. O(1); estimates change at the next ``refresh``."""
        observe(self.state, row, output_tokens, finished)

    def observe_rows(self, rows: I64, output_tokens: I64, finished: bool = True) -> None:
        """``observe`` for many rows at once."""
        observe_rows(self.state, rows, output_tokens, finished)

    def refresh(self) -> None:
        """Recompute curves and estimates from all that was observed. O(classes x grid). Known lengths stay."""
        if self._known is None:
            refit(self.state)
            self._expected = None


def _rows_by_cap(max_tokens: I64, at: I64) -> F64:
    """How many rows' caps are in each bin (at[j], at[j + 1]], float64 [g]."""
    bins = np.searchsorted(at, np.clip(max_tokens, 1, at[-1])) - 1
    return np.bincount(bins, minlength=len(at)).astype(np.float64)


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
