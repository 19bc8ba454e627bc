"""Lagrangian bound of the time-indexed linear programme of the unit-step model (research.md §B), and Sorted-LP.

With a price on memory at each step, every request picks its cheapest start alone; what all pay, minus the price of the
whole budget, is below every schedule's TEL whatever the prices. Good prices come from a coarse LP over classes of
similar requests and cells of time; the bound is then evaluated over all requests and all integer starts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait._numba import njit
from plait.table import F64, I64
from plait.unitstep.kernel import area

CELLS = 120
FINE_CELLS = 400
"""Cells of the coarse LP, and of the prices that the bound is evaluated at."""
LP_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Prices tried first: this much of the LP's, the rest the fluid ones."""
CLASSES = 160
OUTPUT_GROUPS = 4
"""Beyond CLASSES requests a class is a quarter, by output, of a run of neighbours in area."""
EARLIER = 1.5
"""Cells are shorter early, where requests are short and many complete: edges grow with this power."""
POLISH_ROUNDS = 300
POLISHED_ROWS = 150_000
"""Rounds that polish the prices, at most, and requests in all of them: a round takes time by their number."""
SLACK = 1.25
"""Horizon of the coarse LP, as a multiple of the time that full memory needs (plus the longest output)."""


class Coarse(NamedTuple):
    """Classes of requests: ``of`` int64 [n], mean lengths and members float64 [classes]; cells of time between
    ``edges`` int64 [cells + 1], from 0 to the horizon."""

    of: I64
    s: F64
    o: F64
    members: F64
    edges: I64


class Solution(NamedTuple):
    """Optimum of the coarse LP: price of a token for a step, by cell, and mean start step, by class."""

    prices: F64
    starts: F64


