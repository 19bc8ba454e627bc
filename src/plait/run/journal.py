"""The journal of a run: one JSON line a recorded row, appended as rows end. It is also the live file users can read.

Format 1. Each line is an output line of the Batch API with one more key, ``plait``, last in the object:

    {"id":...,"custom_id":...,"response":...,"error":null,"plait":{"row":7,"ok":true,...,"crc":"9f0a1b2c"}}

``crc`` is the CRC-32 of all bytes before ``,"crc"``. The first line is a header with the same seal. A row may be
recorded again after a failure; its last record holds.

Guarantee: what ``flush`` or ``tick`` has handed to the kernel is not lost when the process is killed; it is on the disk
(fsync) at most ``SYNC_S`` seconds or ``SYNC_RECORDS`` records later, which is what a power cut can take.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plait.errors import JournalError, UsageError
from plait.run.files import disk_errors, replace_file, write_all

FORMAT = 1
SYNC_S = 0.2
SYNC_RECORDS = 1000

_KEY = b',"plait":'
_SEAL_BYTES = len(b',"crc":"00000000"}}')


class Record(msgspec.Struct, omit_defaults=True):
    """What the journal knows of a recorded row beside its line."""

    row: int
    ok: bool
    """Answered with status 200."""
    retry: bool = False
    """The failure was the server's or the transport's: the next run tries again."""
    t: float = 0.0
    """Completion time on the engine's clock, s."""
    prompt: int = 0
    cached: int = 0
    output: int = 0
    """Tokens; 0 where this row's answer was computed for another row."""
    finish: tuple[str, ...] = ()
    copy_of: int | None = None
    """Row of an identical request whose answer this is."""


class Header(msgspec.Struct):
    """First line of a journal."""

    journal: int
    job: str
    """Fingerprint of the input."""
    rows: int
    settings: dict[str, Any]
    """What changes answers: a resumed run must have the same."""
    notes: dict[str, Any]
    """What does not: policy, concurrency, timeouts, for the reader's information."""


class _Line(msgspec.Struct):
    plait: Header


_decode_record = msgspec.json.Decoder(Record).decode
_decode_header = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode

NONE, ANSWERED, FAULTED, FAILED = 0, 1, 2, 3
"""State of a row: not recorded; answered; failed by the server's fault; failed by its own."""


@dataclass(slots=True)
class State:
    """What the records of a journal add up to."""

    status: npt.NDArray[np.uint8]  # [n] NONE, ANSWERED, FAULTED or FAILED
    offset: npt.NDArray[np.int64]  # [n] of the row's last record in the journal, bytes
    length: npt.NDArray[np.int64]  # [n] of its line without the ``plait`` key, bytes
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @staticmethod
    def empty(n: int) -> State:
        """Nothing recorded of n rows."""
        return State(np.zeros(n, np.uint8), np.zeros(n, np.int64), np.zeros(n, np.int64))

    def add(self, record: Record, offset: int, length: int) -> None:
        """Take one record in; a later record of a row replaces an earlier one."""
        self.status[record.row] = ANSWERED if record.ok else FAULTED if record.retry else FAILED
        self.offset[record.row] = offset
        self.length[record.row] = length
        for reason in record.finish:
            self.finish_reasons[reason] += 1
        self.prompt_tokens += record.prompt
        self.cached_tokens += record.cached
        self.output_tokens += record.output


