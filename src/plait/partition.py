"""Data parallelism: which rank runs which request, so that all ranks get equal compute and equal memory time.

Equal sums of both also mean equal density. ``dual_scan_cut`` is BlendServe's rule: the order from compute-heavy to
memory-heavy is consumed from both ends, and each rank takes the next piece of either end. ``balanced_cut`` deals whole
prefix groups, largest first, to the rank that is behind: loads and length distributions come out more even, and a
prefix is computed twice only where its group is larger than a small part of a rank's share.
"""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.errors import UsageError
from plait.model.cost import Cost, comp_s, mem_s, prefill_comp_s
from plait.table import F64, I32, I64
from plait.tree.prefix import PrefixTree

_PIECES_PER_RANK = 16
"""A prefix group may be dealt whole while it is at most this part of a rank's share."""
_PREFIX_SHARE = 100.0
"""A larger group is cut into pieces that compute this many times what the prefix costs: at most 1 % is lost."""
_SNAP = 0.02
"""A cut of the dual scan moves to the border of a prefix group if that shifts at most this part of a rank's share."""


def balanced_cut(tree: PrefixTree, prompt_tokens: I64, expected_output_tokens: F64, cost: Cost, ranks: int) -> I32:
    """Rank of each row, int32 [n], by dealing prefix groups. O(n · ranks). Raises UsageError if ranks < 1."""
    _check(ranks)
    rows, nodes = _loads(tree, prompt_tokens, expected_output_tokens, cost)
    unit_of, unit_loads = _units(tree.parent, tree.node_of, tree.dfs_rows, rows, nodes, 1 / (_PIECES_PER_RANK * ranks))
    largest_first = np.argsort(-unit_loads.max(axis=1), kind="stable")
    return _deal(unit_loads, largest_first, ranks)[unit_of]


def dual_scan_cut(
    tree: PrefixTree, prompt_tokens: I64, expected_output_tokens: F64, cost: Cost, ranks: int, order: I64
) -> I32:
    """Rank of each row, int32 [n], by cutting ``order`` (rows, most compute-heavy first) from both ends.

    After rank k, the rows taken from the left and the right end have k/ranks of all compute and of all memory time.
    Raises UsageError if ranks < 1.
    """
    _check(ranks)
    rows, nodes = _loads(tree, prompt_tokens, expected_output_tokens, cost)
    load = rows[order]
    load[:, 0] += _first_use(tree.parent, tree.node_of, order, nodes)  # a prefix is computed for its first row
    total = np.concatenate((np.zeros((1, 2)), np.cumsum(load, axis=0)))
    border = tree.node_of[order[1:]] != tree.node_of[order[:-1]]
    borders = np.concatenate(([0], np.flatnonzero(border | (tree.node_of[order[1:]] == 0)) + 1, [len(order)]))
    rank_at = np.full(len(order), ranks - 1, np.int32)
    left, right = 0, len(order)  # order[left:right] is not dealt yet
    for k in range(1, ranks):
        next_left, next_right = _both_ends(total, left, right, k / ranks)
        next_left = max(left, _snapped(next_left, borders, total, _SNAP / ranks))
        next_right = min(right, max(next_left, _snapped(next_right, borders, total, _SNAP / ranks)))
        rank_at[left:next_left] = k - 1
        rank_at[next_right:right] = k - 1
        left, right = next_left, next_right
    rank_of = np.empty(len(order), np.int32)
    rank_of[order] = rank_at
    return rank_of


def rank_loads(
    tree: PrefixTree, prompt_tokens: I64, output_tokens: F64, cost: Cost, rank_of: I32, ranks: int
) -> tuple[F64, F64, int]:
    """Compute seconds [ranks] and memory seconds [ranks] of each rank, shared prefixes counted once a rank, and the
    prompt tokens that are computed more than once because their prefix is on several ranks."""
    rows, nodes = _loads(tree, prompt_tokens, output_tokens, cost, relative=False)
    compute: F64 = np.bincount(rank_of, rows[:, 0], ranks).astype(np.float64)
    memory: F64 = np.bincount(rank_of, rows[:, 1], ranks).astype(np.float64)
    copies = np.zeros(tree.n_nodes, np.int64)
    for rank in range(ranks):
        used = _used(tree.parent, tree.node_of, np.flatnonzero(rank_of == rank))
        compute[rank] += nodes[used].sum()
        copies[used] += 1
    return compute, memory, int((tree.segment_tokens * np.maximum(copies - 1, 0)).sum())


def _check(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"{ranks} data-parallel ranks; a whole number >= 1 is needed")


def _loads(
    tree: PrefixTree, prompt_tokens: I64, output_tokens: F64, cost: Cost, relative: bool = True
) -> tuple[F64, F64]:
    """Compute and memory seconds of the rows beyond their shared prefix, float64 [n, 2], and compute seconds of every
    node's segment, float64 [m]; ``relative``: as shares of all compute and all memory time."""
    prompt, output = prompt_tokens.astype(np.float64), np.asarray(output_tokens, np.float64)
    end = tree.prefix_tokens.astype(np.float64)
    begin = end - tree.segment_tokens
    own = comp_s(cost, prompt, output) - prefill_comp_s(cost, np.zeros_like(prompt), end[tree.node_of])
    rows = np.stack((own, mem_s(cost, prompt, output)), axis=1)
    nodes = prefill_comp_s(cost, begin, end)
    if relative:
        compute, memory = rows.sum(axis=0)
        rows = rows / np.maximum((compute + nodes.sum(), memory), 1e-300)
        nodes = nodes / max(float(compute + nodes.sum()), 1e-300)
    return rows, nodes