def lagrangian_bound(prompt_tokens: I64, output_tokens: I64, kv_tokens: int, target: float) -> float:
    """Bound on TEL from below for requests that pass ``check_requests``; seconds for a few thousand.

    ``target``, the TEL of a known schedule, sizes the steps that polish the prices (Polyak's rule).
    """
    s, o = prompt_tokens, output_tokens
    coarse = coarsen(s, o, kv_tokens)
    edges = _edges(coarse.edges[-1], FINE_CELLS)
    budget = kv_tokens * np.diff(edges).astype(np.float64)
    best, kept, over = -np.inf, np.zeros(len(budget)), budget
    middle = (edges[:-1] + edges[1:]) / 2
    from_lp = np.interp(middle, (coarse.edges[:-1] + coarse.edges[1:]) / 2, solve(coarse, kv_tokens).prices)
    fluid = fluid_prices(s, o, kv_tokens, middle)
    trials = [share * from_lp + (1 - share) * fluid for share in LP_SHARES]
    pace = 1.0
    for turn in range(len(trials) + min(POLISH_ROUNDS, POLISHED_ROWS // len(s))):
        if turn < len(trials):
            prices = trials[turn]
        else:
            gradient = np.where((over < 0) & (kept == 0), 0.0, over)
            square = float(np.sum(gradient * gradient / budget))
            if square == 0 or best >= target:
                break
            prices = np.maximum(kept + pace * (target - best) * gradient / budget / square, 0.0)
        total, held = cheapest(s, o, prices, edges)
        bound = total - float(budget @ prices)
        if bound > best:
            best, kept, over = bound, prices, held - budget
        elif turn >= len(trials):
            pace *= 0.85
    return best


def fluid_prices(s: I64, o: I64, kv_tokens: int, at: F64) -> F64:
    """Prices at steps ``at`` if memory were divisible and served by ascending area: they fall by 1 / area a step."""
    areas = np.sort(area(s, o))
    done = np.concatenate([[0.0], np.cumsum(areas)]) / kv_tokens
    prices: F64 = (len(s) - np.interp(at, done, np.arange(len(s) + 1.0))) / kv_tokens
    return prices


def lp_order(prompt_tokens: I64, output_tokens: I64, kv_tokens: int) -> I64:
    """Sorted-LP: rows by mean start in the LP relaxation, ties by area, int64 [n]."""
    coarse = coarsen(prompt_tokens, output_tokens, kv_tokens)
    start = np.round(solve(coarse, kv_tokens).starts[coarse.of], 3)
    return np.lexsort((area(prompt_tokens, output_tokens), start))


def coarsen(s: I64, o: I64, kv_tokens: int) -> Coarse:
    """Classes and cells for these requests."""
    n = len(s)
    areas = area(s, o)
    runs = CLASSES if n <= CLASSES else CLASSES // OUTPUT_GROUPS
    run = np.empty(n, np.int64)
    run[np.argsort(areas, kind="stable")] = np.arange(n) * min(runs, n) // n
    of = run
    if n > CLASSES:
        by_output = np.lexsort((o, run))
        first = np.searchsorted(run[by_output], np.arange(runs))
        size = np.bincount(run, minlength=runs)
        of = np.empty(n, np.int64)
        place = np.arange(n) - first[run[by_output]]
        of[by_output] = run[by_output] * OUTPUT_GROUPS + place * OUTPUT_GROUPS // size[run[by_output]]
    members = np.bincount(of).astype(np.float64)
    horizon = SLACK * float(np.sum(areas)) / kv_tokens + float(np.max(o))
    edges = _edges(int(np.ceil(horizon)), CELLS)
    return Coarse(of, np.bincount(of, s) / members, np.bincount(of, o) / members, members, edges)


def _edges(horizon: int, cells: int) -> I64:
    """Edges of at most ``cells`` cells of whole steps, from 0 to ``horizon``."""
    return np.unique(np.ceil(horizon * np.linspace(0, 1, cells + 1) ** EARLIER).astype(np.int64))


def solve(coarse: Coarse, kv_tokens: int) -> Solution:
    """Solve the LP: each class spreads its members over starts at cells, mean usage of a cell at most the budget.

    A start at the horizon holds no cell's budget, so a solution exists.
    """
    import highspy  # a solver of several megabytes, of use to few callers

    classes, cells, begins = len(coarse.members), len(coarse.edges) - 1, coarse.edges.astype(np.float64)
    column_start, index, value = _columns(coarse.s, coarse.o, coarse.edges)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = classes * len(begins), classes + cells
    lp.col_cost_ = np.tile(begins, classes) + np.repeat(coarse.o, len(begins))
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.full(lp.num_col_, np.inf)
    lp.row_lower_ = np.concatenate([coarse.members, np.full(cells, -np.inf)])
    lp.row_upper_ = np.concatenate([coarse.members, np.full(cells, float(kv_tokens))])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = column_start, index, value
    # Highs() prints a banner before it can be told not to, and would spoil --json; the class below it does not.
    highs = highspy.Highs.__new__(highspy.Highs)
    super(highspy.Highs, highs).__init__()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("solver", "ipm")
    highs.setOptionValue("run_crossover", "off")
    highs.passModel(lp)
    highs.run()
    solution = highs.getSolution()
    share = np.array(solution.col_value).reshape(classes, len(begins))
    starts: F64 = share @ begins / coarse.members
    # HiGHS gives the change of cost per unit of budget in a cell: minus the price of holding a token through it.
    return Solution(np.maximum(-np.array(solution.row_dual)[classes:], 0.0) / np.diff(begins), starts)


@njit
def _columns(s: F64, o: F64, edges: I64) -> tuple[I64, I64, F64]:
    """Compressed columns (class, start cell): its convexity row, then the mean usage of each cell it overlaps."""
    classes, cells = len(s), len(edges) - 1
    size = 0
    for j in range(classes):
        for c in range(cells + 1):
            size += 1 + np.searchsorted(edges[c:cells], edges[c] + o[j])
    start = np.zeros(classes * (cells + 1) + 1, np.int64)
    index = np.empty(size, np.int64)
    value = np.empty(size, np.float64)
    k = 0
    for j in range(classes):
        for c in range(cells + 1):
            index[k], value[k] = j, 1.0
            k += 1
            cell = c
            while cell < cells and edges[cell] < edges[c] + o[j]:
                index[k] = classes + cell
                value[k] = _held(s[j], o[j], edges[c], edges[cell], edges[cell + 1]) / (edges[cell + 1] - edges[cell])
                k += 1
                cell += 1
            start[j * (cells + 1) + c + 1] = k
    return start, index, value


@njit
def _held(s: float, o: float, start: int, low: int, high: int) -> float:
    """Tokens x steps that a request started at ``start`` holds in the steps low + 1 .. high."""
    a, b = max(low - start, 0.0), min(high - start, o)
    return (b - a) * s + (b * (b + 1) - a * (a + 1)) / 2 if b > a else 0.0


@njit
def cheapest(s: I64, o: I64, prices: F64, edges: I64) -> tuple[float, F64]:
    """Sum over requests of the least cost of any integer start, and tokens x steps held in each cell at those starts.

    ``prices`` [cells] of a token for a step. A start from the horizon on pays nothing, so none is later than it.
    Between two steps where its start or its end crosses an edge, a request's cost is quadratic in its start.
    """
    cells = len(prices)
    price, moment = np.zeros(cells + 1), np.zeros(cells + 1)  # up to each edge: sum of prices, of step x price
    for c in range(cells):
        low, high = float(edges[c]), float(edges[c + 1])
        price[c + 1] = price[c] + prices[c] * (high - low)
        moment[c + 1] = moment[c] + prices[c] * (high * (high + 1) - low * (low + 1)) / 2
    held = np.zeros(cells)
    total = 0.0
    for i in range(len(s)):
        best, at = _cheapest_start(s[i], o[i], prices, edges, price, moment)
        total += best
        c = int(np.searchsorted(edges, at, side="right")) - 1
        while c < cells and edges[c] < at + o[i]:
            held[c] += _held(float(s[i]), float(o[i]), at, edges[c], edges[c + 1])
            c += 1
    return total, held


@njit
def _cheapest_start(s: int, o: int, prices: F64, edges: I64, price: F64, moment: F64) -> tuple[float, int]:
    """Least cost and its start: over each quadratic piece, its ends and the integers beside its vertex."""
    cells, horizon = len(prices), edges[-1]
    a = 0  # cell of the step after the start
    b = int(np.searchsorted(edges, o, side="right")) - 1  # cell of the step after the end; ``cells`` beyond the horizon
    best, at = float(horizon + o), horizon
    t = 0
    first = _cost(s, o, t, a, b, prices, edges, price, moment)
    while t < horizon and t + o < best:
        until = edges[a + 1]
        if b < cells:
            until = min(until, edges[b + 1] - o)
        last = _cost(s, o, until, a, b, prices, edges, price, moment)
        if first < best:
            best, at = first, t
        bend = prices[a] - (prices[b] if b < cells else 0.0)  # second difference of the cost
        if bend > 0 and until - t > 1:
            slope = (last - first) / (until - t) - bend * (until - t) / 2
            vertex = -slope / bend
            if 0 < vertex < until - t and first + slope * vertex / 2 < best:
                for x in (t + int(vertex), t + int(vertex) + 1):
                    cost = _cost(s, o, x, a, b, prices, edges, price, moment)
                    if cost < best:
                        best, at = cost, x
        t, first = until, last
        if t == edges[a + 1]:
            a += 1
        if b < cells and t + o == edges[b + 1]:
            b += 1
    return best, at


@njit
def _cost(s: int, o: int, t: int, a: int, b: int, prices: F64, edges: I64, price: F64, moment: F64) -> float:
    """Completion step plus the price of the memory held, started at t in cell a and ended in cell b."""
    end = t + o
    paid = price[b] - price[a]
    weighted = moment[b] - moment[a]
    low = edges[a]
    paid -= prices[a] * (t - low)
    weighted -= prices[a] * (t * (t + 1.0) - low * (low + 1.0)) / 2
    if b < len(prices):
        low = edges[b]
        paid += prices[b] * (end - low)
        weighted += prices[b] * (end * (end + 1.0) - low * (low + 1.0)) / 2
    cost: float = end + (s - t) * paid + weighted
    return cost
