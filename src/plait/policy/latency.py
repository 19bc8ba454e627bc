"""Orders for mean latency under real step costs: shortest-first rules, memory area, and machine time."""

from __future__ import annotations

import numpy as np

from plait.policy.base import Order, View
from plait.table import F64

WINDOW = 64
KAPPA = 1.3
AGEING = 1 / 200
"""Seconds of machine time that a second of waiting counts as: online, a request of machine time k is passed only by
those that arrive within k / AGEING seconds of it."""

END_BY = 0.9
"""Share of a backlog's machine time by which its longest answers should end: an engine empties little by little."""


def private_prompt_tokens(view: View) -> F64:
    """Prompt tokens a request adds beyond the deepest prefix it shares, at least 1, float64 [n]."""
    shared = view.tree.prefix_tokens[view.tree.node_of]
    private: F64 = np.maximum(view.table.prompt_tokens - shared, 1).astype(np.float64)
    return private


def mc_sf(view: View) -> Order:
    """Shortest expected output first, strict."""
    return _by(view.expected_output_tokens)


def mc_sf_skip(view: View) -> Order:
    """Shortest expected output first; any later request that fits may start."""
    return _by(view.expected_output_tokens, view.table.n, np.inf)


def size(view: View) -> Order:
    """Smallest prompt + expected output first, strict."""
    return _by(view.table.prompt_tokens + view.expected_output_tokens)


def area(view: View) -> Order:
    """Smallest expected memory area s o + (o² + o) / 2 first, strict."""
    return _by(_area(view, view.table.prompt_tokens.astype(np.float64)))


def latency(view: View) -> Order:
    """Smallest machine time first, but for answers so long that they would outlast all others; a blocked head overtaken
    by little larger requests, prefill throttled. Waiting counts: ``now_s - arrival_s`` seconds lower a key by AGEING
    times as many, and a key that is below zero is passed by nothing that arrives later."""
    key = started_in_time(machine_time_s(view), view)
    return _by(aged(key, view), WINDOW, KAPPA, throttle=True)


def aged(key: F64, view: View) -> F64:
    """Keys less what waiting has earned, float64 [n]. A backlog waits for itself: nothing changes."""
    arrival_s = view.table.arrival_s
    return key - AGEING * (view.now_s - arrival_s) if arrival_s.any() else key


def machine_time_s(view: View) -> F64:
    """Machine time of each request, float64 [n]: with private prompt s, output o and area A its share of the fixed
    time of steps (a A / M; a o / S where S sequences are all that run), the KV it reads (c A) and the tokens it
    computes (b (s + o - 1)); research.md §B."""
    cost, tokens = view.step_time, private_prompt_tokens(view)
    step_s = max(cost.weights_s, cost.gemm_base_s) + cost.overhead_s + cost.comm_base_s
    computed = tokens + view.expected_output_tokens - 1
    read_s = cost.kv_read_s_per_token * _area(view, tokens)
    seconds: F64 = step_s * steps_share(view) + read_s + cost.gemm_s_per_token * computed
    return seconds


def steps_share(view: View) -> F64:
    """Steps that a full engine spends on each request, float64 [n]: its share of the KV cache's tokens x steps, or of
    the sequences, where these run out first."""
    limit = view.capacity.max_num_seqs
    by_memory = _area(view, private_prompt_tokens(view)) / view.capacity.kv_tokens
    return np.maximum(by_memory, view.expected_output_tokens / limit) if limit else by_memory


def started_in_time(key: F64, view: View) -> F64:
    """Keys under which a backlog's longest answers start before their turn: each early enough to end by END_BY of the
    time that a full engine takes for everything. They cost the same whenever they run, but an engine that is left with
    only them takes whole steps for a few tokens. Float64 [n]: a request that is pulled forward gets just more than
    the key of the one whose turn it takes."""
    if len(key) == 0 or view.table.arrival_s.any():
        return key
    order = np.argsort(key, kind="stable")
    start_s = np.cumsum(key[order]) - key[order]
    total_s = float(key.sum())
    latest_s = END_BY * total_s - view.expected_output_tokens * (total_s / float(steps_share(view).sum()))
    turn = np.searchsorted(start_s, latest_s)
    rank = np.empty(len(key), np.int64)
    rank[order] = np.arange(len(key))
    behind = key[order[np.minimum(turn, rank)]] * (1 + 1e-9 * rank / len(key))
    return np.minimum(key, behind)


def _area(view: View, prompt_tokens: F64) -> F64:
    o = view.expected_output_tokens
    square = o * o if view.expected_square is None else view.expected_square
    return prompt_tokens * o + (square + o) / 2


def _by(key: F64, window: int = 1, kappa: float = 1.0, throttle: bool = False) -> Order:
    return Order(np.argsort(key, kind="stable").astype(np.int64), key, max(window, 1), kappa, throttle)
