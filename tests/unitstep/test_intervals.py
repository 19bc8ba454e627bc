"""Unit-step schedules from lower ends of the output lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unitstep.memory import check_flow

from plait.errors import CapacityError, InputError
from plait.unitstep.flow import EVICTED, spells_of
from plait.unitstep.gittins import index
from plait.unitstep.intervals import by_interval, by_lower_end, interval_around, sorted_f_amin
from plait.unitstep.turnbull import QUANTILES, quantiles

factors = st.sampled_from([1.0, 1.5, 3.0, 10.0, np.inf])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 25), factor=factors, kv_tokens=st.integers(40, 120))
def test_memory_holds_and_every_request_ends_whatever_was_believed(
    seed: int, n: int, factor: float, kv_tokens: int
) -> None:
    generator = np.random.default_rng(seed)
    s, o = generator.integers(1, 20, n), generator.integers(1, 20, n)
    lower, upper = interval_around(o, factor, kv_tokens - s, seed)
    assert np.all((lower >= 1) & (lower <= o) & (o <= upper))
    check_flow(by_lower_end(s, o, lower, kv_tokens), kv_tokens)
    check_flow(by_interval(s, o, lower, upper, kv_tokens), kv_tokens)
    check_flow(sorted_f_amin(s, o, lower, kv_tokens, keep_progress=True), kv_tokens)
    check_flow(sorted_f_amin(s, o, lower, kv_tokens), kv_tokens, keeps_progress=False)


def test_with_exact_lower_ends_nothing_is_evicted() -> None:
    generator = np.random.default_rng(1)
    s, o = generator.integers(1, 20, 60), generator.integers(1, 20, 60)
    for flow in (by_lower_end(s, o, o, 90), sorted_f_amin(s, o, o, 90)):
        assert flow.counts[EVICTED] == 0


def test_an_overflow_evicts_the_smallest_lower_bound_under_amin_and_most_area_left_in_ours() -> None:
    s, o, lower = np.array([1, 10]), np.array([9, 9]), np.array([1, 5])
    evicted = [
        flow.spells[: flow.counts[EVICTED] + 2, 0][np.argmin(flow.spells[: flow.counts[EVICTED] + 2, 3])]
        for flow in (sorted_f_amin(s, o, lower, 20), by_lower_end(s, o, lower, 20))
    ]
    assert evicted == [0, 1]


@pytest.mark.parametrize("lower", [[0, 1], [3, 1]])
def test_a_lower_end_outside_one_to_the_true_length_is_named(lower: list[int]) -> None:
    with pytest.raises(InputError, match="row 0: lower end"):
        by_lower_end(np.array([1, 1]), np.array([2, 2]), np.array(lower), 10)


def test_a_request_that_never_fits_is_named() -> None:
    with pytest.raises(CapacityError, match="row 0"):
        sorted_f_amin(np.array([9]), np.array([2]), np.array([1]), 10)


def test_an_upper_end_below_the_true_length_is_named() -> None:
    with pytest.raises(InputError, match="row 1: upper end 1"):
        by_interval(np.array([1, 1]), np.array([2, 2]), np.array([2, 1]), np.array([2, 1]), 10)


def test_decisions_read_the_true_length_only_when_a_request_ends() -> None:
    generator = np.random.default_rng(5)
    s, o, lower = generator.integers(1, 20, 40), generator.integers(10, 20, 40), np.full(40, 3)
    upper = np.full(40, 30)
    longer = o + generator.integers(0, 9, 40)
    first = int(o.min())  # up to here nothing has ended under either
    flows = [by_interval(s, true, lower, upper, 120) for true in (o, longer)]
    begun = [{tuple(map(int, spell[:3])) for spell in spells_of(flow) if 0 <= spell[1] < first} for flow in flows]
    assert begun[0] == begun[1]


def test_intervals_beat_lower_ends_where_they_are_wide() -> None:
    generator = np.random.default_rng(6)
    s = generator.integers(1, 60, 300)
    o = np.maximum(1, generator.gamma(2.0, 30.0, 300)).astype(np.int64)
    lower, upper = interval_around(o, 10.0, 1_000 - s, 1)
    means = [flow.finish.mean() for flow in (by_interval(s, o, lower, upper, 1_000), by_lower_end(s, o, lower, 1_000))]
    assert means[0] < 0.98 * means[1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 20), st.integers(0, 25))
def test_an_index_is_the_least_area_a_completion_over_all_ways_to_give_up(ends: list[int], s: int, made: int) -> None:
    lengths = sorted(end for end in ends if end > made)
    if not lengths:
        return
    areas = [
        sum(sum(s + j for j in range(made + 1, min(end, limit) + 1)) for end in lengths)
        / sum(end <= limit for end in lengths)
        for limit in lengths
    ]
    assert index(s, made, np.array(sorted(ends), np.float64)) == pytest.approx(min(areas))


def test_wide_intervals_are_filled_by_what_narrow_ones_say() -> None:
    narrow, wide = np.full(200, 40), np.full(20, 4)
    found = quantiles(np.concatenate([narrow, wide]), np.concatenate([narrow + 4, np.full(20, 400)]))
    assert found.shape == (220, QUANTILES)
    assert np.all((found[:200] >= 40) & (found[:200] <= 44))
    assert np.mean((found[200:] >= 38) & (found[200:] <= 44)) > 0.8
    assert np.all(np.diff(found) >= 0)
