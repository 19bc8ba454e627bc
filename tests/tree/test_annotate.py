"""Per-node sums against sums recomputed from the prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.tree.annotate import annotate
from plait.tree.build import build_tree
from plait.tree.prefix import PrefixTree
from tests.tree import oracle

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=20)


@given(PROMPTS, st.integers(0, 5))
def test_every_node_sums_its_rows_and_counts_shared_tokens_once(prompts: list[list[int]], seed: int) -> None:
    tree, lengths = build_tree(*oracle.columns(prompts)), oracle.lengths(prompts)
    rng = np.random.default_rng(seed)
    compute, memory = rng.random(len(prompts)), rng.random(len(prompts))
    nodes = annotate(tree, lengths, compute, memory)
    for v in range(tree.n_nodes):
        rows = tree.dfs_rows[tree.row_begin[v] : tree.row_end[v]]
        below = [prompts[row] for row in rows]
        total, unique = int(lengths[rows].sum()), oracle.trie_size(below)
        assert nodes.rows[v] == len(rows)
        assert nodes.prompt_tokens[v] == total
        assert nodes.saved_tokens[v] == total - unique
        above = 0 if v == 0 else tree.prefix_tokens[tree.parent[v]]
        assert nodes.unique_tokens[v] == unique - above
        expected = unique / total * compute[rows].sum() / memory[rows].sum()
        assert nodes.density[v] == pytest.approx(expected)
        assert nodes.added_density[v] == pytest.approx(
            (unique - above) / total * compute[rows].sum() / memory[rows].sum()
        )
        assert nodes.sharing[v] == pytest.approx(1 - unique / total)


def test_density_is_infinite_where_no_row_takes_memory_time() -> None:
    tree = build_tree(*oracle.columns([[1, 2], [1, 3], [4]]))
    nodes = annotate(tree, np.array([2, 2, 1]), np.ones(3), np.array([0.0, 0.0, 1.0]))
    assert nodes.density[1] == np.inf
    assert nodes.density[0] == pytest.approx((1 - 1 / 5) * 3)


def test_density_of_a_job_is_the_papers_formula() -> None:
    nodes = annotate(PrefixTree.without_sharing(2), np.array([10, 30]), np.array([2.0, 4.0]), np.array([1.0, 3.0]))
    assert nodes.density[0] == pytest.approx(6.0 / 4.0)
