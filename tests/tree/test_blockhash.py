"""The hashed tree of a stream against the exact one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import InputError
from plait.table import I32, I64
from plait.tree.blockhash import tree_from_batches
from plait.tree.build import build_tree
from plait.tree.sharing import kept_sharing, sharing_ratio
from tests.tree import oracle

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=24)


def batches(prompts: list[list[int]], rows: int) -> list[tuple[I32, I64]]:
    """The prompts in batches of so many rows."""
    return [oracle.columns(prompts[i : i + rows]) for i in range(0, len(prompts), rows)]


@given(PROMPTS, st.integers(1, 5), st.integers(1, 9))
def test_hashed_tree_shares_whole_blocks_and_whole_prompts(prompts: list[list[int]], block: int, rows: int) -> None:
    tree, lengths = tree_from_batches(batches(prompts, rows), block)
    oracle.check_structure(tree, len(prompts))
    assert np.array_equal(lengths, oracle.lengths(prompts))
    best = []
    for i, a in enumerate(prompts):
        common = [oracle.common(a, b) if a != b else len(a) + block for j, b in enumerate(prompts) if j != i]
        best.append(max((min(c // block * block, len(a)) if c <= len(a) else len(a) for c in common), default=0))
    assert tree.prefix_tokens[tree.node_of].tolist() == best


@given(PROMPTS)
def test_blocks_of_one_token_give_the_exact_tree(prompts: list[list[int]]) -> None:
    tree, _ = tree_from_batches(batches(prompts, 7), block_tokens=1)
    exact = build_tree(*oracle.columns(prompts))
    assert sorted(oracle.node_prefixes(tree, prompts)) == sorted(oracle.node_prefixes(exact, prompts))


def test_order_of_a_hashed_tree_shares_within_one_percent_of_exact() -> None:
    rng = np.random.default_rng(0)
    group = rng.integers(0, 40, 3000)
    sub = group * 6 + rng.integers(0, 6, 3000)
    tokens = rng.integers(0, 32_000, (3000, 200), dtype=np.int32)
    tokens[:, :61] = rng.integers(0, 32_000, (40, 61), dtype=np.int32)[group]
    tokens[:, 61:143] = rng.integers(0, 32_000, (240, 82), dtype=np.int32)[sub]
    flat, offsets = tokens.ravel(), np.arange(3001, dtype=np.int64) * 200
    exact = build_tree(flat, offsets)
    tree, lengths = tree_from_batches([(flat, offsets)])
    assert kept_sharing(exact, lengths, tree.dfs_rows) >= 0.99 * sharing_ratio(exact, lengths)


def test_an_empty_stream_gives_an_empty_tree() -> None:
    tree, lengths = tree_from_batches([])
    assert len(lengths) == 0
    assert tree.n_nodes == 1


def test_a_batch_that_does_not_fit_its_offsets_is_named() -> None:
    good = oracle.columns([[1, 2]])
    with pytest.raises(InputError, match="batch 1: offsets must rise"):
        tree_from_batches([good, (np.zeros(3, np.int32), np.array([0, 2]))])
