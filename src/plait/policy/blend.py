"""The default of ``--goal throughput``: a feedback blend on overlapped engines, primed depth-first on sequential
ones."""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.policy.base import Order, View
from plait.policy.units import path_sums, shuffled_units, split_units
from plait.table import F64, I32, I64
from plait.tree.prefix import PrefixTree

SHARING_KEPT = 0.995
"""Share of the depth-first savings that must survive if units are taken in any order and at both sides."""


def blend(view: View) -> Order:
    """Two sides for an engine that overlaps compute with memory; else depth-first, long outputs first.

    On a sequential engine a step costs the sum of both, so mixing buys nothing: sharing does, and a short tail. On an
    overlapped one, units (prefix groups that are worth keeping together) with more compute than memory time go left,
    the others right, each side in a shuffled order: sorted ones would synchronise generations and let KV swing."""
    if view.step_time.overlapped < 0.5:
        return Order(depth_first_long_first(view.tree, view.expected_output_tokens), finish_groups=True)
    unit = loose_units(view)
    return sides(view, view.once("shuffled", lambda: shuffled_units(view.tree, unit, view.seed)), unit)


def units(view: View) -> I64:
    """Prefix groups that are worth keeping together: the number of each row's, int64 [n]."""
    return view.once("units", lambda: split_units(view.tree, SHARING_KEPT))


def loose_units(view: View) -> I64:
    """Prefix groups that are worth keeping together where rows run in any order: ``units`` without those whose prefix
    stays in the cache because some of their rows always run. The number of each row's, int64 [n]."""
    return view.once("loose units", lambda: split_units(view.tree, SHARING_KEPT, running_below(view)))


def running_below(view: View) -> F64:
    """Rows below each node that run at a time, on average, if rows run in any order, float64 [m]: their output tokens
    over the steps of the job (Little's law), which are as many as read all KV from a full cache, or give every output
    token its place among ``max_num_seqs``. None where neither is limited: who stays in the cache is not known then."""
    tree, limit = view.tree, view.capacity
    output = np.concatenate(([0.0], np.cumsum(view.expected_output_tokens[tree.dfs_rows])))
    steps = output[-1] / limit.max_num_seqs if limit.max_num_seqs else 0.0
    if limit.kv_tokens:
        kv_read_s = view.step_time.kv_read_s_per_token
        steps = max(steps, float(work(view)[1].sum()) / max(kv_read_s * limit.kv_tokens, 1e-300))
    if steps <= 0.0:
        return np.zeros(tree.n_nodes)
    below: F64 = (output[tree.row_end] - output[tree.row_begin]) / steps
    return below


def sides(view: View, order: I64, unit: I64) -> Order:
    """Rows in ``order`` dealt to two sides by the unit (int64 [n]) they belong to: more compute than memory time is
    left."""
    compute, memory, _ = work(view)
    heavy = np.bincount(unit, compute) >= np.bincount(unit, memory)
    left = heavy[unit[order]]
    return Order(order[left], right=order[~left], kernel="blend")


def work(view: View) -> tuple[F64, F64, F64]:
    """Compute seconds, memory seconds and prefill tokens of each row, float64 [n] each; a shared segment's prefill is
    split among the rows below it."""
    st, tree = view.step_time, view.tree
    rows_below = np.maximum(1, tree.row_end - tree.row_begin)
    share = tree.segment_tokens / rows_below
    context = share * (tree.prefix_tokens - tree.segment_tokens / 2)
    shared = path_sums(tree.parent, share), path_sums(tree.parent, context)
    output = view.expected_output_tokens
    square = output if view.expected_square is None else view.expected_square
    seconds = (st.gemm_s_per_token, st.prefill_attn_s, st.kv_read_s_per_token)
    rows = (view.table.prompt_tokens, tree.prefix_tokens, tree.node_of)
    return _row_work(rows, shared, (output, square), view.expected_square is not None, seconds)


@njit
def _row_work(
    rows: tuple[I64, I64, I32],
    shared: tuple[F64, F64],
    outputs: tuple[F64, F64],
    varies: bool,
    seconds: tuple[float, float, float],
) -> tuple[F64, F64, F64]:
    """``work`` from (prompt tokens [n], tokens down to each node [m], node [n]), (prefill tokens, their context) [m] of
    a row's part of the nodes above it, expected output and its square [n], and seconds a token computed, a pair
    attended, a KV token read."""
    prompt_tokens, prefix_tokens, node_of = rows
    share, context = shared
    expected, square = outputs
    gemm_s, pair_s, read_s = seconds
    n = len(prompt_tokens)
    compute, memory, tokens = np.empty(n), np.empty(n), np.empty(n)
    for row in range(n):
        v, prompt, output = node_of[row], float(prompt_tokens[row]), expected[row]
        begin = prefix_tokens[v]
        tokens[row] = prompt - begin + share[v]
        pairs = (prompt - begin) * (prompt + begin) / 2 + context[v]
        compute[row] = gemm_s * (tokens[row] + output) + pair_s * pairs
        second = square[row] if varies else output * output
        memory[row] = read_s * (prompt * output + second / 2)
    return compute, memory, tokens


def depth_first_long_first(tree: PrefixTree, expected: F64) -> I64:
    """Rows in depth-first order, the subtrees below the root by descending mean expected output, int64 [n]."""
    group = root_child(tree)
    groups, member = np.unique(group, return_inverse=True)
    mean = np.bincount(member, expected) / np.bincount(member, minlength=len(groups))
    place = np.empty(len(group), np.int64)
    place[tree.dfs_rows] = np.arange(len(group))
    return np.lexsort((place, group, -mean[member])).astype(np.int64)


def root_child(tree: PrefixTree) -> I64:
    """Top-level subtree of each row, int64 [n]: a node, or row - n for a row that hangs off the root."""
    top = np.arange(tree.n_nodes, dtype=np.int64)
    starts = np.flatnonzero(tree.parent == 0)
    for v in starts:
        top[v : tree.subtree_end[v]] = v
    group = top[tree.node_of]
    alone = tree.node_of == 0
    group[alone] = np.flatnonzero(alone) - len(group)
    return group
