"""Going on from result files without a journal: the files of another tool, or of a run whose journal was removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plait.data.job import Job
from plait.errors import InputError, UsageError
from plait.run.files import RunFiles
from plait.run.journal import Record
from plait.run.lines import is_passing
from plait.run.results import Result, read_result

RETRIED_CODES = frozenset({"batch_expired", "batch_cancelled", "batch_failed"})


def adopted_records(job: Job, files: RunFiles) -> Iterator[tuple[bytes, Record]]:
    """Output lines and records of existing ``output`` and ``errors`` files, matched to the job by ``custom_id``.

    A torn last line (no newline, not a result) is left out. Without a journal nobody can tell whether these answers
    belong to the same prompts, so anything doubtful is refused: raises UsageError for a line that is no result or
    whose custom_id the job does not have or has twice.
    """
    existing = [path for path in (files.output, files.errors) if path.exists() and path.stat().st_size]
    if not existing:
        return
    row_of: dict[str, int] = {}
    for row in range(job.n):
        custom_id = None if job.bad[row] else job.custom_id(row)
        if custom_id is not None:
            row_of[custom_id] = -1 if custom_id in row_of else row
    for path in existing:
        yield from _adopted_file(path, row_of)


def _adopted_file(path: Path, row_of: dict[str, int]) -> Iterator[tuple[bytes, Record]]:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            line = raw.strip()
            if not line:
                continue
            place = f"{path}:{number}"
            try:
                result = read_result(line, place)
            except InputError as error:
                if not raw.endswith(b"\n"):
                    return  # torn
                raise _refused(path, str(error)) from None
            row = row_of.get(result.custom_id or "", -1)
            if row < 0:
                raise _refused(path, f"{place}: custom_id {result.custom_id!r} is not one line of this input")
            yield line, _record(row, result)


def _record(row: int, result: Result) -> Record:
    if result.ok:
        return Record(row, True, finish=result.finish_reasons)
    if result.status_code is None:
        return Record(row, False, retry=result.code in RETRIED_CODES)
    return Record(row, False, retry=is_passing(result.status_code))


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} exists and is not a result of this job, so it is not overwritten: {why}; choose another -o, or "
        "--restart to replace it"
    )
