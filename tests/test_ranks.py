"""Data-parallel ranks: each request once, every rank's schedule valid, what one learns all know, idle ranks steal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.workloads import paper_cost
from plait.errors import UsageError
from plait.lengths import Lengths
from plait.partition import balanced_cut
from plait.simulate import Result
from plait.simulate_ranks import Job, Part, place_of, simulate_ranks
from plait.table import RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree
from tests import simulation
from tests.checker import check_ranks, check_schedule
from tests.simulation import POLICIES, STEP_TIME, capacity_for, small_job


def unknown(job: Job) -> Lengths:
    return Lengths.unknown(job.table, job.tree)


def run(job: simulation.Job, ranks: int, policy: str = "blend", kv_tokens: int = 2000) -> list[Result]:
    return simulate_ranks(job, unknown, capacity_for(kv_tokens), STEP_TIME, policy, paper_cost(), ranks)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 120),
    groups=st.integers(0, 5),
    policy=st.sampled_from(POLICIES),
    ranks=st.integers(1, 5),
    kv_tokens=st.sampled_from([450, 800, 2000]),
)
def test_the_ranks_run_each_request_once_and_each_of_them_a_valid_schedule(
    seed: int, n: int, groups: int, policy: str, ranks: int, kv_tokens: int
) -> None:
    job = small_job(seed, n, groups)
    found = run(job, ranks, policy, kv_tokens)
    assert len(found) == ranks
    check_ranks(found, job.table, job.tree, job.output_tokens, capacity_for(kv_tokens), STEP_TIME)
    if sum(rank.preemptions for rank in found):
        return  # requests that were preempted may have moved: what a rank did is more than what its requests needed
    for rank in found:
        part = Part(job, rank.rows, place_of(job.tree))
        check_schedule(rank, part.table, part.tree, part.output_tokens, capacity_for(kv_tokens), STEP_TIME, gaps=True)


def uneven_job() -> simulation.Job:
    """Half of the requests answer ten times as long as the others; nothing tells which."""
    rng = np.random.default_rng(4)
    n = 600
    output = np.where(rng.random(n) < 0.5, 20, 200).astype(np.int64)
    output[:300] = 20
    return simulation.Job(RequestTable.of(np.full(n, 50)), PrefixTree.without_sharing(n), output)


@pytest.mark.parametrize("policy", ["fcfs", "dfs", "blend"])
def test_an_idle_rank_takes_waiting_requests_so_that_all_end_at_about_the_same_time(policy: str) -> None:
    job = uneven_job()
    ends = [rank.finish_s.max() for rank in run(job, 3, policy, kv_tokens=1000)]
    assert min(ends) > 0.85 * max(ends)


def test_requests_that_were_stolen_are_run_by_the_thief() -> None:
    job = uneven_job()
    expected = unknown(job).expected
    cut = balanced_cut(job.tree, job.table.prompt_tokens, expected, paper_cost(), 3)
    ranks = run(job, 3, "fcfs", kv_tokens=1000)
    assert any(set(np.flatnonzero(cut == k).tolist()) != set(rank.rows.tolist()) for k, rank in enumerate(ranks))


def test_a_request_that_was_preempted_goes_on_at_an_idle_rank_with_the_tokens_it_has() -> None:
    """All long answers are one rank's; they are more than fit there, and nothing tells."""
    n, long = 400, 40
    output = np.full(n, 5, np.int64)
    output[:long] = 600
    job = simulation.Job(RequestTable.of(np.full(n, 40)), PrefixTree.without_sharing(n), output)
    found = run(job, 2, "blend", kv_tokens=2000)
    check_ranks(found, job.table, job.tree, job.output_tokens, capacity_for(2000), STEP_TIME)
    assert any(rank.row_preemptions.sum() > rank.preemptions for rank in found)  # some elsewhere


def test_stealing_whole_groups_costs_less_than_one_percent_of_the_prompts() -> None:
    rng = np.random.default_rng(0)
    n = 3000
    prompt, group = np.full(n, 100), rng.integers(0, 150, n)
    tree = tree_from_groups(prompt, group, np.full(n, 60))
    output = np.where(rng.random(n) < 0.1, 250, 10).astype(np.int64)
    job = simulation.Job(RequestTable.of(prompt), tree, output)
    alone, ranks = run(job, 1, "dfs", 20_000)[0], run(job, 4, "dfs", 20_000)
    computed = sum(rank.unique_tokens_computed for rank in ranks)
    assert computed - alone.unique_tokens_computed <= 0.01 * prompt.sum()


def test_what_one_part_observes_the_others_know_after_a_refresh() -> None:
    job = small_job(1, 200)
    whole = Lengths.unknown(job.table, job.tree)
    one, other = whole.part(np.arange(100)), whole.part(np.arange(100, 200))
    before = other.expected.copy()
    one.observe_rows(np.arange(100), np.full(100, 1000))
    other.refresh()
    assert np.all(other.expected > before)
    assert len(other.expected) == 100 and set(other.sample_rows(0.1).tolist()) <= set(range(100))


def test_parts_of_known_lengths_know_their_rows() -> None:
    job = small_job(2, 50)
    part = Lengths.known(job.table, job.output_tokens).part(np.array([40, 7]))
    assert part.exact and part.expected.tolist() == job.output_tokens[[40, 7]].tolist()


def test_fewer_than_one_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="0 data-parallel ranks"):
        run(small_job(0, 5), 0)
