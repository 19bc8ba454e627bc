"""Input files -> ``Job``: where each request lies, what identifies it, and what is wrong with it.

A job keeps columns, never text: 43 bytes a row, about 130 at the peak of reading. A request is read again when it is
needed, and checked against its digest, so that a file that changes under a run is noticed.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.data.inputs import MAX_LINE_BYTES, Source, prepare, read_lines
from plait.data.problems import Fault, FileError, Problem, located, shown_id
from plait.data.shapes import Line
from plait.data.validate import UNREADABLE, Examined, digest_of, examine, parse, read
from plait.errors import InputError
from plait.table import I64

__all__ = ["BatchRequest", "Job", "Problem", "open_job", "read_job"]

LISTED_PROBLEMS = 10
"""Problems spelled out in the message of a refused job."""

_BAD, _FLAGGED, _DETERMINISTIC = 1, 2, 4


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request as it stands in the input."""

    row: int
    custom_id: str
    url: str
    body: dict[str, Any]
    metadata: dict[str, Any]
    """Keys of the row that are no part of the request, carried through to the output."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One usable input file."""

    name: str
    path: Path
    """Plain JSONL: the file itself or its copy in the work folder."""
    first_row: int
    end_row: int
    size_bytes: int
    """Of the plain JSONL."""


_RECORD = struct.Struct("<qIIqiiB16s")
_FIELDS = np.dtype(
    [
        ("offset", "<i8"),  # bytes into the source's plain file
        ("length", "<u4"),  # bytes
        ("line", "<u4"),  # 1-based, as the user counts
        ("id_hash", "<i8"),  # 0 where there is no custom_id
        ("url", "<i4"),
        ("model", "<i4"),  # -1 where none is named
        ("flags", "u1"),
        ("digest", "u1", 16),
    ]
)
"""What is noted of a line while the files are read: one packed record each."""


