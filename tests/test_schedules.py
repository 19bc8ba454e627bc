"""Every simulated schedule passes an independent check of its own records."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import StepTime, paper_a100_8b
from plait.simulate import Result, simulate
from plait.table import I64, RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree
from tests.checker import check_schedule

FAST = StepTime(1e-4, 2e-4, 1e-7, 1e-5, 1e-3, 1e-5, gemm_base_s=1e-4, comm_base_s=1e-4)


def job(n: int, seed: int) -> tuple[RequestTable, PrefixTree, I64]:
    """n requests, two thirds of them in prefix groups."""
    rng = np.random.default_rng(seed)
    prompt, group = rng.integers(1, 120, n), rng.integers(-1, 5, n)
    tree = tree_from_groups(prompt, group, rng.integers(0, 100, 6)[group])
    return RequestTable.of(prompt), tree, rng.integers(1, 60, n)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 50),
    st.integers(0, 2**32),
    st.sampled_from(["fcfs", "dfs", "random", "blend", "dual-scan"]),
    st.integers(200, 2000),
    st.sampled_from([1, 16]),
    st.sampled_from([0, 64]),
    st.booleans(),
)
def test_every_policy_yields_a_valid_schedule(
    n: int, seed: int, policy: str, kv_tokens: int, block: int, chunk: int, knows_lengths: bool
) -> None:
    table, tree, output = job(n, seed)
    capacity = Capacity(
        kv_tokens // block * block, block, 0, chunk, takes_prefill_budget=True, preempts_on_request=True
    )
    lengths = Lengths.known(table, output if knows_lengths else np.ones(n, np.int64))
    run = simulate(table, tree, output, lengths, capacity, FAST, policy)
    check_schedule(run, table, tree, output, capacity, FAST)


Run = tuple[Result, RequestTable, PrefixTree, I64, Capacity, StepTime]


def valid_run() -> Run:
    table, tree, output = job(20, 1)
    capacity, machine = Capacity(100_000, 1), paper_a100_8b()
    run = simulate(table, tree, output, Lengths.known(table, output), capacity, machine, "dfs")
    return run, table, tree, output, capacity, machine


@pytest.mark.parametrize("field", ["duration_s", "prefill_tokens", "decode_seqs", "decode_context_tokens"])
def test_the_checker_notices_a_record_that_is_off_by_one(field: str) -> None:
    checked = valid_run()
    check_schedule(*checked)
    steps = checked[0].steps
    steps[field][len(steps) // 2] += 1
    with pytest.raises(AssertionError):
        check_schedule(*checked)


def test_the_checker_notices_a_request_that_ran_twice() -> None:
    checked = valid_run()
    order = checked[0].completion_order
    order[0] = order[1]
    with pytest.raises(AssertionError):
        check_schedule(*checked)


def test_the_checker_notices_too_little_kv_and_too_much() -> None:
    run, table, tree, output, capacity, machine = valid_run()
    with pytest.raises(AssertionError, match="KV tokens"):
        check_schedule(run, table, tree, output, dataclasses.replace(capacity, kv_tokens=50), machine)
    run.steps["kv_tokens"] = 1
    with pytest.raises(AssertionError):
        check_schedule(run, table, tree, output, capacity, machine)
