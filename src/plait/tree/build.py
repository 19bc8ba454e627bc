"""Token columns -> PrefixTree: sort the prompts, note what neighbours share, turn that into nodes.

The sort is a radix sort from the first token on that jumps over what a whole range shares, so each token is looked at
about once and nothing but a few integers a row is allocated beside the token column. Traces without tokens (groups,
Mooncake's block ids) only differ in how their order and shared lengths come about.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait._numba import njit
from plait.errors import InputError
from plait.table import I32, I64
from plait.tree.prefix import PrefixTree

_END = np.iinfo(np.int64).min
_INSERTION_SORT_ROWS = 24


def build_tree(tokens: I32, offsets: I64, min_segment_tokens: int = 1, block_tokens: int = 1) -> PrefixTree:
    """Prefix tree of n prompts; prompt i is ``tokens[offsets[i]:offsets[i + 1]]``. Equal prompts keep their row order.

    ``block_tokens``: sharing counts in whole blocks of this size only (engines reuse KV by block).
    ``min_segment_tokens``: a node whose own segment is shorter is left out and its rows hang off its parent, so that
    prompts that happen to start with the same word or two are no group. O(tokens) time.
    Raises InputError if the offsets do not describe the token column.
    """
    tokens, offsets = _token_column(tokens, offsets)
    rows = np.arange(len(offsets) - 1, dtype=np.int64)
    shared = _sort_prompts(tokens, offsets, rows)
    if block_tokens > 1:
        shared -= shared % block_tokens
    return tree_from_order(rows, shared, min_segment_tokens)


def tree_from_groups(prompt_tokens: I64, group: I64, shared_tokens: I64) -> PrefixTree:
    """Tree of a trace that says which requests share how much: the rows of one ``group`` (int [n]) start with the same
    text, row i with ``shared_tokens[i]`` tokens of it (clipped to its prompt). A negative group shares nothing."""
    group = np.asarray(group, np.int64)
    own = np.where(group < 0, 0, np.minimum(shared_tokens, prompt_tokens)).astype(np.int64)
    rows = np.lexsort((own, group)).astype(np.int64)
    shared = np.zeros(len(rows), np.int64)
    same = group[rows[1:]] == group[rows[:-1]]
    shared[1:] = np.where(same, np.minimum(own[rows[1:]], own[rows[:-1]]), 0)
    return tree_from_order(rows, shared)


def tree_from_blocks(
    hash_ids: npt.NDArray[np.integer], offsets: I64, block_tokens: int, prompt_tokens: I64
) -> PrefixTree:
    """Tree of a trace of hashed blocks (Mooncake): row i has block ids ``hash_ids[offsets[i]:offsets[i + 1]]`` of
    ``block_tokens`` tokens each, the last one maybe not full. Raises InputError if offsets and ids do not fit."""
    _, ids = np.unique(hash_ids, return_inverse=True)
    return tree_from_int_blocks(ids.astype(np.int32), offsets, block_tokens, prompt_tokens)


def tree_from_int_blocks(blocks: I32, offsets: I64, block_tokens: int, prompt_tokens: I64) -> PrefixTree:
    """``tree_from_blocks`` for int32 ids, which are neither copied nor changed."""
    blocks, offsets = _token_column(blocks, offsets)
    rows = np.argsort(
        prompt_tokens, kind="stable"
    )  # of rows with equal ids the one with the shortest last block is first
    shared = _sort_prompts(blocks, offsets, rows)
    shared *= block_tokens
    shared[1:] = np.minimum(shared[1:], np.minimum(prompt_tokens[rows[1:]], prompt_tokens[rows[:-1]]))
    return tree_from_order(rows, shared)


def tree_from_order(rows: I64, shared: I64, min_segment_tokens: int = 1) -> PrefixTree:
    """Tree of rows in depth-first order; ``shared[k]`` = tokens that ``rows[k - 1]`` and ``rows[k]`` share (k >= 1)."""
    begin, end, depth = _nodes(shared)
    if min_segment_tokens > 1:
        keep = _long_enough(begin, end, depth, min_segment_tokens)
        begin, end, depth = begin[keep], end[keep], depth[keep]
    parent, subtree_end, node_at = _links(begin, end, len(rows))
    node_of = np.empty(len(rows), np.int32)
    node_of[rows] = node_at
    return PrefixTree(
        parent=parent,
        prefix_tokens=depth,
        subtree_end=subtree_end,
        node_of=node_of,
        dfs_rows=rows,
        row_begin=begin,
        row_end=end,
    )


def _token_column(tokens: I32, offsets: I64) -> tuple[I32, I64]:
    """The inputs as contiguous int32 and int64, checked: the compiled code below does not check bounds."""
    offsets = np.ascontiguousarray(offsets, np.int64)
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise InputError(
            f"offsets must run from 0 to the {len(tokens)} tokens of the column, one more than there are rows"
        )
    if np.any(offsets[1:] < offsets[:-1]):
        row = int(np.flatnonzero(offsets[1:] < offsets[:-1])[0])
        raise InputError(f"row {row}: its prompt ends before it begins (offsets {offsets[row]}, {offsets[row + 1]})")
    return np.ascontiguousarray(tokens, np.int32), offsets


def _sort_prompts(tokens: I32, offsets: I64, rows: I64) -> I64:
    """Sort ``rows`` (int64 [n], changed) by prompt; equal ones keep their order. Returns the tokens that each row
    of the result shares with the one before it, int64 [n], 0 for the first."""
    shared = np.zeros(len(rows), np.int64)
    _radix_sort(tokens, offsets, rows, shared)
    return shared


@njit
def _common(tokens: I32, a: int, b: int, at: int, stop: int) -> int:
    """First position in ``at .. stop`` where the prompts that begin at a and b differ (``stop`` if none does)."""
    while at + 8 <= stop:
        different = np.int32(0)
        for i in range(8):  # no exit inside: compiles to one vector comparison
            different |= tokens[a + at + i] ^ tokens[b + at + i]
        if different != 0:
            break
        at += 8
    while at < stop and tokens[a + at] == tokens[b + at]:
        at += 1
    return at


@njit
def _sort_range(keys: I64, rows: I64, begin: int, end: int) -> None:
    """Sort ``rows[begin:end]`` and ``keys[begin:end]`` by key, in place; rows with equal keys keep their order."""
    if end - begin <= _INSERTION_SORT_ROWS:
        for i in range(begin + 1, end):
            key, row, j = keys[i], rows[i], i
            while j > begin and keys[j - 1] > key:
                keys[j], rows[j] = keys[j - 1], rows[j - 1]
                j -= 1
            keys[j], rows[j] = key, row
    else:
        order = np.argsort(keys[begin:end], kind="mergesort")
        keys[begin:end] = keys[begin:end][order]
        rows[begin:end] = rows[begin:end][order]


@njit
def _radix_sort(tokens: I32, offsets: I64, rows: I64, shared: I64) -> None:
    """Sort ``rows`` by prompt and fill ``shared``. A range of rows on the stack agrees on its
    first ``depth`` tokens. It is advanced to all that it agrees on, sorted by the next token, and cut where that
    differs."""
    n = len(rows)
    keys = np.empty(n, np.int64)
    stack = np.empty((n // 2 + 2, 3), np.int64)  # ranges are disjoint and hold two rows or more
    stack[0] = np.array([0, n, 0])
    top = 1
    while top > 0:
        top -= 1
        begin, end, depth = stack[top]
        if end - begin < 2:
            continue
        first = offsets[rows[begin]]
        agreed = offsets[rows[begin] + 1] - first
        for i in range(begin + 1, end):
            at = offsets[rows[i]]
            agreed = _common(tokens, first, at, depth, min(agreed, offsets[rows[i] + 1] - at))
        for i in range(begin, end):
            at = offsets[rows[i]] + agreed
            keys[i] = tokens[at] if at < offsets[rows[i] + 1] else _END
        _sort_range(keys, rows, begin, end)
        run = begin
        for i in range(begin + 1, end + 1):
            if i < end:
                shared[i] = agreed  # the ranges pushed here overwrite their inner ones
            if i == end or keys[i] != keys[run]:
                if i - run > 1 and keys[run] != _END:
                    stack[top, 0], stack[top, 1], stack[top, 2] = run, i, agreed + 1
                    top += 1
                run = i


@njit
def _nodes(shared: I64) -> tuple[I64, I64, I64]:
    """Nodes in preorder: first row position, one past the last, tokens from the root; node 0 is the root.

    A node is a maximal run of rows whose neighbours all share ``depth`` tokens or more, some exactly that many. The
    scan closes inner nodes before outer ones; counting nodes by first position puts them into preorder."""
    n = len(shared)
    begin, end, depth = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    open_begin, open_depth = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    starts = np.zeros(n + 1, np.int64)
    m, top = 0, 0
    for k in range(1, n + 1):
        level = shared[k] if k < n else 0
        left = k - 1
        while top > 0 and open_depth[top - 1] > level:
            top -= 1
            left = open_begin[top]
            begin[m], end[m], depth[m] = left, k, open_depth[top]
            starts[left + 1] += 1
            m += 1
        if level > 0 and (top == 0 or open_depth[top - 1] < level):
            open_begin[top], open_depth[top] = left, level
            top += 1
    for k in range(n):
        starts[k + 1] += starts[k]
    order = np.empty(m, np.int64)
    for v in range(m - 1, -1, -1):
        order[starts[begin[v]]] = v
        starts[begin[v]] += 1
    head = np.zeros(1, np.int64)
    return (
        np.concatenate((head, begin[order])),
        np.concatenate((head + n, end[order])),
        np.concatenate((head, depth[order])),
    )


@njit
def _long_enough(begin: I64, end: I64, depth: I64, min_segment_tokens: int) -> npt.NDArray[np.bool_]:
    """Which nodes (preorder) lie at least ``min_segment_tokens`` beyond the nearest kept node above, bool [m]."""
    keep = np.ones(len(begin), np.bool_)
    path = np.zeros(len(begin), np.int64)
    top = 1
    for v in range(1, len(begin)):
        while top > 1 and end[path[top - 1]] <= begin[v]:
            top -= 1
        keep[v] = depth[v] - depth[path[top - 1]] >= min_segment_tokens
        if keep[v]:
            path[top] = v
            top += 1
    return keep


@njit
def _links(begin: I64, end: I64, n: int) -> tuple[I32, I32, I32]:
    """Parents and subtree ends of preorder nodes, int32 [m], and the deepest node at each row position, int32 [n]."""
    m = len(begin)
    parent = np.full(m, -1, np.int32)
    subtree_end = np.full(m, m, np.int32)
    node_at = np.zeros(n, np.int32)
    path = np.zeros(m + 1, np.int32)
    top, position = 1, 0
    for v in range(1, m + 1):
        start = begin[v] if v < m else n
        while top > 1 and end[path[top - 1]] <= start:
            top -= 1
            node_at[position : end[path[top]]] = path[top]
            position = end[path[top]]
            subtree_end[path[top]] = v
        node_at[position:start] = path[top - 1]
        position = max(position, start)
        if v < m:
            parent[v] = path[top - 1]
            path[top] = v
            top += 1
    return parent, subtree_end, node_at