class Journal:
    """An open journal: its state, and ``append``. One process at a time (see ``plait.run.lock``)."""

    def __init__(self, path: Path, n: int) -> None:
        """Open an existing journal of n rows, repair a torn end and replay it.

        Raises JournalError for damage that is not a torn end (naming the byte), for a file that is no journal, and
        for one of a newer format.
        """
        self.path = path
        self.state = State.empty(n)
        self._pending: list[bytes] = []
        """Records that the kernel has not got yet."""
        self.empty = True
        """Whether nothing but the header was found when it was opened."""
        self._unsynced = 0
        self._unsynced_since_s = 0.0
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            self.header, self._end = self._replay()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(path: Path, header: Header, records: Iterable[tuple[bytes, Record]] = ()) -> None:
        """Put a new journal in place of whatever is there, whole or not at all."""
        first = seal(b'{"plait":' + _encode(header))
        with disk_errors(path):
            replace_file(path, _chain(first, (sealed(line, record) for line, record in records)))

    def append(self, line: bytes, record: Record) -> None:
        """Record a row: ``line`` is its output line without newline. The kernel gets it with the next ``flush``."""
        data = sealed(line, record)
        self._pending.append(data)
        self.state.add(record, self._end, len(line))
        self._end += len(data)
        if not self._unsynced:
            self._unsynced_since_s = time.monotonic()
        self._unsynced += 1
        if self._unsynced >= SYNC_RECORDS:
            self.sync()

    def flush(self) -> None:
        """Hand the records to the kernel. Raises JournalError if it does not take them all; the journal then ends with
        the last whole one."""
        records, self._pending = self._pending, []
        if not records:
            return
        try:
            with disk_errors(self.path):
                write_all(self._descriptor, b"".join(records))
        except JournalError:
            self._cut(records)
            raise

    def _cut(self, records: list[bytes]) -> None:
        """Some of the records, and perhaps a part of one, have been written: end with the last whole one."""
        self._end -= sum(map(len, records))
        size = os.fstat(self._descriptor).st_size
        for data in records:
            if self._end + len(data) > size:
                break
            self._end += len(data)
        os.ftruncate(self._descriptor, self._end)

    def tick(self) -> None:
        """Call after each batch of appends, and often: flushes, and syncs what has waited long enough."""
        self.flush()
        if self._unsynced and time.monotonic() - self._unsynced_since_s >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Put everything on the disk."""
        self.flush()
        if self._unsynced:
            with disk_errors(self.path):
                os.fsync(self._descriptor)
            self._unsynced = 0

    def line(self, row: int) -> bytes:
        """The last recorded output line of a row, without newline."""
        self.flush()
        raw = os.pread(self._descriptor, int(self.state.length[row]) - 1, int(self.state.offset[row]))
        return raw + b"}"

    def check_same_job(self, fingerprint: str, settings: Mapping[str, Any]) -> None:
        """Raise UsageError saying what differs if this journal belongs to another job or to other settings."""
        remedy = f"choose another -o, or --restart to throw away what {self.path.name} holds"
        if self.header.job != fingerprint:
            was, now = self.header.rows, len(self.state.status)
            counts = f"it had {was} requests, now {now}" if was != now else f"still {now} requests, but not the same"
            raise UsageError(f"{self.path}: the input has changed since that run ({counts}); {remedy}")
        wanted = msgspec.json.decode(_encode(dict(settings)))
        changed = [
            f"{name} was {self.header.settings.get(name)!r}, now {wanted.get(name)!r}"
            for name in sorted(wanted.keys() | self.header.settings.keys())
            if wanted.get(name) != self.header.settings.get(name)
        ]
        if changed:
            raise UsageError(f"{self.path}: these settings change answers: {'; '.join(changed)}; {remedy}")

    def close(self) -> None:
        """Sync and close. Idempotent."""
        if self._descriptor >= 0:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _replay(self) -> tuple[Header, int]:
        """Read all records; cut what is torn at the end. Returns the header and the end of the last good record."""
        header: Header | None = None
        good_end = 0
        torn_at: int | None = None
        for offset, raw in _lines(self.path):
            parsed = unseal(raw)
            if parsed is None:
                torn_at = offset if torn_at is None else torn_at
                continue
            if torn_at is not None:
                raise self._damaged(torn_at)
            if header is None:
                header = self._header(raw)
            else:
                self.empty = False
                line_bytes, record = parsed
                if not 0 <= record.row < len(self.state.status):
                    continue  # another job's: check_same_job refuses it with a better message
                self.state.add(record, offset, line_bytes)
            good_end = offset + len(raw)
            if not raw.endswith(b"\n"):  # complete, only its newline is missing
                with disk_errors(self.path):
                    write_all(self._descriptor, b"\n")
                good_end += 1
        if header is None:
            raise self._foreign()
        if torn_at is not None:
            with disk_errors(self.path):
                os.ftruncate(self._descriptor, good_end)
                os.fsync(self._descriptor)
        return header, good_end

    def _header(self, raw: bytes) -> Header:
        try:
            header = _decode_header(raw).plait
        except msgspec.DecodeError:
            raise self._foreign() from None
        if header.journal > FORMAT:
            raise JournalError(
                f"{self.path}: written by a newer Plait (format {header.journal}, this one reads up to {FORMAT})"
            )
        return header

    def _foreign(self) -> JournalError:
        return JournalError(f"{self.path}: this is not a journal of Plait; move it away or choose another -o")

    def _damaged(self, offset: int) -> JournalError:
        return JournalError(
            f"{self.path}: the record at byte {offset} is damaged (its checksum does not fit) and good records follow; "
            "restore the file from a copy, or delete that line to have its request run again"
        )


def seal(opened: bytes) -> bytes:
    """Close a line whose last key is the ``plait`` object: add the checksum, both braces and the newline."""
    prefix = opened[:-1]  # without the brace of the plait object
    return prefix + b',"crc":"%08x"}}\n' % zlib.crc32(prefix)


def sealed(line: bytes, record: Record) -> bytes:
    """A record as it stands in the journal."""
    return seal(line[:-1] + _KEY + _encode(record))


def unseal(raw: bytes) -> tuple[int, Record] | None:
    """Length of the output line, and the record, of a journal line; None if its checksum does not fit. For the header
    the record is a placeholder."""
    end = len(raw) - raw.endswith(b"\n")
    prefix = raw[: end - _SEAL_BYTES]
    if raw[len(prefix) : end] != b',"crc":"%08x"}}' % zlib.crc32(prefix):
        return None
    at = prefix.rfind(_KEY)
    if at < 0:
        return 0, Record(-1, False)
    try:
        return at + 1, _decode_record(prefix[at + len(_KEY) :] + b"}")
    except msgspec.DecodeError:
        return None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, its newline included."""
    offset = 0
    with path.open("rb", buffering=1 << 20) as stream:
        for raw in stream:
            yield offset, raw
            offset += len(raw)


def _chain(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