class Job:
    """All requests of the input files, good or bad, in input order. Made by ``open_job``; close it, or use it in a
    ``with`` statement. Reading rows is thread-safe."""

    n: int
    """Rows: every input line that is not blank."""
    bad: npt.NDArray[np.bool_]  # [n] rows that cannot run
    deterministic: npt.NDArray[np.bool_]  # [n] the same body gives the same answer: greedy or seeded
    digest: npt.NDArray[np.uint8]  # [n, 16] equal for equal requests (url and body; custom_id and metadata left out)
    url_of: npt.NDArray[np.int32]  # [n] index into urls
    model_of: npt.NDArray[np.int32]  # [n] index into model_names, -1 where the line names none
    urls: list[str]
    model_names: list[str]
    fingerprint: str
    """Changes when any input line changes."""

    def __init__(self, passthrough: bool = False) -> None:
        self._passthrough = passthrough
        self._sources: list[Source] = []
        self._descriptors: list[int] = []
        self._first_rows: list[int] = []
        self._file_problems: list[Problem] = []
        self._records = bytearray()
        self._urls: dict[str, int] = {}
        self._models: dict[str | None, int] = {None: -1}
        self._duplicate_of: dict[int, int] = {}
        self.close = weakref.finalize(self, _close_all, self._descriptors)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def models(self) -> dict[str, int]:
        """Model names as the lines give them, with the number of rows of each."""
        counts = np.bincount(self.model_of[self.model_of >= 0], minlength=len(self.model_names))
        return dict(zip(self.model_names, counts.tolist(), strict=True))

    @property
    def problems(self) -> list[Problem]:
        """All problems, those of whole files first, then in input order. Made anew from the files at each call."""
        return list(self.iter_problems())

    def iter_problems(self) -> Iterator[Problem]:
        """The same one by one: memory does not grow with the number of bad lines."""
        yield from self._file_problems
        for row in np.flatnonzero(self._flags & _FLAGGED).tolist():
            yield from self.problems_of(row)

    @property
    def files(self) -> list[InputFile]:
        """The input files that have rows, in the order given."""
        ends = [*self._first_rows[1:], self.n]
        parts = zip(self._sources, self._descriptors, self._first_rows, ends, strict=True)
        return [InputFile(s.name, s.path, i, j, os.fstat(fd).st_size) for s, fd, i, j in parts if i < j]

    def fatal_problems(self) -> Iterator[Problem]:
        """Those that spoil the whole job: files that cannot be used, custom_ids used twice."""
        yield from (problem for problem in self._file_problems if problem.severity == "error")
        for row in self._duplicate_of:
            yield from (problem for problem in self.problems_of(row) if problem.code == "duplicate_custom_id")

    def problems_of(self, row: int) -> list[Problem]:
        """Everything wrong with one row; empty for a good row without warnings."""
        if not self._flags[row] & _FLAGGED:
            return []
        line = self._parsed(row)
        faults = list(line.faults)
        if row in self._duplicate_of:
            first = self._duplicate_of[row]
            message = f"custom_id {shown_id(line.custom_id or '')} was used before at {self.location(first)}"
            fix = "Give each line a custom_id of its own, or allow it with --allow-duplicates."
            faults.append(Fault("duplicate_custom_id", message, "custom_id", fix))
        file, number = self._place(row)
        return [located(fault, row, file, number, line.custom_id) for fault in faults]

    def problem(self, row: int, fault: Fault) -> Problem:
        """A fault that was found elsewhere (context length, model names), at the place of its row."""
        file, number = self._place(row)
        return located(fault, row, file, number, self.custom_id(row))

    def location(self, row: int) -> str:
        """``file:line`` of a row."""
        file, number = self._place(row)
        return f"{file}:{number}"

    def custom_id(self, row: int) -> str | None:
        """The row's custom_id, also of most bad rows; None where it could not be read."""
        return self._parsed(row).custom_id if self.bad[row] else self._read(row).custom_id

    def line(self, row: int) -> bytes:
        """The row's line as it stands in the input (or in its JSONL copy), without the newline."""
        return self._raw(row).rstrip(b"\r\n")

    def request(self, row: int) -> BatchRequest:
        """The request of a good row, read again from its file. Raises InputError for a bad row and for a line that is
        not the one that was checked."""
        if self.bad[row]:
            raise InputError(f"{self.location(row)}: this line has problems and cannot run")
        line = self._read(row)
        if digest_of(line.url, line.body)[0] != self.digest[row].tobytes() or line.custom_id is None:
            raise self._changed(row)
        return BatchRequest(row, line.custom_id, line.url, line.body, line.metadata)

    def _place(self, row: int) -> tuple[str, int]:
        return self._sources[self._source_of(row)].name, int(self._line[row])

    def _source_of(self, row: int) -> int:
        return bisect_right(self._first_rows, row) - 1

    def _raw(self, row: int) -> bytes:
        descriptor = self._descriptors[self._source_of(row)]
        return os.pread(descriptor, int(self._length[row]), int(self._offset[row]))

    def _read(self, row: int) -> Line:
        try:
            return read(self._raw(row), row)
        except UNREADABLE:
            raise self._changed(row) from None

    def _parsed(self, row: int) -> Line:
        if int(self._length[row]) > MAX_LINE_BYTES:
            return Line(faults=[_too_long(int(self._length[row]))])
        return parse(self._raw(row), row, self._passthrough)

    def _changed(self, row: int) -> InputError:
        return InputError(f"{self.location(row)}: the file has changed since it was checked; run the command again")

    def _add_file(self, given: str | Path, workdir: Path, fingerprint: hashlib._Hash) -> None:
        """Index one file. A file that cannot be used becomes a problem."""
        try:
            source = prepare(given, workdir, len(self._sources) + len(self._file_problems))
        except FileError as refused:
            self._file_problems.append(refused.problem)
            return
        before = len(self._records) // _RECORD.size
        self._sources.append(source)
        self._first_rows.append(before)
        self._descriptors.append(os.open(source.path, os.O_RDONLY | os.O_CLOEXEC))
        self._index_lines(source, fingerprint)
        if source.has_byte_order_mark:
            fault = Fault(
                "byte_order_mark",
                "the file starts with a byte-order mark (EF BB BF), which is skipped",
                fix="Other tools may refuse it; save the file as UTF-8 without BOM.",
                severity="warning",
            )
            self._file_problems.append(located(fault, -1, source.name, 1, None))
        if len(self._records) // _RECORD.size == before:
            fault = Fault("empty_file", "the file has no lines but blank ones")
            self._file_problems.append(located(fault, -1, source.name, 0, None))

    def _index_lines(self, source: Source, fingerprint: hashlib._Hash) -> None:
        """Append one record for each line of a source."""
        records, pack, urls, models = self._records, _RECORD.pack, self._urls, self._models
        row = len(records) // _RECORD.size
        with source.path.open("rb", buffering=2**20) as stream:
            for number, offset, raw, length in read_lines(source, stream):
                fingerprint.update(raw)
                if length > MAX_LINE_BYTES:
                    fingerprint.update(str(length).encode())
                    entry = Examined(None, "", None, bytes(16), False, True, True)
                else:
                    entry = examine(raw, row, self._passthrough)
                custom_id, url, model, digest, deterministic, bad, flagged = entry
                id_hash = 0 if custom_id is None else hash(custom_id)
                url_index, model_index = urls.setdefault(url, len(urls)), models.setdefault(model, len(models) - 1)
                flags = bad * _BAD + flagged * _FLAGGED + deterministic * _DETERMINISTIC
                held = min(length, 2**32 - 1)
                records += pack(offset, held, number, id_hash, url_index, model_index, flags, digest)
                row += 1

    def _finish(self, fingerprint: str, allow_duplicates: bool) -> None:
        """Turn the records into columns and look for duplicates."""
        records = np.frombuffer(self._records, _FIELDS)
        self._records = bytearray()
        self.n = len(records)
        self.urls = list(self._urls)
        self.model_names = [model for model in self._models if model is not None]
        self.fingerprint = fingerprint
        self._offset, self._length, self._line = (records[name].copy() for name in ("offset", "length", "line"))
        self.url_of, self.model_of, self.digest = (records[name].copy() for name in ("url", "model", "digest"))
        self._flags = records["flags"].copy()
        self.bad = (self._flags & _BAD) != 0
        self.deterministic = (self._flags & _DETERMINISTIC) != 0
        id_hash = records["id_hash"].copy()
        del records
        if not allow_duplicates:
            self._find_duplicates(id_hash)

    def _find_duplicates(self, id_hash: I64) -> None:
        """Mark each row whose custom_id an earlier row has. Equal hashes only nominate; the ids themselves decide."""
        order = np.argsort(id_hash, kind="stable")
        ordered = id_hash[order]
        same = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0))
        candidates = np.unique(np.concatenate([order[same], order[same + 1]]))
        seen: dict[str, int] = {}
        for row in candidates.tolist():
            custom_id = self.custom_id(row)
            if custom_id is not None and seen.setdefault(custom_id, row) != row:
                self._duplicate_of[row] = seen[custom_id]
        rows = list(self._duplicate_of)
        self._flags[rows] |= _BAD | _FLAGGED
        self.bad[rows] = True


