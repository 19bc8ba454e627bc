"""Orders for mean latency under real step costs: shortest-first rules, memory area, and machine time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from plait._numba import njit
from plait.model.steptime import empty_step_s
from plait.policy.base import Order, View
from plait.policy.blend import units, work
from plait.table import F64, I64

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
    """Smallest machine time first, in batches that share a prefix, but for answers so long that they would outlast all
    others: of these, such as would not have to compute a prefix again come early. A blocked head is overtaken by little
    larger requests, prefill throttled. Waiting counts: ``now_s - arrival_s`` seconds lower a key by AGEING times as
    many, and a key that is below zero is passed by nothing that arrives later."""
    lost_tokens = lost_prefix_tokens(view)
    batched = in_batches(machine_time_s(view), view, lost_tokens)
    key = aged(np.where(lost_tokens > 0, batched, started_in_time(batched, view)), view)
    return dataclasses.replace(_by(key, WINDOW, KAPPA), throttle_prefill=True, delay_weight=delay_weight(view))


def in_batches(key: F64, view: View, lost_tokens: F64) -> F64:
    """Keys under which requests of a prefix group run together where memory would not keep its prefix between them
    (``lost_tokens``: ``lost_prefix_tokens``), float64 [n]. A batch pays for its prefix; its key is what it takes on
    average (jobs in families with set-up times: Smith's ratio of a batch), and a trifle more the later a request comes
    in it, the shortest first. Summed over all requests, keys are the machine time of all batches."""
    unit = units(view)
    if not lost_tokens.any():
        return key
    of_unit = np.zeros(int(unit.max()) + 1)
    of_unit[unit] = lost_tokens * view.step_time.gemm_s_per_token
    rows = np.lexsort((key, unit))
    batched = _batched(rows, unit, key, of_unit)
    batched[rows] *= 1 + 1e-9 * np.arange(len(rows)) / len(rows)
    return batched


def lost_prefix_tokens(view: View) -> F64:
    """What a request would have to compute again of its group's prefix if it ran apart from the group, float64 [n];
    zeros where memory keeps all prefixes."""
    (_, _, tokens), unit = work(view), units(view)
    if tokens.sum() + view.expected_output_tokens.sum() <= view.capacity.kv_tokens:
        return np.zeros(len(tokens))
    lost: F64 = np.maximum(0.0, np.bincount(unit, tokens - private_prompt_tokens(view)))[unit]
    return lost


@njit
def _batched(rows: I64, unit: I64, key: F64, prefix_s: F64) -> F64:
    """Batches of ``rows``, which come by unit, then by key. The next row of the unit joins while that lowers the
    average, or costs less than its part of the prefix that it and those behind would have to compute again."""
    out = np.empty(len(key))
    begin = last = 0
    while begin < len(rows):
        of = unit[rows[begin]]
        while last < len(rows) and unit[rows[last]] == of:
            last += 1
        total, end = prefix_s[of] + key[rows[begin]], begin + 1
        while end < last and (key[rows[end]] - prefix_s[of] / (last - end)) * (end - begin) < total:
            total += key[rows[end]]
            end += 1
        for k in range(begin, end):
            out[rows[k]] = total / (end - begin)
        begin = end
    return out


def aged(key: F64, view: View) -> F64:
    """Keys less what waiting has earned, float64 [n]. A backlog waits for itself: nothing changes."""
    arrival_s = view.table.arrival_s
    return key - AGEING * (view.now_s - arrival_s) if arrival_s.any() else key


def machine_time_s(view: View) -> F64:
    """Machine time of each request, float64 [n]: its share of the fixed time of steps and what it adds to them;
    research.md §B."""
    seconds: F64 = empty_step_s(view.step_time) * steps_taken(view) + _added_s(view)
    return seconds


def steps_share(view: View) -> F64:
    """Steps that a full engine spends on each request, float64 [n]: its share of the KV cache's tokens x steps, or of
    the sequences, where these run out first."""
    limit = view.capacity.max_num_seqs
    by_memory = _area(view, private_prompt_tokens(view)) / view.capacity.kv_tokens
    return np.maximum(by_memory, view.expected_output_tokens / limit) if limit else by_memory


def steps_taken(view: View) -> F64:
    """The same of an engine that is only as full as it pays, float64 [n]."""
    full, paid = steps_share(view), view.expected_output_tokens / worth_running(view)
    return full if full.sum() >= paid.sum() else paid


def worth_running(view: View) -> float:
    """Requests that it pays to run side by side (``scheduling/queues.py:prefill_room``); inf: as many as fit."""
    weight = delay_weight(view) * float(_added_s(view).sum())
    if weight <= 0:
        return np.inf
    steps = float(view.expected_output_tokens.sum())
    return max(1.0, math.sqrt(empty_step_s(view.step_time) * view.table.n * steps / weight))


def delay_weight(view: View) -> float:
    """What a delay of those that run costs, from 0 to 1: how far they are, as a share of half their work.

    The work done so far on those that run has answered nothing yet. With w seconds of work a request, d of them decode,
    o output tokens, it is w - d E[o²] / 2 E[o]² on average: all but the rest of their stay (inspection paradox). Equal
    answers without prefill give w / 2, weight 1. Answers as spread as exponential ones give 0: those that run are no
    nearer to their end than new ones, and to run more ends the short among them early."""
    o = view.expected_output_tokens
    square = o * o if view.expected_square is None else view.expected_square
    added = _added_s(view)
    decode = added - view.step_time.gemm_s_per_token * (private_prompt_tokens(view) - 1)
    return float(np.clip(2.0 - (decode * square / (o * o)).sum() / added.sum(), 0.0, 1.0)) if added.any() else 0.0


def _added_s(view: View) -> F64:
    """What each request adds to steps, float64 [n]: the tokens it computes, and the KV it reads."""
    cost, tokens = view.step_time, private_prompt_tokens(view)
    seconds: F64 = cost.kv_read_s_per_token * _area(view, tokens)
    seconds += cost.gemm_s_per_token * (tokens + view.expected_output_tokens - 1)
    return seconds


def started_in_time(key: F64, view: View) -> F64:
    """Keys under which a backlog's longest answers start before their turn: each early enough to end by END_BY of the
    time that the engine takes for everything. They cost the same whenever they run, but an engine that is left with
    only them takes whole steps for a few tokens. Float64 [n]: a request that is pulled forward gets just more than
    the key of the one whose turn it takes."""
    if len(key) == 0 or view.table.arrival_s.any():
        return key
    order = np.argsort(key, kind="stable")
    start_s = np.cumsum(key[order]) - key[order]
    total_s = float(key.sum())
    latest_s = END_BY * total_s - view.expected_output_tokens * (total_s / float(steps_taken(view).sum()))
    turn = np.searchsorted(start_s, latest_s)
    rank = np.empty(len(key), np.int64)
    rank[order] = np.arange(len(key))
    behind = key[order[np.minimum(turn, rank)]] * (1 + 1e-9 * rank / len(key))
    return np.minimum(key, behind)


def _area(view: View, prompt_tokens: F64) -> F64:
    o = view.expected_output_tokens
    square = o * o if view.expected_square is None else view.expected_square
    return prompt_tokens * o + (square + o) / 2


def _by(key: F64, window: int = 1, kappa: float = 1.0) -> Order:
    return Order(np.argsort(key, kind="stable").astype(np.int64), key, max(window, 1), kappa)
