"""Input files of any kind -> plain JSONL files whose lines can be read by offset.

A plain JSONL file is used where it lies. Standard input, pipes, compressed files and tables are copied into the work
folder first, so that no text has to stay in memory.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec
import zstandard

from plait.data import tabular
from plait.data.problems import Fault, FileError
from plait.data.shapes import foreign_format
from plait.data.validate import UNREADABLE
from plait.errors import JournalError

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is not read into memory; it becomes a problem of that line."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

HEAD_BYTES = 64 * 1024
"""How much of a file is looked at to tell its format."""

_CHUNK_BYTES = 2**20
_PACKED_CHUNK_BYTES = 2**13  # zstd may grow a chunk 30 000 fold
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Source:
    """One input, ready to be read line by line."""

    name: str
    """As the user knows it."""
    path: Path
    """Plain JSONL: the input itself or its copy in the work folder."""
    line_numbers: array[int] | None
    """1-based place in the input of each line of a table's copy; None where line i of ``path`` is line i."""
    has_byte_order_mark: bool


def prepare(given: str | Path, workdir: Path, number: int) -> Source:
    """The source for one path (``-`` is standard input); copies go to ``workdir`` under ``input-<number>``.

    Raises FileError for a file that cannot be used as a whole, JournalError where the copy cannot be written.
    """
    name = "stdin" if str(given) == "-" else os.fsencode(given).decode("utf-8", "replace")
    path = Path(given)
    if str(given) == "-" or not path.is_file():
        path = workdir / f"input-{number}.raw"
        with _open(given, name) as stream:
            _copy(_plain(stream), path, name)
    unpack = _unpacker(_head(path, name))
    if unpack is not None:
        packed, path = path, workdir / f"input-{number}.unpacked"
        with packed.open("rb") as stream:
            _copy(unpack(stream), path, name)
    head = _head(path, name)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        fix = "Convert it, for example with: iconv -f UTF-16 -t UTF-8."
        raise FileError(name, Fault("unsupported_format", "the file is UTF-16; UTF-8 is needed", fix=fix))
    read_table = tabular.reader_for(head, name)
    line_numbers = None
    if read_table is None:
        _refuse_other_text(head, name)
    else:
        spool = workdir / f"input-{number}.jsonl"
        line_numbers = _copy_table(read_table(path, name), spool)
        path = spool
    return Source(name, path, line_numbers, head.startswith(BYTE_ORDER_MARK))


def read_lines(source: Source, stream: BinaryIO) -> Iterator[tuple[int, int, bytes, int]]:
    """(line number, offset, line, length in bytes) of each line that is not blank; lines end at \\n only.

    The line comes without white space around it; offset and length leave out a byte-order mark. A line beyond
    MAX_LINE_BYTES comes empty.
    """
    offset, number = 0, 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        start, length = offset, len(raw)
        number += 1
        if length > MAX_LINE_BYTES:
            while not raw.endswith(b"\n") and (raw := stream.readline(MAX_LINE_BYTES)):
                length += len(raw)
            raw = b""
        offset += length
        if raw.startswith(BYTE_ORDER_MARK):  # files that were joined have one in the middle as well
            start, length, raw = start + 3, length - 3, raw[3:]
        raw = raw.strip()
        if not raw and length <= MAX_LINE_BYTES:
            continue
        yield (number if source.line_numbers is None else source.line_numbers[number - 1]), start, raw, length


def _head(path: Path, name: str) -> bytes:
    """First bytes of a plain file."""
    try:
        with path.open("rb") as plain:
            return plain.read(HEAD_BYTES)
    except OSError as error:
        raise FileError(name, _unreadable(error)) from None


@contextmanager
def _open(given: str | Path, name: str) -> Iterator[BinaryIO]:
    """Standard input (left open afterwards), a pipe or a device; anything that is none of these is a FileError."""
    if str(given) == "-":
        if sys.stdin is None:
            raise FileError(name, Fault("unreadable_file", "standard input is closed"))
        yield sys.stdin.buffer
        return
    path = Path(given)
    try:
        if path.is_dir():
            fault = Fault("unreadable_file", "this is a folder; a file is needed", fix="Name the files in it.")
            raise FileError(name, fault)
        stream = path.open("rb")
    except FileNotFoundError:
        raise FileError(name, Fault("file_not_found", "there is no such file")) from None
    except (OSError, ValueError) as error:
        raise FileError(name, _unreadable(error)) from None
    with stream:
        yield stream


