"""What a run says of its input before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from plait.data.job import Job
from plait.run.journal import ANSWERED, State

MOST_WARNINGS = 5
"""Warnings spelled out; ``plait check`` lists all."""
MOST_LOOKED_AT = 10_000
"""Problems that are gone through for warnings: a file of bad lines only must not hold up the rest."""


def notices(job: Job) -> Iterator[str]:
    """How many lines cannot run, and the first warnings about those that can."""
    if job.bad.any():
        yield f"{int(job.bad.sum()):,} of {job.n:,} requests cannot run; plait check lists why"
    looked_at = islice(job.iter_problems(), MOST_LOOKED_AT)
    warnings = list(islice((str(each) for each in looked_at if each.severity == "warning"), MOST_WARNINGS + 1))
    yield from warnings[:MOST_WARNINGS]
    if len(warnings) > MOST_WARNINGS:
        yield "and more warnings; plait check lists all"


def why_nothing_runs(job: Job, state: State) -> str:
    """Said where no request is left, which need not be for an earlier run's sake."""
    if job.bad.all():
        return "nothing to run: no line of the input is a request that can run"
    again = "; --retry-failed all runs the failed ones again" if np.any(state.status > ANSWERED) else ""
    return f"nothing left to run: every request has been recorded by an earlier run{again}"