@njit
def _units(parent: I32, node_of: I32, dfs_rows: I64, rows: F64, nodes: F64, limit: float) -> tuple[I64, F64]:
    """Unit of each row, int64 [n], and the loads of the units, float64 [u, 2].

    A subtree whose load is at most ``limit`` is one unit; rows that hang directly off a larger one are put together
    until their prefix hardly matters.
    """
    m, n = len(parent), len(node_of)
    below = np.zeros((m, 2))
    below[:, 0] = nodes
    for row in range(n):
        below[node_of[row]] += rows[row]
    for v in range(m - 1, 0, -1):
        below[parent[v]] += below[v]
    path = np.zeros(m)  # compute share of the prefix down to the node
    unit_of_node = np.full(m, -1, np.int64)
    open_unit = np.full(m, -1, np.int64)
    unit_of = np.empty(n, np.int64)
    loads = np.zeros((m + n, 2))
    units = 0
    for v in range(1, m):
        path[v] = path[parent[v]] + nodes[v]
        if unit_of_node[parent[v]] >= 0:
            unit_of_node[v] = unit_of_node[parent[v]]
        elif max(below[v, 0], below[v, 1]) <= limit:
            unit_of_node[v] = units
            loads[units] = below[v]
            loads[units, 0] += path[parent[v]]
            units += 1
    for row in dfs_rows:
        v = node_of[row]
        unit = unit_of_node[v]
        if unit < 0:
            unit = open_unit[v]
            if unit < 0:
                unit = units
                loads[unit, 0] = path[v]
                open_unit[v] = unit
                units += 1
            loads[unit] += rows[row]
            if loads[unit, 0] >= _PREFIX_SHARE * path[v] or loads[unit].max() >= limit:
                open_unit[v] = -1
        unit_of[row] = unit
    return unit_of, loads[:units].copy()


@njit
def _deal(loads: F64, order: I64, ranks: int) -> I32:
    """Rank of each unit, int32 [u]. The next one goes where the sum of squares of all loads grows least: where what it
    brings most of is scarce. A unit without memory time is dealt by compute alone, and the other way round."""
    rank_of = np.empty(len(loads), np.int32)
    dealt = np.zeros((ranks, 2))
    for unit in order:
        best, least = 0, np.inf
        for rank in range(ranks):
            growth = dealt[rank, 0] * loads[unit, 0] + dealt[rank, 1] * loads[unit, 1]
            if growth < least:
                best, least = rank, growth
        rank_of[unit] = best
        dealt[best] += loads[unit]
    return rank_of


@njit
def _first_use(parent: I32, node_of: I32, order: I64, nodes: F64) -> F64:
    """Compute of the prefix nodes that each row of ``order`` is the first to use, float64 [n]."""
    seen = np.zeros(len(parent), np.bool_)
    load = np.zeros(len(order))
    for i in range(len(order)):
        v = node_of[order[i]]
        while v > 0 and not seen[v]:
            seen[v] = True
            load[i] += nodes[v]
            v = parent[v]
    return load


@njit
def _used(parent: I32, node_of: I32, rows: I64) -> I64:
    """Nodes on the paths of ``rows``."""
    seen = np.zeros(len(parent), np.bool_)
    for row in rows:
        v = node_of[row]
        while v > 0 and not seen[v]:
            seen[v] = True
            v = parent[v]
    return np.flatnonzero(seen)


def _both_ends(total: F64, left: int, right: int, share: float) -> tuple[int, int]:
    """(x, y) so that ``order[:x]`` and ``order[y:]`` together have ``share`` of all compute and of all memory time.

    ``total``: running sums, float64 [n + 1, 2]. For any y the compute gives x; memory grows with what comes from the
    right end, so bisection finds y.
    """
    low, high = left, right

    def left_end(y: int) -> int:
        wanted = share - (total[-1, 0] - total[y, 0])
        return int(np.clip(np.searchsorted(total[:, 0], wanted), left, y))

    while low < high:
        middle = (low + high + 1) // 2
        memory = total[left_end(middle), 1] + total[-1, 1] - total[middle, 1]
        low, high = (middle, high) if memory >= share else (low, middle - 1)
    return left_end(low), low


def _snapped(cut: int, borders: I64, total: F64, most: float) -> int:
    """The border of a prefix group nearest to ``cut`` if at most ``most`` of the work lies in between, else ``cut``."""
    i = int(np.searchsorted(borders, cut))
    near = borders[max(0, i - 1) : i + 1]
    shift = np.abs(total[near] - total[cut]).max(axis=1)
    best = int(np.argmin(shift))
    return int(near[best]) if shift[best] <= most else cut
