"""Problems that show only when rows are compared with each other or with an engine: models, endpoints, sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from plait.data.job import Job
from plait.data.problems import Fault, Problem, model_not_found, shown

OPENAI_MAX_REQUESTS = 50_000
OPENAI_MAX_BYTES = 200 * 10**6


def model_problems(job: Job, served: Collection[str]) -> Iterator[Problem]:
    """One problem for each row whose model the engine does not serve. Rows that name no model take the engine's."""
    for row, fault in model_faults(job, served):
        yield job.problem(row, fault)


def model_faults(job: Job, served: Collection[str]) -> Iterator[tuple[int, Fault]]:
    """``model_problems`` as (row, fault)."""
    unknown = np.array([name not in served for name in job.model_names] + [False])  # the last is index -1: no model
    for row in np.flatnonzero(unknown[job.model_of]).tolist():
        yield row, model_not_found(job.model_names[job.model_of[row]], sorted(served))


def openai_limit_problems(job: Job) -> Iterator[Problem]:
    """What the hosted Batch API refuses beside bad lines: more than 50 000 requests or 200 MB a file, and more than one
    endpoint or model in a file."""
    for file in job.files:
        rows = range(file.first_row, file.end_row)
        if file.size_bytes > OPENAI_MAX_BYTES:
            message = f"the file has {file.size_bytes} bytes; at most {OPENAI_MAX_BYTES} are allowed"
            yield job.problem(rows[0], Fault("file_too_large", message, fix="Split the file."))
        if len(rows) > OPENAI_MAX_REQUESTS:
            message = f"the file has {len(rows)} requests; at most {OPENAI_MAX_REQUESTS} are allowed"
            yield job.problem(rows[OPENAI_MAX_REQUESTS], Fault("too_many_tasks", message, fix="Split the file."))
        yield from _mixed(job, rows, "url")
        yield from _mixed(job, rows, "model")


def _mixed(job: Job, rows: range, param: str) -> Iterator[Problem]:
    """One problem for each good row whose url or model is not that of the file's first good row."""
    names, index = (job.urls, job.url_of) if param == "url" else (job.model_names, job.model_of)
    good = np.flatnonzero(~job.bad[rows.start : rows.stop]) + rows.start
    for row in good[index[good] != index[good[:1]]].tolist():
        got, first = (shown(names[index[r]]) if index[r] >= 0 else "missing" for r in (row, good[0]))
        message = f"{param} is {got}; the file's first request has {first}, and one {param} a file is allowed"
        yield job.problem(row, Fault(f"{param}_mismatch", message, param, "Split the file."))
