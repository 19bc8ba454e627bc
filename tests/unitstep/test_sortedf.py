"""Batches of Sorted-F."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unitstep.test_kernel import Backlog, backlogs

from plait.errors import UsageError
from plait.unitstep.sortedf import best_batch, dp_order, quantile_order, sorted_f_order, swap_order


@settings(max_examples=150, deadline=None)
@given(backlogs(most=8))
def test_the_exact_batch_has_the_least_f_of_all_that_fit(backlog: Backlog) -> None:
    s, o, budget = backlog
    sets = [list(rows) for k in range(1, len(s) + 1) for rows in combinations(range(len(s)), k)]
    least = min(np.sum(o[rows]) / len(rows) ** 2 for rows in sets if np.sum((s + o)[rows]) <= budget)
    chosen = best_batch(s, o, budget)
    assert np.sum((s + o)[chosen]) <= budget
    assert np.isclose(np.sum(o[chosen]) / np.sum(chosen) ** 2, least)


@settings(max_examples=60, deadline=None)
@given(backlogs(most=40))
def test_each_solver_lists_each_request_once(backlog: Backlog) -> None:
    for solve in (dp_order, swap_order, sorted_f_order):
        assert sorted(solve(*backlog).tolist()) == list(range(len(backlog[0])))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1000, 3000))
def test_quantile_greedy_fills_batches_within_the_budget_sorted_by_output(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    s, o = generator.integers(1, 300, n), generator.integers(1, 200, n)
    order = quantile_order(s, o, 2000)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, sorted_f_order(s, o, 2000))
    batch = np.append(0, np.cumsum(np.diff(o[order]) < 0))
    assert np.max(np.bincount(batch)) < n / 10
    half = np.mean((o * (s + o))[order[: n // 2]])
    assert half < np.mean((o * (s + o))[order[n // 2 :]])


@pytest.mark.parametrize(("solve", "n"), [(dp_order, 101), (swap_order, 5001), (quantile_order, 999)])
def test_a_solver_out_of_its_range_says_what_to_use(solve: object, n: int) -> None:
    with pytest.raises(UsageError, match="; use sorted-f"):
        solve(np.ones(n, np.int64), np.ones(n, np.int64), 10)  # type: ignore[operator]
