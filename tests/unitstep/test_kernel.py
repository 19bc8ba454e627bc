"""Schedules of the unit-step model against a step-by-step count of memory, and bounds against brute force."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import CapacityError, InputError, UsageError
from plait.table import I64
from plait.unitstep.bounds import mean_busy_time
from plait.unitstep.kernel import area, decode, schedule, total_completion
from plait.unitstep.orders import NAMES, starts_of

Backlog = tuple[I64, I64, int]


@st.composite
def backlogs(draw: st.DrawFn, most: int = 25, longest: int = 12) -> Backlog:
    rows = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, longest)), min_size=1, max_size=most))
    s, o = np.array(rows, np.int64).T
    return s.copy(), o.copy(), int(np.max(s + o)) + draw(st.integers(0, 4 * longest))


def usage(s: I64, o: I64, starts: I64) -> I64:
    held = np.zeros(int(np.max(starts + o)) + 1, np.int64)
    for row in range(len(s)):
        for j in range(1, o[row] + 1):
            held[starts[row] + j] += s[row] + j
    return held


@settings(max_examples=150, deadline=None)
@given(backlogs(), st.sampled_from([1, 2, 4, 64]), st.sampled_from([1.0, 1.3, 2.0, np.inf]))
def test_jumping_stepping_and_the_tree_agree_and_never_exceed_the_budget(
    backlog: Backlog, window: int, kappa: float
) -> None:
    s, o, budget = backlog
    key = area(s, o)
    order = np.argsort(key, kind="stable")
    jumped = decode(s, o, order, key, budget, window, kappa)
    assert np.array_equal(jumped, decode(s, o, order, key, budget, window, kappa, every_step=True, by_tree=False))
    assert np.array_equal(jumped, decode(s, o, order, key, budget, window, kappa, every_step=False, by_tree=True))
    assert np.array_equal(jumped, decode(s, o, order, key, budget, window, kappa, every_step=True, by_tree=True))
    assert np.min(jumped) >= 0
    assert np.max(usage(s, o, jumped)) <= budget


@pytest.mark.parametrize("window", [1, 64])
def test_arrays_and_tree_agree_on_a_backlog_where_thousands_run(window: int) -> None:
    generator = np.random.default_rng(5)
    s, o = generator.integers(1, 300, 4_000), generator.integers(1, 200, 4_000)
    order, key = generator.permutation(4_000), area(s, o)
    flat, tree = (decode(s, o, order, key, 250_000, window, 2.0, by_tree=by_tree) for by_tree in (False, True))
    assert np.array_equal(flat, tree)
    assert np.max(np.bincount(flat)) > 1_000


@settings(max_examples=100, deadline=None)
@given(backlogs())
def test_a_strict_list_starts_each_request_at_the_first_step_that_fits(backlog: Backlog) -> None:
    s, o, budget = backlog
    starts = schedule(s, o, np.arange(len(s)), budget)
    t = 0
    for row in range(len(s)):
        while True:
            trial = np.append(starts[:row], t)
            if np.max(usage(s[: row + 1], o[: row + 1], trial)) <= budget:
                break
            t += 1
        assert starts[row] == t


@settings(max_examples=60, deadline=None)
@given(backlogs(most=5, longest=5))
def test_the_bound_is_below_every_list_schedule(backlog: Backlog) -> None:
    s, o, budget = backlog
    best = min(total_completion(schedule(s, o, np.array(order), budget), o) for order in permutations(range(len(s))))
    assert mean_busy_time(s, o, budget) <= best + 1e-9


@settings(max_examples=60, deadline=None)
@given(backlogs(most=40))
def test_latency_is_never_worse_than_a_named_policy(backlog: Backlog) -> None:
    s, o, budget = backlog
    ours = total_completion(starts_of("latency", s, o, budget), o)
    named = [name for name in NAMES if name != "sorted-f-quantile"]
    assert all(ours <= total_completion(starts_of(name, s, o, budget), o) for name in named)


@pytest.mark.parametrize(
    ("s", "o", "budget", "error", "said"),
    [
        ([1, 9], [1, 2], 10, CapacityError, "row 1: 9 prompt"),
        ([1, 0], [1, 2], 10, InputError, "row 1: prompt_tokens is 0"),
        ([1, 1], [-1, 2], 10, InputError, "row 0: output_tokens is -1"),
        ([1.0, np.nan], [1, 2], 10, InputError, "row 1: prompt_tokens is nan"),
        ([1, 1], [np.nan, 2.0], 10, InputError, "row 0: output_tokens is nan"),
        ([1, 1], [1.0, 2.0], 10, InputError, "output_tokens is an array of float64"),
        ([1, 1], [1], 10, InputError, "2 prompt and 1 output lengths"),
        ([], [], 10, InputError, "0 prompt and 0 output lengths"),
        ([1], [1], 0, CapacityError, "KV budget is 0"),
        ([1], [1], np.nan, CapacityError, "KV budget is nan"),
        ([1], [1], 7.5, CapacityError, "KV budget is 7.5"),
    ],
)
def test_a_backlog_that_cannot_run_is_refused_by_row(
    s: list[float], o: list[float], budget: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        starts_of("fcfs", np.array(s), np.array(o), budget)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="no unit-step form"):
        starts_of("nope", np.array([1]), np.array([1]), 10)


@settings(max_examples=40, deadline=None)
@given(backlogs(most=3, longest=3))
def test_the_bound_is_below_the_optimum_over_all_starts(backlog: Backlog) -> None:
    s, o, budget = backlog
    within = range(int(np.sum(o)))
    totals = [
        total_completion(np.array(starts), o)
        for starts in product(within, repeat=len(s))
        if 0 in starts and np.max(usage(s, o, np.array(starts))) <= budget
    ]
    assert mean_busy_time(s, o, budget) <= min(totals) + 1e-9
