"""The final files of a run: answers and failures, each in input order, made from the journal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plait.data.job import Job
from plait.errors import JournalError
from plait.run.files import RunFiles, disk_errors, replace_file
from plait.run.journal import ANSWERED, NONE, Journal
from plait.run.lines import LineWriter
from plait.table import I64


def write_results(job: Job, journal: Journal, lines: LineWriter, files: RunFiles, order: str = "input") -> None:
    """Write both files whole, or leave what was there. Rows that have not run yet are in neither; the error file is
    there only if a row failed. ``order``: "input" or "completion". Memory does not grow with the text.

    Raises JournalError if a file cannot be written or if a row would be lost or doubled.
    """
    status = journal.state.status
    answered = np.flatnonzero(status == ANSWERED)
    failed = np.flatnonzero((status > ANSWERED) | job.bad)
    if order == "completion":
        answered = answered[np.argsort(journal.state.offset[answered], kind="stable")]
    remaining = int(np.count_nonzero((status == NONE) & ~job.bad))
    if len(answered) + len(failed) + remaining != job.n or np.any(status[job.bad] != NONE):
        raise JournalError(
            f"{journal.path}: {len(answered)} answered + {len(failed)} failed + {remaining} not run are not the "
            f"{job.n} requests of the input; the final files were not written. Please report this"
        )
    with disk_errors(files.output):
        replace_file(files.output, _recorded(journal, answered))
    with disk_errors(files.errors):
        if len(failed):
            replace_file(files.errors, _failures(job, journal, lines, failed))
        else:
            files.errors.unlink(missing_ok=True)


def _recorded(journal: Journal, rows: I64) -> Iterator[bytes]:
    for row in rows:
        yield journal.line(int(row)) + b"\n"


def _failures(job: Job, journal: Journal, lines: LineWriter, rows: I64) -> Iterator[bytes]:
    for row in rows.tolist():
        if not job.bad[row]:
            yield journal.line(row) + b"\n"
            continue
        problem = next(each for each in job.problems_of(row) if each.severity == "error")
        yield lines.refusal(row, problem) + b"\n"
