"""How much of a job's prompts is computed once: the most any order can share, and what a given order keeps.

Sharing = share of all prompt tokens that need not be computed because a prefix of the prompt is cached.
"""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.table import I32, I64
from plait.tree.prefix import PrefixTree


def unique_tokens(tree: PrefixTree, prompt_tokens: I64) -> int:
    """Prompt tokens computed when no shared segment is computed twice: all segments plus all private suffixes."""
    suffixes = prompt_tokens.sum() - tree.prefix_tokens[tree.node_of].sum()
    return int(tree.segment_tokens.sum() + suffixes)


def sharing_ratio(tree: PrefixTree, prompt_tokens: I64) -> float:
    """The most that any order can share (unlimited cache), 0 .. 1."""
    total = int(prompt_tokens.sum())
    return (total - unique_tokens(tree, prompt_tokens)) / max(1, total)


def kept_sharing(tree: PrefixTree, prompt_tokens: I64, order: I64, kv_tokens: int | None = None) -> float:
    """Sharing of requests run one after another in ``order`` (rows, each once), 0 .. 1.

    ``kv_tokens``: size of an LRU prefix cache that drops whole segments, prompts only, leaves first. None: a request
    finds only what it shares with the one before it, which is what an order alone guarantees.
    """
    total = max(1, int(prompt_tokens.sum()))
    if kv_tokens is None:
        hits = int(shared_with_previous(tree, order).sum())
    else:
        hits = _lru_hits(tree.parent, tree.prefix_tokens, tree.node_of, prompt_tokens, order, kv_tokens)
    return float(hits) / total


def shared_with_previous(tree: PrefixTree, order: I64) -> I64:
    """Tokens that each row of ``order`` shares with the one before it, int64 [n]; 0 for the first."""
    return _adjacent_hits(tree.parent, tree.prefix_tokens, tree.node_of, order)


def prefix_groups(tree: PrefixTree, least_tokens: int) -> I32:
    """Group of each row, int32 [n]: the deepest node above it that adds at least ``least_tokens`` to its parent, 0 if
    there is none. Rows of a group should run at one server, one after the other."""
    return _worthy_nodes(tree.parent, tree.segment_tokens, least_tokens)[tree.node_of]


@njit
def _worthy_nodes(parent: I32, segment_tokens: I64, least_tokens: int) -> I32:
    """Each node itself if it is long enough, else what its parent stands for; int32 [m]."""
    group = np.zeros(len(parent), np.int32)
    for v in range(1, len(parent)):
        group[v] = v if segment_tokens[v] >= least_tokens else group[parent[v]]
    return group


@njit
def _adjacent_hits(parent: I32, prefix_tokens: I64, node_of: I32, order: I64) -> I64:
    """Preorder ids: the larger one of two different nodes is not above the other, so it may step up."""
    shared = np.zeros(len(order), np.int64)
    for k in range(1, len(order)):
        a, b = node_of[order[k - 1]], node_of[order[k]]
        while a != b:
            if a > b:
                a = parent[a]
            else:
                b = parent[b]
        shared[k] = prefix_tokens[a]
    return shared


@njit
def _lru_hits(parent: I32, prefix_tokens: I64, node_of: I32, prompt_tokens: I64, order: I64, kv_tokens: int) -> int:
    """Cached prompt tokens, summed. Entries are nodes (v) and private suffixes (m + row) in one list by last use; a
    path is touched from its leaf up, so that no entry is older than one below it and the oldest is always a leaf."""
    m, n = len(parent), len(node_of)
    newer, older = np.full(m + n, -1, np.int64), np.full(m + n, -1, np.int64)
    cached = np.zeros(m + n, np.bool_)
    size = np.zeros(m + n, np.int64)
    for v in range(1, m):
        size[v] = prefix_tokens[v] - prefix_tokens[parent[v]]
    newest, oldest, used, hits = -1, -1, 0, 0
    for row in order:
        size[m + row] = prompt_tokens[row] - prefix_tokens[node_of[row]]
        entry = m + row
        while entry > 0:
            if cached[entry]:
                hits += size[entry]
                if newer[entry] >= 0:  # unlink
                    older[newer[entry]] = older[entry]
                else:
                    newest = older[entry]
                if older[entry] >= 0:
                    newer[older[entry]] = newer[entry]
                else:
                    oldest = newer[entry]
            else:
                cached[entry] = True
                used += size[entry]
            older[entry], newer[entry] = newest, -1
            if newest >= 0:
                newer[newest] = entry
            else:
                oldest = entry
            newest = entry
            entry = node_of[row] if entry >= m else parent[entry]
        while used > kv_tokens and oldest >= 0:
            cached[oldest] = False
            used -= size[oldest]
            oldest = newer[oldest]
            if oldest >= 0:
                older[oldest] = -1
            else:
                newest = -1
    return hits
