"""Prompts that begin alike: what they share is held once, from the first start to the last completion below a node.

A request then adds its own tokens and, at the steps after the latest completion below a node of its path, that node's
segment. Later starts can only extend what is held, so usage with the request counted in never falls by them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait._numba import njit
from plait.table import I64
from plait.tree.prefix import PrefixTree
from plait.unitstep.steptree import BASE, StepTree, bound_by, greatest, lift


class Prefixes(NamedTuple):
    """A prefix tree of m nodes, n rows, and until when each node is held. Node 0 is the root."""

    parent: I64  # [m]
    segment: I64  # [m] tokens of the node alone
    node_of: I64  # [n] deepest node of each row
    latest: I64  # [m] latest completion of the rows below that have started


def new_prefixes(tree: PrefixTree) -> Prefixes:
    """Nothing is held."""
    return Prefixes(
        tree.parent.astype(np.int64),
        tree.segment_tokens,
        tree.node_of.astype(np.int64),
        np.zeros(tree.n_nodes, np.int64),
    )


def own_tokens(prompt_tokens: I64, tree: PrefixTree) -> I64:
    """Prompt tokens of each row beyond its deepest shared node, int64 [n]."""
    return prompt_tokens - tree.prefix_tokens[tree.node_of]


@njit
def shared_not_before(tree: StepTree, prefixes: Prefixes, row: int, own: int, o: int, t: int, kv_tokens: int) -> int:
    """A lower bound > t on the first feasible start, or t itself if the row may start at step t.

    Nodes towards the root are held longer: between the latest completions of two the same tokens are added.
    """
    end = t + o
    tokens, since = own, t
    node = prefixes.node_of[row]
    while since < end:
        until = end if node == 0 else min(end, max(since, prefixes.latest[node]))
        if until > since:
            top, at = greatest(tree, since + 1, until)
            bound = bound_by(tree, top + tokens - t - kv_tokens, at, o, t)
            if bound > t:
                return bound
        since = until
        tokens += prefixes.segment[node]
        node = prefixes.parent[node]
    return t


@njit
def add_shared(tree: StepTree, prefixes: Prefixes, row: int, own: int, o: int, t: int) -> None:
    """The row starts at t."""
    end = t + o
    lift(tree, t + 1, end, 1, own - t)
    node = prefixes.node_of[row]
    while node != 0:
        if prefixes.latest[node] < end:
            lift(tree, max(prefixes.latest[node], t) + 1, end, 0, prefixes.segment[node])
            prefixes.latest[node] = end
        node = prefixes.parent[node]
    tree.ending[end - tree.state[BASE] - 1] += 1
