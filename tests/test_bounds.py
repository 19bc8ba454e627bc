"""Bounds hold for the simulator's runs, whatever the job, the machine, the policy and the cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.bounds import Bounds, bounds
from plait.errors import InputError
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import StepTime, paper_a100_8b, step_s
from plait.simulate import simulate
from plait.table import I64, RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree

Job = tuple[RequestTable, PrefixTree, I64]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Up to 40 requests in up to 5 prefix groups."""
    n = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompt = rng.integers(1, 120, n)
    group = rng.integers(-1, 5, n)
    tree = tree_from_groups(prompt, group, rng.integers(0, 100, 6)[group])
    return RequestTable.of(prompt), tree, rng.integers(1, 60, n)


@st.composite
def machines(draw: st.DrawFn) -> StepTime:
    """Step times of every shape: any side may dominate, sequential or overlapped."""
    cost = st.sampled_from([0.0, 1e-6, 1e-4, 1e-3])
    positive = st.sampled_from([1e-6, 1e-4, 1e-3])
    return StepTime(
        gemm_s_per_token=draw(positive),
        weights_s=draw(cost),
        prefill_attn_s=draw(st.sampled_from([0.0, 1e-6])),
        kv_read_s_per_token=draw(cost),
        overhead_s=draw(cost),
        decode_seq_s=draw(cost),
        interference=draw(st.sampled_from([0.0, 0.15, 0.5, 1.0])),
        overlapped=draw(st.sampled_from([0.0, 1.0])),
        comm_s_per_token=draw(cost),
        gemm_base_s=draw(cost),
        comm_base_s=draw(cost),
    )


def parts(found: Bounds) -> dict[str, float]:
    return {
        "ideal": found.ideal_s,
        "practical": found.practical_s,
        "overhead": found.overhead_s,
        "critical": found.critical_s,
    }


@settings(max_examples=150, deadline=None)
@given(
    jobs(),
    machines(),
    st.sampled_from(["fcfs", "dfs", "random", "blend", "dual-scan"]),
    st.integers(200, 2000),
    st.sampled_from([1, 16]),
    st.sampled_from([0, 4]),
    st.sampled_from([0, 64]),
    st.booleans(),
)
def test_no_simulated_run_is_faster_than_any_bound(
    job: Job, machine: StepTime, policy: str, kv_tokens: int, block: int, seqs: int, chunk: int, knows_lengths: bool
) -> None:
    table, tree, output = job
    capacity = Capacity(
        kv_tokens // block * block, block, seqs, chunk, takes_prefill_budget=True, preempts_on_request=True
    )
    lengths = Lengths.known(table, output if knows_lengths else np.ones_like(output))  # wrong ones: preemptions
    run = simulate(table, tree, output, lengths, capacity, machine, policy)
    for name, bound in parts(bounds(table, tree, output, machine, capacity, run.preemptions)).items():
        assert bound <= run.makespan_s * (1 + 1e-9), name


def test_one_request_alone_takes_exactly_its_critical_path() -> None:
    machine = paper_a100_8b()
    table, tree, output = RequestTable.of([1000]), PrefixTree.without_sharing(1), np.array([400])
    by_hand = step_s(machine, 1000.0, 1000 * 1001 / 2, 0.0, 0.0)
    by_hand += sum(step_s(machine, 0.0, 0.0, 1.0, 1000.0 + g) for g in range(1, 400))
    assert bounds(table, tree, output, machine, Capacity(10_000)).critical_s == pytest.approx(by_hand, rel=1e-12)


def test_reads_that_outlast_the_weights_count_in_the_critical_path() -> None:
    machine = paper_a100_8b()._replace(weights_s=1e-4, gemm_s_per_token=1e-5)
    table, tree, output = RequestTable.of([500]), PrefixTree.without_sharing(1), np.array([3000])
    by_hand = step_s(machine, 500.0, 500 * 501 / 2, 0.0, 0.0)
    by_hand += sum(step_s(machine, 0.0, 0.0, 1.0, 500.0 + g) for g in range(1, 3000))
    assert bounds(table, tree, output, machine, Capacity(10_000)).critical_s == pytest.approx(by_hand, rel=1e-12)


def test_the_practical_bound_lies_between_perfect_overlap_and_one_after_the_other() -> None:
    rng = np.random.default_rng(1)
    table, output = RequestTable.of(rng.integers(1, 2000, 500)), rng.integers(1, 2000, 500)
    tree, capacity = PrefixTree.without_sharing(500), Capacity(100_000)
    overlapped = bounds(table, tree, output, paper_a100_8b(), capacity)
    sequential = bounds(table, tree, output, paper_a100_8b("sequential"), capacity)
    assert overlapped.ideal_s < overlapped.practical_s < sequential.practical_s
    assert sequential.practical_s == pytest.approx(sequential.compute_s + sequential.memory_s)
    assert overlapped.ideal_s == max(overlapped.compute_s, overlapped.memory_s)


def test_ranks_divide_the_work_but_not_the_longest_request() -> None:
    rng = np.random.default_rng(2)
    table, output = RequestTable.of(rng.integers(1, 2000, 500)), rng.integers(1, 2000, 500)
    tree, capacity = PrefixTree.without_sharing(500), Capacity(100_000)
    one, four = (bounds(table, tree, output, paper_a100_8b(), capacity, ranks=r) for r in (1, 4))
    assert four.practical_s == pytest.approx(one.practical_s / 4)
    assert four.critical_s == one.critical_s


def test_sharing_saves_compute_and_no_memory_time() -> None:
    table, output = RequestTable.of(np.full(10, 100)), np.full(10, 5)
    shared = tree_from_groups(table.prompt_tokens, np.zeros(10, np.int64), np.full(10, 90))
    apart = PrefixTree.without_sharing(10)
    with_sharing, without = (bounds(table, t, output, paper_a100_8b(), Capacity(10_000)) for t in (shared, apart))
    assert with_sharing.memory_s == without.memory_s
    assert with_sharing.network_s == without.network_s == 0.0
    tokens = 90 + 10 * 10 + 10 * 4
    pairs = 90 * 91 / 2 + 10 * (100 * 101 - 90 * 91) / 2
    machine = paper_a100_8b()
    by_hand = machine.gemm_s_per_token * tokens + machine.prefill_attn_s * pairs
    assert with_sharing.compute_s == pytest.approx(by_hand)


def test_lengths_of_another_job_are_refused() -> None:
    table = RequestTable.of([10, 20])
    with pytest.raises(InputError, match="3 output lengths for 2 requests"):
        bounds(table, PrefixTree.without_sharing(2), np.array([1, 2, 3]), paper_a100_8b(), Capacity(100))
