"""Deadlines: until when each request may wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.model.steptime import empty_step_s
from plait.policy.base import View
from plait.policy.latency import machine_time_s, steps_share
from plait.table import F64

CAUTION = 1.25
"""Expected times are taken this many times as long: a request that starts too early costs little, one that starts too
late its deadline."""


def latest_admission_s(view: View, waiting: npt.NDArray[np.bool_]) -> F64:
    """Latest time at which each waiting row can become the first of its queue so that it and every one that is due
    after it can still be in time; inf where there is no deadline, float64 [n].

    Least slack over one machine: a row must be first by its deadline less the time it waits for room and runs on a full
    engine, and early enough that the machine time of all rows due after it still fits in behind it. Where one is due,
    all that are due before it are: due rows in this order are an earliest-deadline-first schedule that starts as late
    as it may."""
    latest = np.full(view.table.n, np.inf)
    rows = np.flatnonzero(waiting & np.isfinite(view.table.deadline_s))
    if not len(rows):
        return latest
    work_s = CAUTION * machine_time_s(view)
    steps = room_steps(view) + view.expected_output_tokens + 1.0
    alone = view.table.deadline_s - CAUTION * full_step_s(view) * steps
    rows = rows[np.argsort(alone[rows], kind="stable")]
    until_s = np.cumsum(work_s[rows])
    least = np.minimum.accumulate((alone[rows] - until_s)[::-1])[::-1]
    latest[rows] = until_s - work_s[rows] + least
    return latest


def room_steps(view: View) -> float:
    """Steps until a full engine has room again: half a stay of the requests that hold its memory, by what they hold."""
    held = steps_share(view)
    return float((held * view.expected_output_tokens).sum()) / float(held.sum()) / 2


def full_step_s(view: View) -> float:
    """Mean seconds of a step while the engine is full, at most those of a step that reads the whole KV cache and takes
    all the prefill it may."""
    st, capacity = view.step_time, view.capacity
    mean_s = float(machine_time_s(view).sum()) / float(steps_share(view).sum())
    if not capacity.max_batched_tokens:
        return mean_s
    most_s = empty_step_s(st) + st.kv_read_s_per_token * capacity.kv_tokens
    most_s += st.gemm_s_per_token * capacity.max_batched_tokens
    return min(mean_s, most_s)