def _too_long(length: int) -> Fault:
    message = f"the line has {length} bytes; at most {MAX_LINE_BYTES} are read"
    return Fault("line_too_long", message, fix="Is a newline missing?")


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def read_job(
    paths: Sequence[str | Path], workdir: str | Path, allow_duplicates: bool = False, passthrough: bool = False
) -> Job:
    """Index the files and judge every line; never raises for what is in them, see ``Job.problems``.

    ``workdir`` takes copies of what cannot be read by offset (standard input, compressed files, tables). With
    ``passthrough`` (engines that are HTTP servers) other POST urls below /v1/, media parts and unknown parameters are
    allowed and sent unchanged. Raises JournalError if a copy cannot be written.
    """
    job = Job(passthrough)
    hasher = hashlib.sha256()
    for given in paths:
        job._add_file(given, Path(workdir), hasher)
    job._finish(hasher.hexdigest()[:32], allow_duplicates)
    return job


def open_job(
    paths: Sequence[str | Path], workdir: str | Path, allow_duplicates: bool = False, passthrough: bool = False
) -> Job:
    """The job, ready to run. Bad lines are left to the caller (``Job.bad``); what would spoil the whole job is not.

    Raises InputError for a file that is missing, empty, damaged or in another vendor's format, and for a custom_id that
    is used twice unless ``allow_duplicates``.
    """
    job = read_job(paths, workdir, allow_duplicates, passthrough)
    listed = [str(problem) for problem in islice(job.fatal_problems(), LISTED_PROBLEMS + 1)]
    if listed:
        job.close()
        if len(listed) > LISTED_PROBLEMS:
            listed[-1] = "and more; plait check lists all"
        raise InputError("\n".join(listed))
    return job
