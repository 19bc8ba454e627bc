"""The Lagrangian bound against prices tried at every start, and against the optimum."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unitstep.test_kernel import Backlog, backlogs

from plait._numba import njit
from plait.table import I64
from plait.unitstep.bounds import best_bound, mean_busy_time
from plait.unitstep.kernel import total_completion
from plait.unitstep.lp import cheapest, fluid_prices, lagrangian_bound, lp_order
from plait.unitstep.orders import starts_of


def least_total(s: I64, o: I64, budget: int) -> int:
    """Optimal TEL by branch and bound over starts."""
    rows = np.lexsort((s, o))
    best = total_completion(starts_of("latency", s, o, budget), o)
    held = np.zeros(2 * (best + int(np.max(o)) + 2), np.int64)
    return int(_search(s[rows], o[rows], budget, best, held))


@njit
def _first_fit(s: int, o: int, budget: int, held: I64, start: int, last: int) -> int:
    """First start from ``start`` on at which the request fits beside ``held``; beyond ``last`` if there is none."""
    while start <= last:
        j = 1
        while j <= o and held[start + j] + s + j <= budget:
            j += 1
        if j > o:
            return start
        start += 1
    return start


@njit
def _search(s: I64, o: I64, budget: int, best: int, held: I64) -> int:
    """Every start of every request in turn, left out only where the rest cannot end in time: placing more never
    makes room, so what does not fit at an early step yet will not fit there later. Equal ones start in order."""
    n = len(s)
    start, total, k = np.full(n, -1), np.zeros(n + 1, np.int64), 0
    placed = np.zeros(n, np.bool_)
    while k >= 0:
        if placed[k]:
            held[start[k] + 1 : start[k] + 1 + o[k]] -= s[k] + np.arange(1, o[k] + 1)
            placed[k] = False
        start[k] = _first_fit(s[k], o[k], budget, held, start[k] + 1, best)
        total[k + 1] = total[k] + start[k] + o[k]
        if total[k + 1] + o[k + 1 :].sum() >= best:
            k -= 1
            continue
        held[start[k] + 1 : start[k] + 1 + o[k]] += s[k] + np.arange(1, o[k] + 1)
        placed[k] = True
        least = total[k + 1]
        for i in range(k + 1, n):
            least += _first_fit(s[i], o[i], budget, held, 0, best) + o[i]
        if least >= best:
            continue
        if k == n - 1:
            best = total[n]
            continue
        k += 1
        twin = s[k] == s[k - 1] and o[k] == o[k - 1]
        start[k] = start[k - 1] - 1 if twin else -1
    return best


@settings(max_examples=200, deadline=None)
@given(
    backlogs(most=6, longest=25),
    st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), min_size=1, max_size=8),
    st.sampled_from([0.01, 0.1, 1.0]),
)
def test_the_cheapest_start_is_that_of_every_integer_start_tried(
    backlog: Backlog, cells: list[tuple[int, float]], scale: float
) -> None:
    s, o, _ = backlog
    edges = np.append(0, np.cumsum([width for width, _ in cells]))
    prices = scale * np.array([price for _, price in cells])
    horizon = int(edges[-1])
    by_step = np.zeros(horizon + 30)
    by_step[1 : horizon + 1] = np.repeat(prices, np.diff(edges))
    expected = 0.0
    for prompt, output in zip(s, o, strict=True):
        growth = prompt + np.arange(1, output + 1)
        expected += min(t + output + by_step[t + 1 : t + 1 + output] @ growth for t in range(horizon + 1))
    total, held = cheapest(s, o, prices, edges)
    assert abs(total - expected) < 1e-9 * expected
    assert np.sum(held) <= np.sum(s * o + o * (o + 1) / 2) + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.one_of(backlogs(most=4, longest=5), backlogs(most=8, longest=3)))
def test_bounds_are_below_the_optimum(backlog: Backlog) -> None:
    s, o, budget = backlog
    optimum = least_total(s, o, budget)
    assert mean_busy_time(s, o, budget) <= optimum * (1 + 1e-9)
    assert lagrangian_bound(s, o, budget, float(optimum)) <= optimum * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(100, 400))
def test_bounds_are_below_schedules_of_many_requests(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    s, o = generator.integers(1, 300, n), generator.integers(1, 200, n)
    tel = total_completion(starts_of("latency", s, o, 900), o)
    bound = best_bound(s, o, 900, tel)
    assert mean_busy_time(s, o, 900) <= bound.tel <= tel
    assert bound.tel > 0.8 * tel


def test_the_fluid_price_falls_by_one_over_the_area_served() -> None:
    s, o = np.array([1, 3]), np.array([1, 4])  # areas 2 and 22
    assert np.allclose(fluid_prices(s, o, 2, np.array([0.0, 1.0, 6.5, 12.0])), [1.0, 0.5, 0.25, 0.0])


@settings(max_examples=15, deadline=None)
@given(backlogs(most=40))
def test_sorted_lp_lists_each_request_once(backlog: Backlog) -> None:
    assert sorted(lp_order(*backlog).tolist()) == list(range(len(backlog[0])))
