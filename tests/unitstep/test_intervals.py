"""Unit-step schedules from lower ends of the output lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unitstep.memory import check_flow

from plait.errors import CapacityError, InputError
from plait.unitstep.flow import EVICTED
from plait.unitstep.intervals import by_lower_end, interval_around, sorted_f_amin

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
