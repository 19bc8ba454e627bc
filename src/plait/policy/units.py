"""Units of a prefix tree: groups of rows that lose real sharing when they are torn apart, and orders that keep them
whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait._numba import njit
from plait.table import F64, I32, I64
from plait.tree.prefix import PrefixTree


def split_units(tree: PrefixTree, keep: float, running: F64 | float = 0.0) -> I64:
    """Unit of each row, int64 [n] in 0 .. units - 1: the highest subtree that was not opened, or the row itself.

    Opening a node lets its children run at any time; at worst its segment is computed once for each of them. Where
    rows below it come at random and ``running`` of them, float64 [m], run at a time on average, a child finds none of
    them and has to compute the segment with a chance of exp(-running) (idle times of the M/G/infinity queue). Nodes are
    opened in order of tokens lost a row set free while ``keep`` of all savings is kept (BlendServe's conditional split,
    for all nodes at once)."""
    rows_below = tree.row_end - tree.row_begin
    saving = tree.segment_tokens * np.maximum(0, rows_below - 1)
    children = np.bincount(tree.parent[1:], minlength=tree.n_nodes) + np.bincount(tree.node_of, minlength=tree.n_nodes)
    cost = tree.segment_tokens * np.maximum(0, children - 1) * np.exp(-np.asarray(running))
    by_cost = np.argsort(cost / np.maximum(1, rows_below), kind="stable")
    affordable = np.zeros(tree.n_nodes, np.bool_)
    affordable[by_cost] = np.cumsum(cost[by_cost]) <= (1.0 - keep) * float(saving.sum())
    affordable[0] = True
    top = _top_unopened(tree.parent, affordable)
    unit = np.where(top[tree.node_of] >= 0, top[tree.node_of], tree.n_nodes + np.arange(len(tree.node_of)))
    used = np.zeros(tree.n_nodes + len(tree.node_of), np.int64)
    used[unit] = 1
    return (np.cumsum(used) - 1)[unit]


@njit
def _top_unopened(parent: I32, affordable: npt.NDArray[np.bool_]) -> I64:
    """Highest ancestor (or self) that is not opened, -1 where all are open, int64 [m]."""
    top = np.full(len(parent), -1, np.int64)
    for v in range(1, len(parent)):
        above = top[parent[v]]
        if above >= 0:
            top[v] = above
        elif not affordable[v]:
            top[v] = v
    return top


def shuffled_depth_first(tree: PrefixTree, seed: int) -> I64:
    """Rows in depth-first order with the children of every node, rows among them, in seeded random order, int64 [n]."""
    items = np.random.default_rng(seed).permutation(tree.n_nodes + len(tree.node_of))
    return _shuffled(tree.parent, tree.node_of, items)


@njit
def _shuffled(parent: I32, node_of: I32, items: I64) -> I64:
    """Positions are cut top down: each child of v, node v or row m + i, takes a slice of v's slice in the order of
    ``items``, int64 [m + n]."""
    m, n = len(parent), len(node_of)
    below = np.zeros(m, np.int64)
    for row in range(n):
        below[node_of[row]] += 1
    for v in range(m - 1, 0, -1):
        below[parent[v]] += below[v]
    begin = np.zeros(m, np.int64)  # slice of the node; its parent's counter is what is given out so far
    given = np.zeros(m, np.int64)
    out = np.empty(n, np.int64)
    offset = np.zeros(m + n, np.int64)  # position inside the parent's slice
    for item in items:
        if item == 0:
            continue
        p = parent[item] if item < m else node_of[item - m]
        offset[item] = given[p]
        given[p] += below[item] if item < m else 1
    for v in range(1, m):
        begin[v] = begin[parent[v]] + offset[v]
    for row in range(n):
        out[begin[node_of[row]] + offset[m + row]] = row
    return out


def shuffled_units(tree: PrefixTree, unit: I64, seed: int) -> I64:
    """Rows unit by unit (int64 [n]), the units in seeded random order, each in shuffled depth-first order, int64 [n].
    What is alike without sharing much, such as the requests of one application, is spread over the whole order."""
    size = np.bincount(unit)
    order = np.random.default_rng(seed).permutation(len(size))
    begin = np.empty(len(size), np.int64)
    begin[order] = np.cumsum(size[order]) - size[order]
    return _dealt(shuffled_depth_first(tree, seed), unit, begin)


@njit
def _dealt(rows: I64, unit: I64, begin: I64) -> I64:
    """``rows`` unit by unit; ``begin``, int64 [units], says where the next row of each unit goes and is counted up."""
    out = np.empty(len(rows), np.int64)
    for row in rows:
        out[begin[unit[row]]] = row
        begin[unit[row]] += 1
    return out


@njit
def path_sums(parent: I32, values: F64) -> F64:
    """Sum of ``values`` over each node and its ancestors, float64 [m]."""
    out = values.copy()
    for v in range(1, len(parent)):
        out[v] += out[parent[v]]
    return out
