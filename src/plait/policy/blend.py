"""The default of ``--goal throughput``: a feedback blend on overlapped engines, primed depth-first on sequential
ones."""

from __future__ import annotations

import numpy as np

from plait.policy.base import Order, View
from plait.table import F64, I64
from plait.tree.prefix import PrefixTree


def blend(view: View) -> Order:
    """Two sides for an engine that overlaps compute with memory; else depth-first, long outputs first.

    On a sequential engine a step costs the sum of both, so mixing buys nothing: sharing does, and a short tail.
    """
    return Order(depth_first_long_first(view.tree, view.expected_output_tokens))


def depth_first_long_first(tree: PrefixTree, expected: F64) -> I64:
    """Rows in depth-first order, the subtrees below the root by descending mean expected output, int64 [n]."""
    group = root_child(tree)
    groups, member = np.unique(group, return_inverse=True)
    mean = np.bincount(member, expected) / np.bincount(member, minlength=len(groups))
    place = np.empty(len(group), np.int64)
    place[tree.dfs_rows] = np.arange(len(group))
    return np.lexsort((place, group, -mean[member])).astype(np.int64)


def root_child(tree: PrefixTree) -> I64:
    """Top-level subtree of each row, int64 [n]: a node, or -1 - row for a row that hangs off the root."""
    top = np.arange(tree.n_nodes, dtype=np.int64)
    starts = np.flatnonzero(tree.parent == 0)
    for v in starts:
        top[v : tree.subtree_end[v]] = v
    group = top[tree.node_of]
    alone = tree.node_of == 0
    group[alone] = -1 - np.flatnonzero(alone)
    return group
