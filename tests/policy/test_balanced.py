"""Orders between throughput and latency."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.lengths import Lengths
from plait.policy.base import Order, View, order_function
from plait.simulate import simulate
from tests.simulation import STEP_TIME, capacity_for, small_job

SEQUENTIAL = STEP_TIME._replace(overlapped=0.0)


def order_of(name: str, seed: int, n: int, overlapped: bool) -> Order:
    """Of a small job with groups and known lengths."""
    job = small_job(seed, n, 4)
    step_time = STEP_TIME if overlapped else SEQUENTIAL
    view = View(job.table, job.tree, job.output_tokens.astype(float), capacity_for(2000), step_time, seed)
    return order_function(name)(view)


def all_rows(order: Order) -> list[int]:
    """Both sides together."""
    return [*order.rows.tolist(), *([] if order.right is None else order.right.tolist())]


@given(st.integers(0, 1000), st.integers(1, 60), st.booleans(), st.floats(0, 1))
def test_every_row_is_in_the_order_once(seed: int, n: int, overlapped: bool, weight: float) -> None:
    assert sorted(all_rows(order_of(f"balanced:{weight}", seed, n, overlapped))) == list(range(n))


@given(st.integers(0, 1000), st.integers(1, 60), st.booleans())
def test_weight_zero_is_the_throughput_order(seed: int, n: int, overlapped: bool) -> None:
    assert all_rows(order_of("balanced:0", seed, n, overlapped)) == all_rows(order_of("blend", seed, n, overlapped))


def test_without_a_weight_both_ranks_count_the_same() -> None:
    assert all_rows(order_of("balanced", 1, 50, True)) == all_rows(order_of("balanced:0.5", 1, 50, True))


@pytest.mark.parametrize("name", ["balanced:2", "balanced:-0.1", "balanced:nan", "balanced:x"])
def test_a_weight_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="from 0"):
        order_function(name)


def test_other_policies_take_no_weight() -> None:
    with pytest.raises(UsageError, match="unknown policy"):
        order_function("blend:0.5")


@pytest.mark.parametrize("overlapped", [False, True])
def test_more_weight_brings_answers_sooner_on_average(overlapped: bool) -> None:
    job = small_job(2, 600)
    step_time = STEP_TIME if overlapped else SEQUENTIAL
    mean_s = []
    for weight in (0, 0.5, 1):
        known = Lengths.known(job.table, job.output_tokens)
        capacity = capacity_for(4000)
        result = simulate(job.table, job.tree, job.output_tokens, known, capacity, step_time, f"balanced:{weight}")
        mean_s.append(float(np.mean(result.finish_s)))
    assert mean_s[0] > 1.1 * mean_s[1] > 1.1 * mean_s[2]
