"""BlendServe's order: what it may and may not do, on trees of every shape."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.table import F64, I64
from plait.tree.arrange import Arrangement, _falling, arrange, densest_first
from plait.tree.build import build_tree, tree_from_groups
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import kept_sharing, sharing_ratio, unique_tokens
from tests.tree import oracle

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=30)
KEEP = st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.99, 1.0])


def arranged(prompts: list[list[int]], seed: int, keep: float) -> tuple[PrefixTree, I64, F64, F64, Arrangement]:
    """Rows with random costs, some without memory time."""
    rng = np.random.default_rng(seed)
    tree, lengths = build_tree(*oracle.columns(prompts)), oracle.lengths(prompts)
    compute = lengths * rng.choice([0.5, 1.0], len(prompts))
    memory = lengths * rng.choice([0.0, 0.1, 1.0, 5.0], len(prompts))
    return tree, lengths, compute, memory, arrange(tree, lengths, compute, memory, keep)


def order_cost(prompts: list[list[int]], rows: I64) -> int:
    """Prompt tokens computed when each row reuses what it shares with the one before, by comparing prompts."""
    order = [prompts[row] for row in rows]
    return sum(len(p) for p in order) - sum(oracle.common(a, b) for a, b in pairwise(order))


@given(PROMPTS, st.integers(0, 20), KEEP)
def test_every_row_comes_once_and_the_ledger_holds(prompts: list[list[int]], seed: int, keep: float) -> None:
    tree, lengths, _, _, got = arranged(prompts, seed, keep)
    assert sorted(got.rows.tolist()) == list(range(len(prompts)))
    assert got.recompute_tokens == order_cost(prompts, got.rows) - oracle.trie_size(prompts)
    assert 0 <= got.recompute_tokens <= got.split_tokens <= got.budget_tokens
    saved = int(lengths.sum()) - oracle.trie_size(prompts)
    assert got.budget_tokens <= (1 - keep) * saved + 1e-6
    assert kept_sharing(tree, lengths, got.rows) >= keep * sharing_ratio(tree, lengths) - 1e-9


@given(PROMPTS, st.integers(0, 20), KEEP)
def test_leaves_end_monotone_or_no_split_is_affordable(prompts: list[list[int]], seed: int, keep: float) -> None:
    tree, _, _, _, got = arranged(prompts, seed, keep)
    in_place = got.density[got.rows[~got.out_of_place[got.rows]]]
    assert np.all(in_place[1:] <= in_place[:-1])
    left = got.budget_tokens - got.split_tokens
    waiting = np.flatnonzero(got.out_of_place & ~got.split)
    # the other rows of its node are all elsewhere: leaving would give tokens back, so only the plain case is compared
    members = np.bincount(tree.node_of[~got.split], minlength=tree.n_nodes)
    for row in waiting:
        node = tree.node_of[row]
        if members[node] > 1:
            assert tree.prefix_tokens[node] > left


@given(PROMPTS, st.integers(0, 20))
def test_with_an_open_ledger_unsplit_leaves_are_in_place(prompts: list[list[int]], seed: int) -> None:
    _, _, _, _, got = arranged(prompts, seed, -10.0)
    assert np.all(got.split[got.out_of_place])


@given(PROMPTS, st.integers(0, 20), KEEP)
def test_the_tree_of_the_arrangement_is_what_its_order_shares(prompts: list[list[int]], seed: int, keep: float) -> None:
    _, lengths, compute, memory, got = arranged(prompts, seed, keep)
    oracle.check_structure(got.tree, len(prompts))
    assert np.array_equal(got.tree.dfs_rows, got.rows)
    assert unique_tokens(got.tree, lengths) == order_cost(prompts, got.rows)
    assert got.unit_begin[0] == 0
    assert got.unit_begin[-1] == len(prompts)
    for k, (begin, end) in enumerate(zip(got.unit_begin[:-1], got.unit_begin[1:], strict=True)):
        rows = got.rows[begin:end]
        unit = [prompts[row] for row in rows]
        assert all(oracle.common(a, b) > 0 for a, b in pairwise(unit))
        if memory[rows].sum() > 0:
            shared = order_cost(prompts, rows) / lengths[rows].sum()
            assert got.unit_density[k] == pytest.approx(shared * compute[rows].sum() / memory[rows].sum())
        else:
            assert got.unit_density[k] == np.inf


def test_without_a_ledger_all_sharing_is_kept_and_children_are_sorted_by_density() -> None:
    group = np.repeat([0, 1, 2], 4)
    tree = tree_from_groups(np.full(12, 10), group, np.full(12, 6))
    memory = np.array([1, 2, 3, 4, 9, 8, 7, 6, 0.4, 0.3, 0.2, 0.1])
    got = arrange(tree, np.full(12, 10), np.ones(12), memory, keep_sharing=1.0)
    assert got.recompute_tokens == 0
    assert got.rows.tolist() == [11, 10, 9, 8, 0, 1, 2, 3, 7, 6, 5, 4]
    assert got.unit_begin.tolist() == [0, 4, 8, 12]
    assert np.all(np.diff(got.unit_density) <= 0)


def test_a_cheap_outlier_leaves_its_subtree_and_an_expensive_one_stays() -> None:
    """Two groups of dense rows, each with one sparse row; one group's prefix is short, the other's eats the ledger."""
    group, shared = np.repeat([0, 1], 100), np.repeat([2, 90], 100)
    prompt = np.full(200, 100)
    memory = np.ones(200)
    memory[[0, 100]] = 50.0
    tree = tree_from_groups(prompt, group, shared)
    saved = 99 * 2 + 99 * 90
    got = arrange(tree, prompt, np.full(200, 10.0), memory, keep_sharing=1 - 10 / saved)
    assert got.split[0]
    assert not got.split[100]
    assert got.rows[-1] == 0 or got.rows[-2:].tolist() == [0, 100]


def test_a_subtree_out_of_place_moves_as_a_whole_for_one_prefix() -> None:
    """All prompts start with a head of 4 tokens; one of three groups is far sparser than a row outside the head."""
    head = [1, 1, 1, 1]
    prompts = [[*head, 2, 2, k] for k in range(10)] + [[*head, 3, 3, k] for k in range(10)] + [[9] * 7] * 1
    prompts += [[8, k, 8, 8, 8, 8, 8] for k in range(5)]
    lengths = oracle.lengths(prompts)
    memory = np.array([0.1] * 10 + [10.0] * 10 + [1.0] * 6)
    tree = build_tree(*oracle.columns(prompts))
    got = arrange(tree, lengths, lengths.astype(np.float64), memory, keep_sharing=0.9)
    assert got.recompute_tokens == 4
    assert not got.out_of_place.any()
    assert sorted(got.rows[:10].tolist()) == list(range(10))
    assert sorted(got.rows[-10:].tolist()) == list(range(10, 20))


def test_an_empty_job_and_a_single_row_are_arranged() -> None:
    for n in (0, 1):
        got = arrange(PrefixTree.without_sharing(n), np.full(n, 5), np.ones(n), np.ones(n))
        assert len(got.rows) == n
        assert len(got.unit_begin) == n + 1


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.0 + 1e-12, 7.0, 1e300, np.inf]), max_size=40))
def test_the_fast_sort_is_a_stable_sort_by_falling_value(values: list[float]) -> None:
    with np.errstate(over="ignore"):
        rounded = np.array(values).astype(np.float32)
    assert _falling(np.array(values)).tolist() == np.argsort(-rounded, kind="stable").tolist()


def test_rows_and_densities_alone_are_those_of_the_arrangement() -> None:
    tree, lengths, compute, memory, got = arranged([[0, 1, 2], [0, 1], [2], [0, 1, 1], [2, 2]] * 4, 3, 0.99)
    rows, density = densest_first(tree, lengths, compute, memory)
    assert rows.tolist() == got.rows.tolist() and density.tolist() == got.density.tolist()
