"""Requests that arrive while others run, lengths known: nothing of a request is used before its arrival step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plait.errors import InputError, UsageError
from plait.table import F64, I64
from plait.unitstep.flow import HEAD, TAIL, Flow, Rules, enter, new_flow, run, spells_of
from plait.unitstep.kernel import area, check_requests
from plait.unitstep.sortedf import SWAP_ROWS, swap_order

WINDOW, KAPPA = 64, 1.5
AGEING = 1 / 400
"""Share of the KV budget that a step of waiting takes off a request's area. A request of area A is overtaken only by
those that arrive within KAPPA x A / (AGEING x budget) steps after it."""


def ranks(policy: str, s: I64, o: I64, arrival: I64, kv_tokens: int) -> F64:
    """Fixed rank of each request, smaller first, float64 [n]."""
    known: dict[str, Callable[[], F64]] = {
        "fcfs": lambda: arrival.astype(np.float64),
        "mc-sf": lambda: o.astype(np.float64),
        "size": lambda: (s + o).astype(np.float64),
        "area": lambda: area(s, o),
        "latency": lambda: area(s, o) + AGEING * kv_tokens * arrival,
    }
    if policy not in known:
        raise UsageError(
            f"policy '{policy}' cannot serve requests that arrive over time; known: sorted-f-online, {', '.join(known)}"
        )
    return known[policy]()


def serve(policy: str, s: I64, o: I64, arrival: I64, kv_tokens: int) -> Flow:
    """Run requests that arrive at steps ``arrival``, int64 [n], to their end.

    Raises UsageError for a policy without an online form, InputError and CapacityError naming the first unusable row.
    """
    check_requests(s, o, kv_tokens)
    bad = np.flatnonzero(~(arrival >= 0))
    if len(bad):
        raise InputError(f"row {bad[0]}: arrives at step {arrival[bad[0]]}; a step >= 0 is needed")
    if policy == "sorted-f-online":
        return _receding_horizon(s, o, arrival, kv_tokens)
    rules = Rules(WINDOW, KAPPA) if policy == "latency" else Rules()
    flow = new_flow(s, o, o, ranks(policy, s, o, arrival, kv_tokens), area(s, o))
    return _through(flow, arrival, rules, kv_tokens, lambda flow: None)


def starts_of(flow: Flow) -> I64:
    """Start step of each request, int64 [n]; with known lengths each runs once."""
    starts = np.empty(len(flow.s), np.int64)
    spells = spells_of(flow)
    starts[spells[:, 0]] = spells[:, 1]
    return starts


def _receding_horizon(s: I64, o: I64, arrival: I64, kv_tokens: int) -> Flow:
    """Sorted-F-Online (papers.md §2): whenever requests arrive, Sorted-F by local swaps (beyond SWAP_ROWS by its greedy
    start alone) orders all that wait anew; its list is followed strictly."""
    zero = np.zeros(len(s))

    def replan(flow: Flow) -> None:
        place = slice(int(flow.counts[HEAD]), int(flow.counts[TAIL]))
        rows = np.sort(flow.waiting[place])
        if len(rows) <= SWAP_ROWS:
            order = swap_order(s[rows], o[rows], kv_tokens)
        else:
            order = np.argsort(o[rows] * (s[rows] + o[rows]), kind="stable")
        flow.waiting[place] = rows[order]
        flow.rank[rows[order]] = np.arange(len(rows))

    return _through(new_flow(s, o, o, zero, zero), arrival, Rules(), kv_tokens, replan)


def _through(flow: Flow, arrival: I64, rules: Rules, kv_tokens: int, arrived: Callable[[Flow], None]) -> Flow:
    """Let rows enter at their steps, tell ``arrived``, and run to the end."""
    order = np.argsort(arrival, kind="stable")
    steps, first = np.unique(arrival[order], return_index=True)
    for step, rows in zip(steps, np.split(order, first[1:]), strict=True):
        flow = run(flow, rules, kv_tokens, int(step))
        for row in rows:
            enter(flow, row)
        arrived(flow)
    return run(flow, rules, kv_tokens)
