"""Sharing helpers against a brute-force trie and a slow cache."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.table import I64
from plait.tree.build import build_tree
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import kept_sharing, sharing_ratio, unique_tokens
from tests.tree import oracle

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=20)


@given(PROMPTS)
def test_unique_tokens_are_the_nodes_of_a_token_trie(prompts: list[list[int]]) -> None:
    tree = build_tree(*oracle.columns(prompts))
    assert unique_tokens(tree, oracle.lengths(prompts)) == oracle.trie_size(prompts)


@given(PROMPTS)
def test_depth_first_order_and_an_unlimited_cache_keep_all_sharing(prompts: list[list[int]]) -> None:
    tree, lengths = build_tree(*oracle.columns(prompts)), oracle.lengths(prompts)
    most = sharing_ratio(tree, lengths)
    assert kept_sharing(tree, lengths, tree.dfs_rows) == pytest.approx(most)
    backwards = np.arange(len(prompts), dtype=np.int64)[::-1]
    assert kept_sharing(tree, lengths, backwards, kv_tokens=10**9) == pytest.approx(most)


@given(PROMPTS, st.randoms(use_true_random=False))
def test_adjacent_sharing_is_the_common_prefix_with_the_predecessor(prompts: list[list[int]], random: Random) -> None:
    order = np.array(random.sample(range(len(prompts)), len(prompts)), np.int64)
    tree, lengths = build_tree(*oracle.columns(prompts)), oracle.lengths(prompts)
    expected = sum(oracle.common(prompts[a], prompts[b]) for a, b in pairwise(order))
    assert kept_sharing(tree, lengths, order) * lengths.sum() == pytest.approx(expected)


def _slow_lru(tree: PrefixTree, lengths: I64, order: I64, kv_tokens: int) -> int:
    """Entries in a dict kept from least to most recently used."""
    entries: dict[tuple[str, int], int] = {}
    hits = 0
    for row in order:
        path = [("row", int(row), int(lengths[row] - tree.prefix_tokens[tree.node_of[row]]))]
        node = int(tree.node_of[row])
        while node > 0:
            path.append(("node", node, int(tree.segment_tokens[node])))
            node = int(tree.parent[node])
        for kind, number, size in path:
            hits += entries.pop((kind, number), 0)
            entries[kind, number] = size
        while sum(entries.values()) > kv_tokens:
            del entries[next(iter(entries))]
    return hits


@given(PROMPTS, st.integers(0, 40))
def test_lru_cache_agrees_with_a_slow_one(prompts: list[list[int]], kv_tokens: int) -> None:
    tree, lengths = build_tree(*oracle.columns(prompts)), oracle.lengths(prompts)
    order = np.arange(len(prompts), dtype=np.int64)
    kept = kept_sharing(tree, lengths, order, kv_tokens) * lengths.sum()
    assert kept == pytest.approx(_slow_lru(tree, lengths, order, kv_tokens))


def test_a_job_without_sharing_has_ratio_zero() -> None:
    tree = PrefixTree.without_sharing(3)
    assert sharing_ratio(tree, np.array([4, 5, 6])) == 0.0
    assert sharing_ratio(PrefixTree.without_sharing(0), np.zeros(0, np.int64)) == 0.0
