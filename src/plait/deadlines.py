"""Deadlines against a forecast: which requests cannot make it, said before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plait.errors import InputError
from plait.model.steptime import StepTime, steps_s
from plait.table import F64, I64, RequestTable

LISTED = 5
"""Requests named in a message."""


@dataclass(frozen=True, slots=True)
class DeadlineReport:
    """What a forecast means for the deadlines of a job."""

    hopeless: I64
    """Rows that would be late even alone on the machine."""
    late: I64
    """Other rows that the forecast finishes too late, worst first."""
    over_s: F64
    """[n] Seconds by which each row is forecast beyond its own deadline (<= 0: in time; -inf: none)."""
    job_deadline_s: float
    """Deadline of the whole job; inf where there is none."""
    makespan_s: float
    in_time: int
    """Requests that are forecast to be answered by the job's deadline."""

    def lines(self, name: Callable[[int], str | None]) -> list[str]:
        """What to say before the job starts; ``name(row)`` is the request's custom_id. Empty: nothing is late."""
        said = []
        if len(self.hopeless):
            shown = ", ".join(repr(name(int(row))) for row in self.hopeless[:LISTED])
            said.append(f"{len(self.hopeless):,} requests cannot meet their deadline even alone: {shown}")
        if len(self.late):
            shown = ", ".join(f"{name(int(row))!r} by {self.over_s[row]:.1f} s" for row in self.late[:LISTED])
            said.append(f"{len(self.late):,} more requests are expected to miss their deadline: {shown}")
        if self.makespan_s > self.job_deadline_s:
            said.append(
                f"the job is expected to take {self.makespan_s:.1f} s, its deadline is {self.job_deadline_s:.1f} s: "
                f"{self.in_time:,} of {len(self.over_s):,} requests would be answered by then"
            )
        return said


def report(
    table: RequestTable, finish_s: F64, output_tokens: I64, step_time: StepTime, job_deadline_s: float = np.inf
) -> DeadlineReport:
    """Judge forecast completions, float64 [n] seconds after the start, for outputs of that many tokens, int64 [n].

    Raises InputError if the forecast is not one time a row."""
    late = missed(table, finish_s)
    lost = hopeless(table, alone_s(table, output_tokens, step_time))
    return DeadlineReport(
        hopeless=lost,
        late=late[~np.isin(late, lost)],
        over_s=finish_s - table.deadline_s,
        job_deadline_s=job_deadline_s,
        makespan_s=float(finish_s.max(initial=0.0)),
        in_time=int((finish_s <= job_deadline_s).sum()),
    )


def missed(table: RequestTable, finish_s: F64) -> I64:
    """Rows whose forecast completion, seconds after the start, lies beyond their deadline, worst first, int64 [k].

    Raises InputError if the forecast is not one time a row."""
    if finish_s.shape != (table.n,):
        raise InputError(f"{len(finish_s)} forecast times for {table.n} requests")
    over_s = finish_s - table.deadline_s
    rows = np.flatnonzero(over_s > 0)
    return rows[np.argsort(-over_s[rows], kind="stable")]


def hopeless(table: RequestTable, alone_s: F64) -> I64:
    """Rows that would miss their deadline even alone on the machine, where each takes ``alone_s``; int64 [k]."""
    return np.flatnonzero(alone_s > table.deadline_s)


def alone_s(table: RequestTable, output_tokens: I64, step_time: StepTime) -> F64:
    """Seconds that each request takes alone on the machine, nothing cached: one prefill, then a step a token."""
    prompt, steps = table.prompt_tokens.astype(np.float64), output_tokens - 1.0
    nothing, one = np.zeros(table.n), np.ones(table.n)
    prefill_s = steps_s(step_time, prompt, prompt * (prompt + 1) / 2, nothing, nothing)
    seconds: F64 = prefill_s + steps * steps_s(step_time, nothing, nothing, one, prompt + steps / 2)
    return seconds
