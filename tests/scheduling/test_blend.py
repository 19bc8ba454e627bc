"""The blend's rules: what a step should hold, how much of it, and what the running rows still need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.events import Capacity, Finished, Preempted, Progress, Started, Step
from plait.lengths import Lengths
from plait.model.steptime import StepTime, paper_a100_8b
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.scheduling.blend import prefill_for, queued_for, spare
from plait.scheduling.kv import free_tokens
from plait.scheduling.profile import look_ahead, running_rows
from plait.scheduling.state import DECODE, PREFILL, Records
from plait.table import RequestTable
from plait.tree.prefix import PrefixTree

WIDE = paper_a100_8b()._replace(gemm_base_s=3e-3, comm_s_per_token=2e-5, comm_base_s=9e-3)


def scheduler_of(prompt: list[int], output: list[int], step_time: StepTime = WIDE) -> Scheduler:
    """A blend that knows the lengths."""
    table = RequestTable.of(prompt)
    lengths = Lengths.known(table, np.array(output))
    tree = PrefixTree.without_sharing(len(prompt))
    capacity = Capacity(400_000, 1, 0, 8192, takes_prefill_budget=True, preempts_on_request=True)
    return Scheduler(View(table, tree, lengths.expected, capacity, step_time), lengths, "blend")


def state_of(prompt: list[int], output: list[int], step_time: StepTime = WIDE) -> Records:
    return scheduler_of(prompt, output, step_time).state.c


@given(busy_s=st.floats(0.02, 0.2), decoding=st.integers(0, 200), comm_s=st.sampled_from([0.0, 2e-5, 1e-4]))
def test_a_step_gets_the_prefill_that_brings_its_longer_side_to_the_wanted_time(
    busy_s: float, decoding: int, comm_s: float
) -> None:
    c = state_of([10], [10], WIDE._replace(comm_s_per_token=comm_s, comm_base_s=9e-3 if comm_s else 0.0))
    c["decoding"] = decoding
    tokens = prefill_for(c, busy_s) + decoding
    compute_s = 3e-3 + WIDE.gemm_s_per_token * tokens
    network_s = comm_s * tokens + (9e-3 if comm_s else 0.0)
    assert max(compute_s, network_s) == pytest.approx(busy_s) or tokens == decoding or tokens == 8192


def started(prompt: list[int], output: list[int], step_time: StepTime = WIDE) -> Scheduler:
    """All rows that are admitted at once run and have a token."""
    scheduler = scheduler_of(prompt, output, step_time)
    for row in scheduler.decide(0.0).admit.tolist():
        scheduler.update(Started(row, 0.0))
    return scheduler


def test_steps_left_are_those_of_the_longest_running_row_where_lengths_are_known() -> None:
    scheduler = started([50, 50, 50], [9000, 4000, 200])
    c = scheduler.state.c
    assert scheduler.running == 3
    look_ahead(c)
    tau = scheduler.state.tau
    longest = 9000 - 1
    assert tau[tau < longest].max() <= c["steps_left"] <= tau[tau >= longest].min()


def test_an_idle_engine_has_no_steps_left() -> None:
    c = state_of([50], [9000])
    look_ahead(c)
    assert c["steps_left"] == 0


def test_a_memory_heavy_row_that_was_thrown_out_waits_until_one_has_finished() -> None:
    scheduler = started([50, 50, 5000, 5000], [9000, 9000, 2, 2])
    assert scheduler.running == 4
    scheduler.update(Preempted(0, 1.0, requeue=True))
    assert not len(scheduler.decide(1.0).admit)
    scheduler.update(Finished(2, 2.0, 200, b"{}", output_tokens=2))
    assert not len(scheduler.decide(2.0).admit)  # compute-heavy: what holds the memory runs on
    scheduler.update(Finished(1, 3.0, 200, b"{}", output_tokens=9000))
    assert scheduler.decide(3.0).admit.tolist() == [0]


def test_a_memory_heavy_row_that_was_thrown_out_alone_goes_on() -> None:
    scheduler = started([50, 5000], [9000, 2])
    scheduler.update(Preempted(0, 1.0, requeue=True))
    scheduler.update(Finished(1, 2.0, 200, b"{}", output_tokens=2))
    assert scheduler.decide(2.0).admit.tolist() == [0]


def test_compute_goes_on_beside_a_memory_heavy_row_where_another_one_was_thrown_out() -> None:
    """It may be long until the one that stays has finished."""
    scheduler = started([50, 50, *[5000] * 40], [9000, 9000, *[2] * 40], paper_a100_8b())
    assert 2 < scheduler.running < 42
    for row in range(2, 42):
        if scheduler.state.rows["status"][row] == DECODE:
            scheduler.update(Finished(row, 1.0, 200, b"{}", output_tokens=2))
    scheduler.update(Preempted(1, 2.0, requeue=True))
    admitted = scheduler.decide(2.0).admit
    assert len(admitted) and 1 not in admitted


def test_a_memory_heavy_row_makes_room_for_compute_heavy_ones_though_none_of_its_kind_waits() -> None:
    """Two answers have become longer than was thought and fill the cache."""
    scheduler = scheduler_of([50, 50, *[5000] * 4], [150_000, 150_000, *[2] * 4], paper_a100_8b())
    scheduler.decide(0.0)
    for row, tokens in ((0, 199_000), (1, 199_000)):
        scheduler.update(Started(row, 0.0))
        scheduler.update(Progress(row, 0.0, tokens))
    for row in range(2, 6):
        if scheduler.state.rows["status"][row] == PREFILL:
            scheduler.update(Preempted(row, 0.0, requeue=True))
    preempted = [scheduler.decide(1.0).preempt.tolist() for _ in range(1000)]
    assert [0] in preempted or [1] in preempted


def filled(prompt: list[int], tokens: list[int]) -> Scheduler:
    """Memory-heavy rows that have so many tokens by now, all longer than was thought."""
    scheduler = started(prompt, [20_000] * len(prompt), paper_a100_8b())
    assert scheduler.running == len(prompt)
    for row, count in enumerate(tokens):
        scheduler.update(Progress(row, 1.0, count))
    return scheduler


def test_where_memory_runs_out_the_row_goes_that_costs_least_to_compute_again() -> None:
    """The one that was started last has most tokens: it came back with what it had before it was thrown out."""
    scheduler = filled([50] * 4, [120_000, 60_000, 90_000, 130_000 - 201])
    assert free_tokens(scheduler.state.c) == 1
    assert scheduler.decide(1.0).preempt.tolist() == [1]


def test_a_row_that_frees_too_little_is_not_thrown_out_for_want_of_memory() -> None:
    """Four rows take four more tokens, and none is free: the row of three would have to be followed by another."""
    scheduler = filled([1, 50, 50, 50], [2, 120_000, 139_847, 140_000])
    assert free_tokens(scheduler.state.c) == 0
    assert scheduler.decide(1.0).preempt.tolist() == [1]


def test_nothing_is_thrown_out_while_the_next_step_fits() -> None:
    scheduler = filled([50] * 4, [120_000, 60_000, 90_000, 130_000 - 204])
    assert free_tokens(scheduler.state.c) == 4
    assert not len(scheduler.decide(1.0).preempt)


@pytest.mark.parametrize(("waiting_reads", "share"), [(0.0, 0.5), (1.0, 0.75), (2.0, 1.0), (50.0, 1.0)])
def test_the_last_memory_heavy_rows_leave_less_memory_free(waiting_reads: float, share: float) -> None:
    """``waiting_reads``: seconds of KV reads that those that wait bring, over those that the running ones still do."""
    c = state_of([50] * 8, [9000] * 8)
    assert c["size_right"] == 8
    c["right_memory"], c["running_memory"] = waiting_reads, 1.0
    assert spare(c) == share
    c["head_right"] = 4
    assert spare(c) == 0.5 + min(0.5, waiting_reads / 8)


@given(
    prompts=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    done=st.integers(0, 40_000),
    busy_s=st.floats(0.005, 0.3),
)
def test_a_step_computes_the_wanted_time_whatever_its_tokens_attend_to(
    prompts: list[int], done: int, busy_s: float
) -> None:
    steep = paper_a100_8b()._replace(prefill_attn_s=1e-7)
    scheduler = scheduler_of(prompts, [10] * len(prompts), steep)
    c = scheduler.state.c
    order = scheduler.decide(0.0).admit.tolist()
    done = min(done, int(c["backlog"]) - 1)
    if done:
        scheduler.update(Step(0.0, 0.1, done, 0, 0, 0, 0))
    tokens = int(queued_for(c, busy_s))
    contexts = np.concatenate([np.arange(1, prompts[row] + 1) for row in order])[done:]
    assert tokens <= 8192
    taken_s = steep.gemm_s_per_token * tokens + steep.prefill_attn_s * float(contexts[:tokens].sum())
    one_more_s = steep.gemm_s_per_token + steep.prefill_attn_s * max(prompts)
    if tokens < min(len(contexts), 8192):
        assert busy_s - one_more_s <= taken_s <= busy_s * (1 + 1e-9)


@given(st.lists(st.tuples(st.sampled_from(["start", "preempt", "finish", "decide"]), st.integers(0, 19)), max_size=60))
def test_the_rows_in_prefill_are_listed_by_admission_and_the_running_ones_can_be_told(
    events: list[tuple[str, int]],
) -> None:
    scheduler = scheduler_of([40] * 20, [30] * 20)
    c, rows = scheduler.state.c, scheduler.state.rows
    for name, row in events:
        running = rows["status"][row] in (PREFILL, DECODE)
        if name == "decide":
            scheduler.decide(0.0)
        elif name == "start" and running:
            scheduler.update(Started(row, 0.0))
        elif name == "preempt" and running:
            scheduler.update(Preempted(row, 0.0, requeue=True))
        elif name == "finish" and running:
            scheduler.update(Finished(row, 0.0, 200, b"{}", output_tokens=3))
        listed, at = [], int(c["first_prefill"])
        while at >= 0:
            listed.append(at)
            at = int(rows["behind"][at])
        expected = np.flatnonzero(rows["status"] == PREFILL)
        assert listed == expected[np.argsort(rows["seq"][expected])].tolist()
        assert c["prefill_need"] == rows["need"][expected].sum()
        found = np.empty(scheduler.running, np.int64)
        count = running_rows(c, found)
        assert sorted(found[:count].tolist()) == np.flatnonzero(rows["status"] == DECODE).tolist()
