"""Ranks get equal compute and equal memory time, and prefixes stay together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.traces import Trace
from plait.data.workloads import paper_cost, workload
from plait.errors import UsageError
from plait.model.cost import comp_s, mem_s
from plait.partition import balanced_cut, dual_scan_cut, rank_loads
from plait.table import F64, I32, I64, RequestTable
from plait.tree.build import tree_from_groups

COST = paper_cost()


def by_density(trace: Trace) -> I64:
    """Prefix groups side by side, dense groups first: a simple stand-in for the arranged tree's order."""
    prompt, output = trace.table.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    node = trace.tree.node_of
    m = trace.tree.n_nodes
    group = np.bincount(node, comp_s(COST, prompt, output), m) / np.bincount(node, mem_s(COST, prompt, output), m).clip(
        1e-12
    )
    own = comp_s(COST, prompt, output) / mem_s(COST, prompt, output)
    key = np.where(trace.tree.prefix_tokens[node] > 50, group[node], own)
    return np.lexsort((np.arange(len(key)), node, -key)).astype(np.int64)


def cut(trace: Trace, rule: str, ranks: int) -> I32:
    output = trace.output_tokens.astype(np.float64)
    if rule == "balanced":
        return balanced_cut(trace.tree, trace.table.prompt_tokens, output, COST, ranks)
    return dual_scan_cut(trace.tree, trace.table.prompt_tokens, output, COST, ranks, by_density(trace))


def loads(trace: Trace, rank_of: I32, ranks: int) -> tuple[F64, F64, int]:
    output = trace.output_tokens.astype(np.float64)
    return rank_loads(trace.tree, trace.table.prompt_tokens, output, COST, rank_of, ranks)


@pytest.mark.parametrize(("name", "ranks"), [("T1", 2), ("T1", 8), ("T4", 4), ("S2", 2), ("S2", 64)])
def test_dealing_groups_balances_both_resources_and_keeps_99_percent_of_the_sharing(name: str, ranks: int) -> None:
    trace = workload(name, 100_000)
    compute, memory, twice = loads(trace, cut(trace, "balanced", ranks), ranks)
    assert compute.max() <= 1.01 * compute.mean()
    assert memory.max() <= 1.01 * memory.mean()
    assert twice <= 0.01 * trace.table.prompt_tokens.sum()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_dual_scan_cut_balances_both_resources(ranks: int) -> None:
    trace = workload("S1", 100_000)
    compute, memory, twice = loads(trace, cut(trace, "dual-scan", ranks), ranks)
    assert compute.max() <= 1.05 * compute.mean()
    assert memory.max() <= 1.05 * memory.mean()
    assert twice <= 0.01 * trace.table.prompt_tokens.sum()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 2**32), st.sampled_from(["balanced", "dual-scan"]))
def test_every_row_gets_one_rank_and_loads_add_up(n: int, ranks: int, seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    prompt, group = rng.integers(1, 500, n), rng.integers(-1, 4, n)
    tree = tree_from_groups(prompt, group, rng.integers(0, 400, 5)[group])
    trace = Trace("t", RequestTable.of(prompt), tree, rng.integers(1, 300, n))
    rank_of = cut(trace, rule, ranks)
    assert rank_of.shape == (n,) and rank_of.min() >= 0 and rank_of.max() < ranks
    compute, memory, twice = loads(trace, rank_of, ranks)
    alone_compute, alone_memory, none = loads(trace, np.zeros(n, np.int32), 1)
    assert none == 0 and twice >= 0
    assert compute.sum() >= alone_compute[0] * (1 - 1e-12)
    assert memory.sum() == pytest.approx(alone_memory[0])
    if twice == 0:
        assert compute.sum() == pytest.approx(alone_compute[0])


def test_a_small_prefix_group_stays_on_one_rank() -> None:
    prompt = np.full(1000, 400)
    group = np.arange(1000) // 5
    tree = tree_from_groups(prompt, group, np.full(1000, 300))
    rank_of = balanced_cut(tree, prompt, np.full(1000, 20.0), COST, 2)
    assert all(len(np.unique(rank_of[group == g])) == 1 for g in range(200))


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_is_refused(ranks: int) -> None:
    trace = workload("T1", 1000)
    rules: list[Callable[[], I32]] = [lambda: cut(trace, "balanced", ranks), lambda: cut(trace, "dual-scan", ranks)]
    for rule in rules:
        with pytest.raises(UsageError, match="data-parallel ranks"):
            rule()
