"""Deadlines against a forecast: which requests cannot make it, said before anything starts."""

from __future__ import annotations

import numpy as np

from plait.errors import InputError
from plait.table import F64, I64, RequestTable


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
