"""``plait simulate --time steps``: schedules of Sorted-F's unit-step model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from plait.data.traces import Trace, read_trace
from plait.errors import CapacityError, InputError, UsageError
from plait.table import I64
from plait.unitstep import online
from plait.unitstep.bounds import Bound, best_bound
from plait.unitstep.intervals import sorted_f_amin
from plait.unitstep.kernel import check_requests, total_completion
from plait.unitstep.orders import starts_of
from plait.unitstep.shared_orders import shared_starts_of
from plait.unitstep.sharing import own_tokens

DEFAULT_POLICIES = ("fcfs", "latency")
DEFAULT_SEARCH_S = 4.0
"""Time that ``latency`` takes, after compilation, where --optimize does not say; 0 leaves its portfolio alone."""


def run(traces: tuple[str, ...], **options: Any) -> None:
    """Schedule each trace under each policy; print a table or JSON, write one schedule.

    Reads of ``options``: kv_tokens (needed), policies, optimize ("5s" or None), schedule (path or None), as_json.
    Raises UsageError for options that do not fit together, InputError and CapacityError for unusable rows.
    """
    kv_tokens = options["kv_tokens"]
    if kv_tokens is None:
        raise UsageError("--time steps needs --kv-tokens, the budget that all running requests share")
    policies = options["policies"] or DEFAULT_POLICIES
    schedule = options.get("schedule")
    if schedule and (len(traces) > 1 or len(policies) > 1):
        raise UsageError("--schedule writes one schedule: give one trace and one --policy")
    limit_s = _seconds(options.get("optimize"))
    rows = []
    for path in traces:
        trace = read_trace(path)
        lengths = _columns(trace)
        _require_schedulable(trace, kv_tokens)
        schedules = {policy: _starts(trace, policy, kv_tokens, limit_s) for policy in policies}
        least = min(total_completion(starts, trace.output_tokens) for starts in schedules.values())
        prompt = own_tokens(lengths[0], trace.tree) if _shares(trace) else lengths[0]
        bound = best_bound(prompt, lengths[1], kv_tokens, least)
        rows += [_row(trace, policy, starts, kv_tokens, bound) for policy, starts in schedules.items()]
        if schedule:
            _write(Path(schedule), schedules[policies[0]])
    click.echo(json.dumps({"policies": rows}, indent=2) if options["as_json"] else _table(rows))


def _require_schedulable(trace: Trace, kv_tokens: int) -> None:
    """Raise CapacityError naming the trace and its first row that exceeds the budget on its own."""
    try:
        check_requests(*_columns(trace), kv_tokens)
    except CapacityError as error:
        raise CapacityError(f"{trace.name}: {error}") from None


def _starts(trace: Trace, policy: str, kv_tokens: int, limit_s: float) -> I64:
    """Start steps of one policy. Where requests arrive over time, none starts before its arrival; in a backlog what
    prompts share is held once."""
    arrival = _arrival(trace)
    if policy == "sorted-f-online" or arrival.any():
        return online.starts_of(online.serve(policy, *_columns(trace), arrival, kv_tokens))
    if policy == "sorted-f-amin":  # the trace tells all lengths: nothing is evicted
        return online.starts_of(sorted_f_amin(*_columns(trace), trace.output_tokens, kv_tokens))
    if _shares(trace):
        return shared_starts_of(policy, *_columns(trace), kv_tokens, trace.tree, _clock(limit_s))
    return starts_of(policy, *_columns(trace), kv_tokens, _clock(limit_s))


def _shares(trace: Trace) -> bool:
    """Whether what prompts share is held once: rows of a backlog that begin alike."""
    return trace.tree.n_nodes > 1 and not _arrival(trace).any()


def _arrival(trace: Trace) -> I64:
    """Arrival steps: ``arrival_s`` of the trace counts steps here, rounded up."""
    return np.ceil(trace.table.arrival_s).astype(np.int64)


def _columns(trace: Trace) -> tuple[I64, I64]:
    return trace.table.prompt_tokens, trace.output_tokens


def _seconds(text: str | None) -> float:
    """ "5s" -> 5.0; nothing -> DEFAULT_SEARCH_S."""
    if text is None:
        return DEFAULT_SEARCH_S
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s?", text)
    if match is None:
        raise UsageError(f"--optimize is '{text}'; seconds are needed, like 5s")
    return float(match[1])


def _clock(limit_s: float) -> Callable[[], bool] | None:
    """A question that is answered yes until ``limit_s`` from now; None: no search."""
    if limit_s == 0:
        return None
    end = time.monotonic() + limit_s
    return lambda: time.monotonic() < end


def _row(trace: Trace, policy: str, starts: I64, kv_tokens: int, bound: Bound) -> dict[str, Any]:
    """Figures of one schedule, in steps: TEL and its bound from step 0, latencies from the arrival."""
    done = starts + trace.output_tokens
    waited = done - _arrival(trace)
    return {
        "trace": trace.name,
        "policy": policy,
        "requests": len(done),
        "kv_tokens": kv_tokens,
        "tel": int(np.sum(done)),
        "mean": float(np.mean(waited)),
        "p50": float(np.percentile(waited, 50)),
        "p99": float(np.percentile(waited, 99)),
        "makespan": int(np.max(done)),
        "bound": bound.tel,
        "bound_kind": bound.kind,
        "ratio": float(np.sum(done)) / bound.tel,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'trace':24}{'policy':18}{'mean':>12}{'p50':>12}{'p99':>12}{'TEL / bound':>13}"]
    for row in rows:
        figures = f"{row['mean']:12.1f}{row['p50']:12.0f}{row['p99']:12.0f}{row['ratio']:13.3f}"
        lines.append(f"{row['trace'][:23]:24}{row['policy']:18}{figures}")
    return "\n".join(lines)


def _write(path: Path, starts: I64) -> None:
    """CSV request,start_step; request = 0-based row of the trace."""
    table = np.column_stack([np.arange(len(starts)), starts])
    try:
        np.savetxt(path, table, fmt="%d", delimiter=",", header="request,start_step", comments="")
    except OSError as error:
        raise InputError(f"{path}: cannot write the schedule: {error.strerror}") from None
