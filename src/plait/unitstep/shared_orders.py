"""Unit-step schedules of backlogs whose prompts begin alike: lists by what a request adds, on shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from plait.table import I64
from plait.tree.prefix import PrefixTree
from plait.unitstep.kernel import area, decode_shared
from plait.unitstep.orders import KAPPA, WINDOW, Listing, dispersed, listing, overtaking, starts_of


def shared_starts_of(
    policy: str, s: I64, o: I64, kv_tokens: int, prefixes: PrefixTree, keep_going: Callable[[], bool] | None = None
) -> I64:
    """``orders.starts_of`` where rows that run at once hold the nodes of ``prefixes`` that they share only once.

    A schedule that counts every prompt in full fits all the more: it is kept where sharing gains nothing, so that no
    policy gets worse by it. ``latency`` tries further lists by what a request adds, then searches without sharing and
    plays the schedule found again with it.
    Raises what ``starts_of`` raises, and UsageError for an output longer than steptree.LONGEST.
    """
    tries: list[Callable[[], Listing]] = [lambda: listing(policy, s, o, kv_tokens)]
    if policy == "latency":
        added = added_tokens(s, prefixes)
        tries = [partial(dispersed, added, o), partial(overtaking, added, o), partial(together, added, o, prefixes)]
    found: list[I64] = []
    for turn in tries:
        if not found or keep_going is None or keep_going():
            found.append(_decoded(turn(), s, o, kv_tokens, prefixes))
    alone = starts_of(policy, s, o, kv_tokens, keep_going)
    found.append(alone)
    if policy == "latency":
        again = Listing(np.argsort(alone, kind="stable"), np.ones(len(s)))
        found.append(_decoded(again, s, o, kv_tokens, prefixes))
    return min(found, key=lambda starts: int(np.sum(starts)))


def added_tokens(s: I64, prefixes: PrefixTree) -> I64:
    """Prompt tokens of each row if a shared segment counts in equal parts for all rows below it, int64 [n]."""
    part = np.zeros(prefixes.n_nodes)
    rows, segment = prefixes.row_end - prefixes.row_begin, prefixes.segment_tokens
    for node in range(1, prefixes.n_nodes):
        part[node] = part[prefixes.parent[node]] + segment[node] / rows[node]
    return np.ceil(s - prefixes.prefix_tokens[prefixes.node_of] + part[prefixes.node_of]).astype(np.int64)


def together(added: I64, o: I64, prefixes: PrefixTree) -> Listing:
    """Rows that begin alike side by side, by the mean area of a row, so that a prefix is held once and not for long."""
    areas = area(added, o)
    top = np.arange(prefixes.n_nodes)  # of each node: its ancestor below the root
    for node in range(1, prefixes.n_nodes):
        if prefixes.parent[node] != 0:
            top[node] = top[prefixes.parent[node]]
    group = top[prefixes.node_of]
    mean = np.bincount(group, areas, prefixes.n_nodes) / np.maximum(np.bincount(group, minlength=prefixes.n_nodes), 1)
    rank = np.where(group == 0, areas, mean[group])
    return Listing(np.lexsort((areas, group, rank)), rank, WINDOW, KAPPA)


def _decoded(found: Listing, s: I64, o: I64, kv_tokens: int, prefixes: PrefixTree) -> I64:
    return decode_shared(s, o, found.order, found.key, kv_tokens, found.window, found.kappa, prefixes)
