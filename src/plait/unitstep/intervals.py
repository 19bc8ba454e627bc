"""Schedules when the output of a request is only known to lie in [lower, upper]."""

from __future__ import annotations

import numpy as np

from plait.errors import InputError
from plait.table import F64, I64
from plait.unitstep import gittins
from plait.unitstep.flow import (
    HEAD,
    LARGEST_AREA,
    OVERDUE_TOKENS,
    SMALLEST_LOWER,
    TAIL,
    Flow,
    Rules,
    enter,
    new_flow,
    run,
)
from plait.unitstep.kernel import area, check_requests
from plait.unitstep.sortedf import swap_order
from plait.unitstep.turnbull import quantiles

WINDOW, KAPPA = 64, 2.0
REFITS = 20
"""Times that what is believed of all lengths is fitted anew, after equal numbers of completions."""


def by_interval(s: I64, o: I64, lower: I64, upper: I64, kv_tokens: int) -> Flow:
    """Least Gittins index first at every step, lengths distributed as all intervals, and the completions so far, say.

    Where no lower end says anything (all are 1), by_lower_end is better: at first nothing is known of any end."""
    _check(s, o, lower, kv_tokens)
    bad = np.flatnonzero(~(upper >= o))
    if len(bad):
        row = bad[0]
        raise InputError(f"row {row}: upper end {upper[row]} of the output; the true length {o[row]} or more is needed")
    if np.all(lower == 1):
        return by_lower_end(s, o, lower, kv_tokens)
    n = len(s)
    flow = new_flow(s, o, lower, np.zeros(n), np.zeros(n))
    flow.waiting[:] = np.arange(n)
    flow.counts[HEAD], flow.counts[TAIL] = 0, n
    for turn in range(REFITS):
        done = flow.finish >= 0
        least = np.where(done, o, np.maximum(lower, flow.made + 1))
        lengths = quantiles(least, np.where(done, o, upper))
        gittins.renew(flow, lengths)
        flow = gittins.run(flow, lengths, kv_tokens, left=n - n * (turn + 1) // REFITS)
    return flow


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
    bad = np.flatnonzero(~((lower >= 1) & (lower <= o)))
    if len(bad):
        row = bad[0]
        raise InputError(f"row {row}: lower end {lower[row]} of the output; 1 to the true length {o[row]} is needed")
