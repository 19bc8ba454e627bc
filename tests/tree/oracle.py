"""A brute-force trie over Python tuples: what the compiled tree must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.table import I32, I64
from plait.tree.prefix import PrefixTree

Prompts = Sequence[Sequence[int]]


def columns(prompts: Prompts) -> tuple[I32, I64]:
    """Flat token ids and offsets."""
    lengths = [len(prompt) for prompt in prompts]
    flat = [token for prompt in prompts for token in prompt]
    return np.array(flat, np.int32), np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def lengths(prompts: Prompts) -> I64:
    """Prompt lengths, int64 [n]."""
    return np.array([len(prompt) for prompt in prompts], np.int64)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


def shared_prefixes(prompts: Prompts) -> set[tuple[int, ...]]:
    """Every maximal common prefix of two prompts, without the empty one: the nodes below the root."""
    found = {tuple(a[: common(a, b)]) for i, a in enumerate(prompts) for b in prompts[i + 1 :]}
    return found - {()}


def trie_size(prompts: Prompts) -> int:
    """Distinct non-empty prefixes: tokens computed with an unlimited cache."""
    return len({tuple(prompt[: k + 1]) for prompt in prompts for k in range(len(prompt))})


def node_prefixes(tree: PrefixTree, prompts: Prompts) -> list[tuple[int, ...]]:
    """The tokens each node stands for, read off any row below it."""
    return [
        tuple(prompts[tree.dfs_rows[begin]][:tokens]) if tokens else ()
        for begin, tokens in zip(tree.row_begin, tree.prefix_tokens, strict=True)
    ]


def check_structure(tree: PrefixTree, n: int) -> None:
    """Every promise of ``PrefixTree`` that does not need the tokens."""
    m = tree.n_nodes
    assert tree.parent[0] == -1
    assert tree.prefix_tokens[0] == 0
    assert (tree.row_begin[0], tree.row_end[0], tree.subtree_end[0]) == (0, n, m)
    assert sorted(tree.dfs_rows.tolist()) == list(range(n))
    for v in range(1, m):
        above = tree.parent[v]
        assert 0 <= above < v < tree.subtree_end[v] <= tree.subtree_end[above]
        assert tree.prefix_tokens[v] > tree.prefix_tokens[above]
        assert tree.row_begin[above] <= tree.row_begin[v] < tree.row_end[v] <= tree.row_end[above]
    position = {int(row): k for k, row in enumerate(tree.dfs_rows)}
    for row in range(n):
        inside = [v for v in range(m) if tree.row_begin[v] <= position[row] < tree.row_end[v]]
        assert tree.node_of[row] == max(inside)  # nested, so the last in preorder is the deepest
    for v in range(1, m):
        below = [w for w in range(m) if v <= w and tree.row_begin[v] <= tree.row_begin[w] < tree.row_end[v]]
        assert tree.subtree_end[v] == v + len(below)