def _unreadable(error: OSError | ValueError) -> Fault:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Fault("unreadable_file", f"the file cannot be read: {reason.lower()}")


Unpack: TypeAlias = Callable[[BinaryIO], Iterator[bytes]]


def _unpacker(head: bytes) -> Unpack | None:
    """How to unpack a file with these first bytes, None for a plain one. The file's name plays no part."""
    if head.startswith(_GZIP):
        return _gunzip
    return _unzstd if head.startswith(_ZSTD) else None


def _gunzip(stream: BinaryIO) -> Iterator[bytes]:
    """Plain bytes of a gzip stream of one or more members. Raises EOFError, OSError or zlib.error if it is broken."""
    with gzip.GzipFile(fileobj=stream) as unpacked:
        while chunk := unpacked.read(_CHUNK_BYTES):
            yield chunk


def _unzstd(stream: BinaryIO) -> Iterator[bytes]:
    """Plain bytes of a zstd stream of one or more frames. Raises ZstdError if it is broken, EOFError if it is cut."""
    frame, complete = zstandard.ZstdDecompressor().decompressobj(), False
    while chunk := stream.read(_PACKED_CHUNK_BYTES):
        while chunk:
            yield frame.decompress(chunk)
            complete, chunk = frame.eof, frame.unused_data
            if complete:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not complete:
        raise EOFError("the last frame is not complete")


def _plain(stream: BinaryIO) -> Iterator[bytes]:
    """The stream as it is."""
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def _copy(chunks: Iterator[bytes], target: Path, name: str) -> None:
    """Write the chunks to ``target``. Raises FileError for a broken stream, JournalError for a full disk."""
    with _writing(target) as out:
        while True:
            try:
                chunk = next(chunks, None)
            except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
                message = f"the file is damaged or cut short: {str(error) or type(error).__name__}"
                raise FileError(name, Fault("corrupt_file", message, fix="Fetch or compress it again.")) from None
            if chunk is None:
                return
            out.write(chunk)


def _copy_table(rows: Iterator[tuple[int, bytes]], target: Path) -> array[int]:
    """Write a table's rows as JSONL; returns the line number of each in the table."""
    numbers = array("I")
    with _writing(target) as out:
        for number, line in rows:
            numbers.append(number)
            out.write(line + b"\n")
    return numbers


@contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    """``target`` open for writing; a failed write is a JournalError. Errors of the input are FileError already."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            yield out
    except OSError as error:
        fix = "make room, or set TMPDIR to a folder that has room"
        raise JournalError(f"{target}: the copy of the input cannot be written: {error.strerror}; {fix}") from None


def _refuse_other_text(head: bytes, name: str) -> None:
    """Raise FileError for what is no JSONL as a whole: empty, one JSON document over many lines, another
    vendor's batch format."""
    if not head:
        raise FileError(name, Fault("empty_file", "the file is empty"))
    lines = [line.strip() for line in head.removeprefix(BYTE_ORDER_MARK).lstrip().split(b"\n", 2)]
    if len(lines) > 1 and lines[0] in (b"[", b"{") and _object_in(lines[1]) is None:
        fix = "Write one object a line, for example with: jq -c '.[]' (or jq -c . for separate objects)."
        raise FileError(
            name, Fault("unsupported_format", "this is a JSON document over many lines, not JSONL", fix=fix)
        )
    decoded = _object_in(lines[0])
    foreign = None if decoded is None else foreign_format(decoded)
    if foreign is not None:
        raise FileError(name, foreign)


def _object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, if it is one."""
    try:
        decoded = msgspec.json.decode(line)
    except UNREADABLE:
        return None
    return decoded if isinstance(decoded, dict) else None
