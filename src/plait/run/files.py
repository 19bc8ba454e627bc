"""The files of one run, and the few durable operations done to them.

Beside ``results.jsonl`` stand ``results.errors.jsonl`` (failed rows), ``results.live.jsonl`` (the journal, answers in
completion order) and, while a run is going, ``results.lock``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait.errors import JournalError, UsageError

BUFFER_BYTES = 1 << 20
NOT_JSONL = frozenset((".gz", ".zst", ".csv", ".parquet"))
"""Endings that promise another form than what is written."""
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file is too large"}


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of one run, all in the folder of ``output``."""

    output: Path
    errors: Path
    live: Path
    lock: Path

    @staticmethod
    def of(output: str | Path) -> RunFiles:
        """Paths that belong to an output path. Raises UsageError if it is a folder, lies in none, or has the ending of
        another format."""
        path = Path(output)
        if not path.name or path.is_dir():
            raise UsageError(f"{output}: the output must be a file, this is a folder")
        if str(output) == "-" or path.suffix in NOT_JSONL:
            raise UsageError(f"{output}: the output is a file of plain JSONL; name it like results.jsonl")
        if not path.parent.is_dir():
            raise UsageError(f"{output}: the folder {path.parent} does not exist; make it first")
        path = path.resolve()  # a link stays a link: what it points to is replaced
        stem = path.name.removesuffix(".jsonl")
        return RunFiles(
            path,
            path.with_name(f"{stem}.errors.jsonl"),
            path.with_name(f"{stem}.live.jsonl"),
            path.with_name(f"{stem}.lock"),
        )

    def refuse_inputs(self, inputs: Sequence[str | Path]) -> None:
        """Raise UsageError if any of these files is one of the inputs, also through links."""
        for given in inputs:
            if str(given) == "-":
                continue
            for own in (self.output, self.errors, self.live, self.lock):
                same = own.resolve() == Path(given).resolve()
                if same or (own.exists() and Path(given).exists() and own.samefile(given)):
                    raise UsageError(f"-o {self.output}: writing {own} would overwrite the input {given}; name another")


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file anew so that at any moment the old or the new one is there, whole. Raises OSError."""
    draft = path.with_name(path.name + ".tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for block in _blocks(lines):
            write_all(descriptor, block)
        os.fsync(descriptor)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    draft.replace(path)
    sync_folder(path.parent)


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in writes of a megabyte."""
    block = bytearray()
    for line in lines:
        block += line
        if len(block) >= BUFFER_BYTES:
            yield bytes(block)
            block.clear()
    yield bytes(block)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the run's own files into a JournalError that says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        reason = FULL.get(error.errno or 0, (error.strerror or str(error)).lower())
        raise JournalError(
            f"cannot write {path}: {reason}. Every answer recorded so far is kept; make room and run the same command "
            "again to go on"
        ) from error
