"""From a goal to a policy: the simulator judges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.events import Capacity
from plait.lengths import Lengths
from plait.plan import FRONT, GOALS, Forecast, Machine, Objective, outlook
from tests.simulation import STEP_TIME, small_job


def forecast(makespan_s: float, mean_s: float) -> Forecast:
    """Two answers, the later one at the end."""
    finish_s = np.array([2 * mean_s - makespan_s, makespan_s])
    return Forecast("any", makespan_s, 1.0, mean_s, 0, np.arange(2), finish_s)


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(0.6, 1)), min_size=1, max_size=8), st.sampled_from(sorted(GOALS))
)
def test_the_chosen_order_is_fast_enough_for_its_goal_and_none_such_is_sooner(
    points: list[tuple[float, float]], goal: str
) -> None:
    forecasts = [forecast(makespan, share * makespan) for makespan, share in points]
    chosen = Objective(goal).choose(forecasts)
    limit_s = (1 + GOALS[goal]) * min(f.makespan_s for f in forecasts)
    assert chosen.makespan_s <= limit_s
    assert not any(f.makespan_s <= limit_s and f.mean_completion_s < chosen.mean_completion_s for f in forecasts)


def test_a_deadline_rules_out_orders_that_are_too_slow() -> None:
    fast, middle, soon = forecast(100, 90), forecast(102, 60), forecast(120, 50)
    assert Objective("latency").choose([fast, middle, soon]) is soon
    assert Objective("latency", deadline_s=110).choose([fast, middle, soon]) is middle
    assert Objective("balanced", deadline_s=101).choose([fast, middle, soon]) is fast


def test_a_deadline_that_no_order_meets_is_answered_as_far_as_possible() -> None:
    slow, some = forecast(100, 99), forecast(200, 110)
    assert Objective(deadline_s=50).choose([slow, some]) is some  # one of its two answers comes after 20 s


def test_only_goals_that_weigh_or_must_be_in_time_are_worth_many_forecasts() -> None:
    assert Objective().candidates() == ("blend",)
    assert Objective("latency").candidates() == ("latency",)
    assert Objective("balanced").candidates() == Objective("latency", deadline_s=9.0).candidates() == FRONT
    assert Objective("balanced", policy="fcfs").candidates() == ("fcfs",)


@pytest.mark.parametrize("overlapped", [0.0, 1.0])
def test_balanced_lies_between_throughput_and_latency(overlapped: float) -> None:
    job = small_job(5, 500, 6)
    lengths = Lengths.known(job.table, job.output_tokens)
    machine = Machine(
        Capacity(4000, max_batched_tokens=256, takes_prefill_budget=True), STEP_TIME._replace(overlapped=overlapped)
    )
    found = outlook(job.table, job.tree, lengths, machine, ["fcfs"], objective=Objective("balanced"))
    by_name = {each.policy: each for each in found.forecasts}
    assert set(by_name) == {*FRONT, "fcfs"} and found.forecasts[-1].policy == "fcfs"
    assert found.chosen.makespan_s <= 1.03 * by_name["blend"].makespan_s
    assert found.chosen.mean_completion_s < 0.9 * by_name["blend"].mean_completion_s
    assert not found.deadlines.lines(str)
