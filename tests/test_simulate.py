"""The simulator: every schedule obeys the machine, and the compiled loop is the scheduler object's schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bounds import bounds
from plait.drive import drive
from plait.errors import CapacityError, InputError
from plait.events import EngineRequest, Event, Finished, Started
from plait.lengths import Lengths
from plait.model.steptime import StepTime
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.simulate import Result, simulate
from plait.simulated_engine import SimulatedEngine
from plait.table import RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree
from tests.simulation import POLICIES, STEP_TIME, Job, capacity_for, lengths_for, small_job


def seconds(st: StepTime, prefill: int, pairs: int, decodes: int, context: int) -> float:
    """Time of an overlapped step, written out again."""
    compute = max(st.gemm_s_per_token * (prefill + decodes), st.weights_s) + st.prefill_attn_s * pairs
    memory = st.kv_read_s_per_token * context
    return max(compute, memory) + st.interference * min(compute, memory) + st.overhead_s


def check(job: Job, result: Result, kv_tokens: int, chunk: int) -> None:
    """Each request once, memory never exceeded, tokens conserved, time adds up."""
    n, steps = job.table.n, result.steps
    assert sorted(result.completion_order.tolist()) == list(range(n))
    assert np.all(result.start_s >= result.admit_s) and np.all(result.finish_s >= result.start_s)
    assert steps["kv_tokens"].max() <= kv_tokens
    assert np.all(steps["prefill_tokens"] + steps["decode_seqs"] <= np.maximum(chunk, steps["decode_seqs"] + 1))
    restarts = result.preemptions
    decoded = int(steps["decode_seqs"].sum())
    total = int(job.output_tokens.sum())
    assert total - n - restarts <= decoded <= total - n  # a restart's first token comes from its prefill
    assert int(steps["prefill_tokens"].sum()) == result.prefill_tokens
    private = job.table.prompt_tokens - job.tree.prefix_tokens[job.tree.node_of]
    assert result.prefill_tokens >= int(private.sum())
    again = [
        seconds(
            STEP_TIME,
            int(s["prefill_tokens"]),
            int(s["prefill_context_tokens"]),
            int(s["decode_seqs"]),
            int(s["decode_context_tokens"]),
        )
        for s in steps
    ]
    assert np.allclose(again, steps["duration_s"]) and np.isclose(sum(again), result.makespan_s)
    assert np.isclose(result.finish_s.max(), result.makespan_s)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 60),
    groups=st.integers(0, 5),
    policy=st.sampled_from(POLICIES),
    knowledge=st.sampled_from(["known", "sampled", "unknown"]),
    block=st.sampled_from([1, 16]),
    kv_tokens=st.integers(480, 4000),
)
def test_every_schedule_obeys_the_machine(
    seed: int, n: int, groups: int, policy: str, knowledge: str, block: int, kv_tokens: int
) -> None:
    job = small_job(seed, n, groups)
    capacity = capacity_for(kv_tokens, block)
    result = simulate(
        job.table, job.tree, job.output_tokens, lengths_for(job, knowledge), capacity, STEP_TIME, policy, seed
    )
    check(job, result, kv_tokens, capacity.max_batched_tokens)
    limit = bounds(job.table, job.tree, job.output_tokens, STEP_TIME, capacity, restarts=result.preemptions)
    if block == 1:
        assert limit.best_s <= result.makespan_s * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 50),
    groups=st.integers(0, 4),
    policy=st.sampled_from(POLICIES),
    knowledge=st.sampled_from(["known", "sampled", "unknown"]),
    kv_tokens=st.integers(480, 3000),
)
def test_the_object_and_the_compiled_loop_give_the_same_schedule(
    seed: int, n: int, groups: int, policy: str, knowledge: str, kv_tokens: int
) -> None:
    job = small_job(seed, n, groups)
    capacity = capacity_for(kv_tokens)
    compiled = simulate(
        job.table, job.tree, job.output_tokens, lengths_for(job, knowledge), capacity, STEP_TIME, policy, seed
    )
    lengths = lengths_for(job, knowledge)
    scheduler = Scheduler(View(job.table, job.tree, lengths.expected, capacity, STEP_TIME, seed), lengths, policy)
    engine = SimulatedEngine(job.table, job.tree, job.output_tokens, capacity, STEP_TIME)
    finish = np.full(n, np.nan)

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            assert np.isnan(finish[event.row])
            finish[event.row] = event.t_s

    drive(scheduler, engine, lambda row: EngineRequest(row, "", {}, None, 1), sink)
    assert scheduler.done == n
    assert np.allclose(finish, compiled.finish_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_schedule(policy: str) -> None:
    job = small_job(3, 80, 4)
    runs = [
        simulate(
            job.table,
            job.tree,
            job.output_tokens,
            lengths_for(job, "sampled"),
            capacity_for(1500),
            STEP_TIME,
            policy,
            seed=7,
        )
        for _ in range(2)
    ]
    assert np.array_equal(runs[0].finish_s, runs[1].finish_s)


def test_a_request_that_can_never_fit_is_named() -> None:
    table = RequestTable.of([10, 500])
    with pytest.raises(CapacityError, match=r"row 1: 500 prompt \+ 20 output tokens"):
        simulate(
            table,
            PrefixTree.without_sharing(2),
            np.array([5, 20]),
            Lengths.known(table, np.array([5, 20])),
            capacity_for(512),
            STEP_TIME,
            "fcfs",
        )


def test_output_lengths_below_one_are_named() -> None:
    table = RequestTable.of([10, 50])
    with pytest.raises(InputError, match="row 1: output length is 0"):
        simulate(
            table,
            PrefixTree.without_sharing(2),
            np.array([5, 0]),
            Lengths.unknown(table, PrefixTree.without_sharing(2)),
            capacity_for(512),
            STEP_TIME,
            "fcfs",
        )


def round_robin() -> Job:
    """Case plan-01: six groups of twenty, 400 shared and 40 own tokens, in round robin order."""
    n = 120
    prompt = np.full(n, 440)
    tree = tree_from_groups(prompt, np.arange(n) % 6, np.full(n, 400))
    return Job(RequestTable.of(prompt, np.full(n, 4)), tree, np.full(n, 4))


def computed_share(job: Job, policy: str, gate: bool) -> tuple[float, list[Event]]:
    """Share of the possible reuse a policy gets from a cache that holds two groups, and the events of the run."""
    from dataclasses import replace

    capacity = replace(capacity_for(1200, 16, 512, 8), prefix_lookup_at_submit=gate)
    lengths = Lengths.known(job.table, job.output_tokens)
    scheduler = Scheduler(View(job.table, job.tree, lengths.expected, capacity, STEP_TIME), lengths, policy)
    engine = SimulatedEngine(job.table, job.tree, job.output_tokens, capacity, STEP_TIME)
    events: list[Event] = []
    drive(scheduler, engine, lambda row: EngineRequest(row, "", {}, None, 4), lambda event: events.append(event))
    prefilled = sum(event.prefill_tokens for event in events if hasattr(event, "prefill_tokens"))
    return (job.table.prompt_tokens.sum() - prefilled) / (114 * 400), events


def test_prefix_groups_are_computed_about_once_where_file_order_wastes_them() -> None:
    job = round_robin()
    for policy in ("dfs", "blend"):
        share, _ = computed_share(job, policy, gate=True)
        assert share >= 0.9
    assert computed_share(job, "fcfs", gate=False)[0] < 0.5


def test_one_request_of_a_group_is_sent_before_the_groups_first_prefill_ends() -> None:
    job = round_robin()
    from dataclasses import replace

    capacity = replace(capacity_for(1200, 16, 512, 8), prefix_lookup_at_submit=True)
    lengths = Lengths.known(job.table, job.output_tokens)
    scheduler = Scheduler(View(job.table, job.tree, lengths.expected, capacity, STEP_TIME), lengths, "dfs")
    engine = SimulatedEngine(job.table, job.tree, job.output_tokens, capacity, STEP_TIME)
    group, cached, sent = np.arange(120) % 6, set(), dict.fromkeys(range(6), 0)
    while scheduler.done < 120:
        for row in scheduler.decide(engine.now_s()).admit.tolist():
            engine.submit([EngineRequest(row, "", {}, None, 4)])
            if group[row] not in cached:
                sent[int(group[row])] += 1
                assert sent[int(group[row])] == 1
        for event in engine.poll(0.0):
            scheduler.update(event)
            if isinstance(event, Started):
                cached.add(int(group[event.row]))


@pytest.mark.parametrize("policy", ["fcfs", "dfs", "blend", "dual-scan"])
def test_wrong_predictions_neither_deadlock_nor_waste_a_third_of_the_tokens(policy: str) -> None:
    """Case plan-04: 40 requests believed to answer with 20 tokens; half answer with 200."""
    n = 40
    output = np.where(np.arange(n) % 2 == 0, 20, 200)
    table = RequestTable.of(np.full(n, 50))
    tree = PrefixTree.without_sharing(n)
    lengths = Lengths.unknown(table, tree)
    lengths.observe_rows(np.arange(8), np.full(8, 20))
    lengths.refresh()
    result = simulate(table, tree, output, lengths, capacity_for(2000, 1, 512), STEP_TIME, policy)
    check(Job(table, tree, output), result, 2000, 512)
    generated_again = result.recomputed_tokens - 50 * result.preemptions
    assert generated_again < 0.3 * output.sum()


def asked_to_preempt(job: Job, policy: str, allowed: bool) -> int:
    """Rows that the scheduler asks a tight engine to preempt; all rows get done."""
    from dataclasses import replace

    step_time = STEP_TIME._replace(kv_read_s_per_token=1e-5)  # so small a cache takes its time to read
    capacity = replace(capacity_for(1000), preempts_on_request=allowed)
    lengths = lengths_for(job, "unknown")
    scheduler = Scheduler(View(job.table, job.tree, lengths.expected, capacity, step_time), lengths, policy)
    engine = SimulatedEngine(job.table, job.tree, job.output_tokens, capacity, step_time)
    asked = 0
    while scheduler.done < job.table.n:
        decision = scheduler.decide(engine.now_s())
        asked += len(decision.preempt)
        engine.cancel(decision.preempt.tolist())
        requests = [EngineRequest(row, "", {}, None, 1) for row in decision.admit.tolist()]
        engine.submit(requests, decision.prefill_budget_tokens)
        for event in engine.poll(0.0):
            scheduler.update(event)
    return asked


def surprising(prompt_tokens: int) -> Job:
    """Long answers, fewer tokens than their cap allows, that fill a small cache and keep short answers out."""
    long = np.arange(100) % 2 == 0
    table = RequestTable.of(np.where(long, 10, prompt_tokens), np.where(long, 800, 8))
    return Job(table, PrefixTree.without_sharing(100), np.where(long, 200, 2))


@pytest.mark.parametrize("policy", ["blend", "dual-scan"])
def test_an_engine_is_asked_to_preempt_only_if_it_can(policy: str) -> None:
    jobs = [surprising(prompt_tokens) for prompt_tokens in (50, 300, 600)]
    assert sum(asked_to_preempt(job, policy, allowed=True) for job in jobs) > 0
    assert sum(asked_to_preempt(job, policy, allowed=False) for job in jobs) == 0
