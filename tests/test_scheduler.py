"""The scheduler object, as an engine sees it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.events import Capacity, Failed, Finished, Preempted, Progress, Started
from plait.lengths import Lengths
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.table import RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree
from tests.simulation import POLICIES, STEP_TIME, small_job


def scheduler_for(table: RequestTable, group: np.ndarray, policy: str, capacity: Capacity) -> Scheduler:
    """Groups share 100 tokens."""
    tree = tree_from_groups(table.prompt_tokens, group, np.full(table.n, 100))
    lengths = Lengths.unknown(table, tree)
    return Scheduler(View(table, tree, lengths.expected, capacity, STEP_TIME), lengths, policy)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50), st.sampled_from(POLICIES), st.booleans(), st.integers(1, 8))
def test_every_row_is_admitted_until_it_is_done_once(seed: int, n: int, policy: str, gate: bool, seqs: int) -> None:
    job = small_job(seed, n, 3)
    rng = np.random.default_rng(seed)
    lengths = Lengths.unknown(job.table, job.tree)
    capacity = Capacity(600, 1, seqs, 256, prefix_lookup_at_submit=gate)
    scheduler = Scheduler(View(job.table, job.tree, lengths.expected, capacity, STEP_TIME), lengths, policy)
    flying: list[int] = []
    done: list[int] = []
    for _ in range(60 * n):
        flying += scheduler.decide(0.0).admit.tolist()
        assert len(set(flying)) == len(flying) <= seqs and not set(flying) & set(done)
        if scheduler.done == n:
            break
        row = flying.pop(int(rng.integers(len(flying))))
        chance = rng.random()
        if chance < 0.2:
            scheduler.update(Preempted(row, 0.0, 0, requeue=True))
            continue
        if chance < 0.9:
            scheduler.update(Started(row, 0.0))
            scheduler.update(Progress(row, 0.0, 3))
            scheduler.update(Finished(row, 0.0, 200, b"{}", output_tokens=5))
        else:
            scheduler.update(Failed(row, 0.0, "broken", "no answer"))
        done.append(row)
    assert sorted(done) == list(range(n))
    c = scheduler.state.c
    assert c["kv_private"] == 0 and c["kv_nodes"] == c["kv_evictable"] and c["decode_context"] == 0
    assert scheduler.state.phase.sum() == 0 and scheduler.waiting == scheduler.running == 0


def test_one_row_of_a_group_is_primed_and_the_rest_follows_its_prefill() -> None:
    table = RequestTable.of(np.full(6, 120))
    capacity = Capacity(100_000, 1, 0, 4096, prefix_lookup_at_submit=True)
    scheduler = scheduler_for(table, np.array([0, 0, 0, 1, 1, 1]), "dfs", capacity)
    first = scheduler.decide(0.0).admit.tolist()
    assert len(first) == 2 and {row // 3 for row in first} == {0, 1}
    scheduler.update(Started(first[0], 1.0))
    assert {row // 3 for row in scheduler.decide(1.0).admit.tolist()} == {first[0] // 3}


def test_sharing_engines_get_a_whole_group_at_once() -> None:
    table = RequestTable.of(np.full(6, 120))
    scheduler = scheduler_for(table, np.zeros(6, np.int64), "dfs", Capacity(100_000))
    assert len(scheduler.decide(0.0).admit) == 6
    assert scheduler.state.c["kv_nodes"] == 100


def test_rows_that_arrive_later_wait_outside() -> None:
    table = RequestTable.of([10, 10], arrival_s=[0.0, 5.0])
    scheduler = scheduler_for(table, np.full(2, -1), "fcfs", Capacity(10_000))
    assert scheduler.decide(0.0).admit.tolist() == [0] and scheduler.waiting == 0
    scheduler.arrive(np.array([1]), 5.0)
    scheduler.arrive(np.array([1]), 5.0)
    assert scheduler.waiting == 1 and scheduler.decide(5.0).admit.tolist() == [1]


def test_the_sample_runs_first_while_lengths_are_unknown() -> None:
    job = small_job(1, 300)
    lengths = Lengths.unknown(job.table, job.tree)
    capacity = Capacity(1_000_000, 1, 3)
    scheduler = Scheduler(View(job.table, job.tree, lengths.expected, capacity, STEP_TIME), lengths, "blend")
    sample = set(lengths.sample_rows().tolist())
    admitted = scheduler.decide(0.0).admit.tolist()
    assert admitted and set(admitted) <= sample


@pytest.mark.parametrize(("shared", "first"), [(20, "sample"), (400, "order")])
def test_a_sample_that_would_compute_many_prefixes_twice_does_not_go_first(shared: int, first: str) -> None:
    """Forty groups of ten in a cache that holds few of them, under an order by expected lengths."""
    prompt = np.full(400, shared + 100)
    table, tree = RequestTable.of(prompt), tree_from_groups(prompt, np.arange(400) % 40, np.full(400, shared))
    lengths = Lengths.unknown(table, tree)
    view = View(table, tree, lengths.expected, Capacity(3000, 1, 20), STEP_TIME)
    admitted = Scheduler(view, lengths, "latency").decide(0.0).admit
    groups = len(np.unique(admitted % 40))
    assert len(admitted) >= 4
    assert groups == len(admitted) if first == "sample" else groups <= 2


def test_repeated_and_late_events_change_nothing() -> None:
    table = RequestTable.of([10, 10])
    scheduler = scheduler_for(table, np.full(2, -1), "fcfs", Capacity(10_000))
    scheduler.decide(0.0)
    for _ in range(2):
        scheduler.update(Finished(0, 1.0, 200, b"{}", output_tokens=4))
        scheduler.update(Started(0, 1.0))
        scheduler.update(Preempted(0, 1.0, requeue=True))
    assert scheduler.done == 1 and scheduler.running == 1 and scheduler.oldest_running() == 1


def test_an_engine_that_preempts_on_its_own_keeps_the_row() -> None:
    table = RequestTable.of([10])
    scheduler = scheduler_for(table, np.full(1, -1), "fcfs", Capacity(10_000))
    scheduler.decide(0.0)
    scheduler.update(Started(0, 1.0))
    scheduler.update(Preempted(0, 2.0, requeue=False))
    assert scheduler.running == 1 and scheduler.waiting == 0 and len(scheduler.decide(2.0).admit) == 0


def test_an_unknown_policy_is_named_with_its_neighbour() -> None:
    job = small_job(1, 5)
    lengths = Lengths.unknown(job.table, job.tree)
    view = View(job.table, job.tree, lengths.expected, Capacity(1000), STEP_TIME)
    with pytest.raises(UsageError, match="did you mean 'blend'"):
        Scheduler(replace(view), lengths, "blnd")


def test_rows_that_fit_even_if_none_ends_early_run_together_whatever_is_unknown() -> None:
    table = RequestTable.of([400, 400, 400], [100, 100, 100])
    tree = PrefixTree.without_sharing(3)
    for kv_tokens, together in ((1010, 2), (1510, 3)):
        lengths = Lengths.unknown(table, tree)
        view = View(table, tree, lengths.expected, Capacity(kv_tokens), STEP_TIME)
        assert len(Scheduler(view, lengths, "fcfs").decide(0.0).admit) == together
