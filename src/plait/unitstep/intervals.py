"""Schedules when the output of a request is only known to lie in [lower, upper]."""

from __future__ import annotations

import numpy as np

from plait.errors import InputError
from plait.table import F64, I64
from plait.unitstep.flow import LARGEST_AREA, OVERDUE_TOKENS, SMALLEST_LOWER, Flow, Rules, enter, new_flow, run
from plait.unitstep.kernel import area, check_requests
from plait.unitstep.sortedf import swap_order

WINDOW, KAPPA = 64, 2.0


def by_lower_end(s: I64, o: I64, lower: I64, kv_tokens: int) -> Flow:
    """Ascending memory area of (little more than) the lower end; an overflow evicts the request with most area left,
    which keeps its tokens."""
    _check(s, o, lower, kv_tokens)
    return _run(s, o, lower, area(s, lower + OVERDUE_TOKENS), Rules(WINDOW, KAPPA, LARGEST_AREA), kv_tokens)


def sorted_f_amin(s: I64, o: I64, lower: I64, kv_tokens: int, keep_progress: bool = False) -> Flow:
    """Sorted-F + A_min (papers.md §2): Sorted-F's list of the lower ends, strict; an overflow evicts the smallest
    lower bound first, which starts anew (or keeps its tokens) from its old place in the list."""
    _check(s, o, lower, kv_tokens)
    rank = np.empty(len(s))
    rank[swap_order(s, lower, kv_tokens)] = np.arange(len(s))
    return _run(s, o, lower, rank, Rules(1, 1.0, SMALLEST_LOWER, keep_progress), kv_tokens)


def interval_around(o: I64, factor: float, longest: I64, seed: int) -> tuple[I64, I64]:
    """[lower, upper] of a prediction that is off by up to ``factor`` either way, int64 [n] each: the true length lies
    log-uniformly inside [prediction / factor, prediction x factor]. inf: nothing is known, [1, longest]."""
    if np.isinf(factor):
        return np.ones_like(o), longest.copy()
    off = np.random.default_rng(seed).uniform(-1.0, 1.0, len(o))
    predicted = o * factor**off
    lower = np.maximum(np.floor(predicted / factor), 1).astype(np.int64)
    upper = np.minimum(np.ceil(predicted * factor), longest).astype(np.int64)
    return np.minimum(lower, o), np.maximum(upper, o)


def _run(s: I64, o: I64, lower: I64, rank: F64, rules: Rules, kv_tokens: int) -> Flow:
    flow = new_flow(s, o, lower, rank, rank)
    for row in np.argsort(rank, kind="stable"):
        enter(flow, row)
    return run(flow, rules, kv_tokens)


def _check(s: I64, o: I64, lower: I64, kv_tokens: int) -> None:
    check_requests(s, o, kv_tokens)
    bad = np.flatnonzero((lower < 1) | (lower > o))
    if len(bad):
        row = bad[0]
        raise InputError(f"row {row}: lower end {lower[row]} of the output; 1 to the true length {o[row]} is needed")
