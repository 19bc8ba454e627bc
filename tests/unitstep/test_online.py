"""Unit-step schedules of requests that arrive over time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unitstep.memory import check_flow

from plait.errors import InputError, UsageError
from plait.unitstep.flow import EVICTED
from plait.unitstep.kernel import area, schedule
from plait.unitstep.online import AGEING, KAPPA, serve, starts_of

POLICIES = ("fcfs", "mc-sf", "size", "area", "latency", "sorted-f-online")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 25),
    policy=st.sampled_from(POLICIES),
    span=st.sampled_from([1, 20, 300]),
    kv_tokens=st.integers(40, 120),
)
def test_memory_holds_and_each_request_runs_once_after_its_arrival(
    seed: int, n: int, policy: str, span: int, kv_tokens: int
) -> None:
    generator = np.random.default_rng(seed)
    s, o, arrival = generator.integers(1, 20, n), generator.integers(1, 20, n), generator.integers(0, span, n)
    flow = serve(policy, s, o, arrival, kv_tokens)
    check_flow(flow, kv_tokens, arrival)
    assert flow.counts[EVICTED] == 0
    assert np.array_equal(starts_of(flow) + o, flow.finish)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 25))
def test_a_backlog_gets_the_schedule_of_the_exact_kernel(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    s, o = generator.integers(1, 20, n), generator.integers(1, 20, n)
    order = np.argsort(o, kind="stable")
    assert np.array_equal(starts_of(serve("mc-sf", s, o, np.zeros(n, np.int64), 60)), schedule(s, o, order, 60))


def test_a_large_request_is_overtaken_only_for_its_area_over_the_ageing() -> None:
    """An endless stream of small requests fills the cache; the large one starts all the same."""
    kv_tokens, small = 400, 6_000
    s, o = np.full(small + 1, 80), np.full(small + 1, 5)
    s[0], o[0] = 390, 4
    arrival = np.concatenate([[10], np.arange(small)])
    starts = starts_of(serve("latency", s, o, arrival, kv_tokens))
    allowed = KAPPA * float(area(s, o)[0]) / (AGEING * kv_tokens)
    overtakers = arrival[1:][(starts[1:] < starts[0]) & (arrival[1:] > 10)]
    assert len(overtakers) > 0
    assert overtakers.max() <= 10 + allowed


def test_sorted_f_online_plans_anew_when_requests_arrive() -> None:
    s, o = np.array([5, 5, 5]), np.array([10, 9, 1])
    starts = starts_of(serve("sorted-f-online", s, o, np.array([0, 1, 2]), 15))
    assert starts[2] < starts[1]


def test_a_policy_without_an_online_form_and_a_negative_arrival_are_refused() -> None:
    one = np.array([1])
    with pytest.raises(UsageError, match="sorted-lp"):
        serve("sorted-lp", one, one, one, 10)
    with pytest.raises(InputError, match="row 0"):
        serve("fcfs", one, one, np.array([-1]), 10)
