"""Rows that ask the same deterministic question: computed once, answered each."""

from __future__ import annotations

import numpy as np

from plait.data.job import Job
from plait.table import I64


def equal_rows(job: Job) -> list[I64]:
    """Groups of two or more good, deterministic rows with the same url and body, each in input order."""
    rows = np.flatnonzero(job.deterministic & ~job.bad)
    if not len(rows):
        return []
    keys = np.ascontiguousarray(job.digest[rows]).view(np.uint64)  # [k, 2]
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    differs = np.any(keys[order][1:] != keys[order][:-1], axis=1)
    starts = np.concatenate(([0], np.flatnonzero(differs) + 1, [len(rows)]))
    return [rows[order[starts[g] : starts[g + 1]]] for g in np.flatnonzero(np.diff(starts) > 1)]
