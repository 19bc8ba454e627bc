"""Tables (Parquet, CSV, TSV) -> plain JSONL rows, one at a time.

A column ``prompt`` or ``messages`` is needed; ``custom_id`` or ``id`` names the row; columns named like sampling
parameters go into the request; all others are carried along as metadata.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from plait.data.body import HINTS
from plait.data.problems import Fault, FileError, shown_id
from plait.data.schema import CHAT, COMPLETIONS, ROW_PARAMETERS
from plait.data.shapes import FAULT_KEY
from plait.data.validate import UNREADABLE

Rows: TypeAlias = Iterator[tuple[int, bytes]]
"""(1-based line or row number, one JSON object) each."""

MAX_CELL_CHARACTERS = 64 * 2**20
_BATCH_ROWS = 1024


def reader_for(head: bytes, name: str) -> Callable[[Path, str], Rows] | None:
    """The reader for a table that starts with ``head``; None for anything else, which is taken for JSONL."""
    if head.startswith(b"PAR1"):
        return parquet_rows
    plain_name = name.lower().removesuffix(".gz").removesuffix(".zst")
    if plain_name.endswith((".csv", ".tsv")):
        return csv_rows
    return None


def parquet_rows(path: Path, name: str) -> Rows:
    """Rows of a Parquet file. Raises FileError where it cannot be read or has no usable column."""
    import pyarrow  # heavy; only files of this kind pay for it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_columns(table.schema_arrow.names, name)
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _encoded(_filled(row))
    except (pyarrow.ArrowException, OSError) as error:
        message = f"the Parquet file cannot be read: {next(iter(str(error).splitlines()), type(error).__name__)}"
        raise FileError(name, Fault("corrupt_file", message)) from None


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """The cells that hold something; a row without prompt and messages keeps one of them, to be refused by name."""
    filled = {key: value for key, value in row.items() if value is not None and value != ""}
    if "prompt" not in filled and "messages" not in filled:
        filled["prompt" if "prompt" in row else "messages"] = None
    return filled


def _encoded(row: dict[str, Any]) -> bytes:
    """A row as JSON; values JSON has no form for become text, a row that cannot be written says so."""
    try:
        return msgspec.json.encode(row, enc_hook=str)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        return msgspec.json.encode({FAULT_KEY: f"the row cannot be written as JSON: {error}"})


def csv_rows(path: Path, name: str) -> Rows:
    """Rows of a CSV or TSV file (delimiter , ; or tab as the header has it), numbered by the line they start on.

    Empty cells count as absent. Bytes that are not UTF-8 stay as they are, so that the row is refused later. Raises
    FileError where the header has no usable column or quoting breaks off.
    """
    limit = csv.field_size_limit(MAX_CELL_CHARACTERS)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            first = text.readline(MAX_CELL_CHARACTERS)
            text.seek(0)
            delimiter = max(",\t;", key=first.count)
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            header = next(reader, [])
            _check_columns(header, name)
            start = reader.line_num + 1
            for cells in reader:
                if any(cells):
                    yield start, _csv_line(header, cells)
                start = reader.line_num + 1
    except csv.Error as error:
        message = f"line {reader.line_num} of the CSV file cannot be read: {error}"
        raise FileError(name, Fault("corrupt_file", message, fix="Check the quotes before that line.")) from None
    finally:
        csv.field_size_limit(limit)


def _csv_line(header: Sequence[str], cells: Sequence[str]) -> bytes:
    """One record as JSON; a wrong number of cells is said instead, since columns would be mixed up."""
    if len(cells) != len(header):
        message = f"the row has {len(cells)} cells, the header has {len(header)}"
        return msgspec.json.encode({FAULT_KEY: message})
    row = _filled({key: _cell(key, text) for key, text in zip(header, cells, strict=True)})
    try:
        return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except RecursionError:
        return msgspec.json.encode({FAULT_KEY: "a cell is nested too deeply"})


def _cell(column: str, text: str) -> Any:
    """A cell as its parameter's type where the column is a parameter (or messages) and the text reads as one."""
    if column != "messages" and column not in ROW_PARAMETERS:
        return text
    hint = HINTS[CHAT].get(column, HINTS[COMPLETIONS].get(column))
    try:
        value = msgspec.json.decode(text)
        if column != "messages":
            msgspec.convert(value, hint)
    except (*UNREADABLE, UnicodeEncodeError):
        return text
    return value


def _check_columns(columns: Sequence[str], name: str) -> None:
    """Raise FileError for a table without a prompt."""
    if not columns:
        raise FileError(name, Fault("empty_file", "the table has no columns"))
    if "prompt" not in columns and "messages" not in columns:
        found = ", ".join(map(shown_id, columns[:12]))
        message = f"the table has no column named prompt or messages; its columns are: {found}"
        raise FileError(name, Fault("missing_required_parameter", message, "prompt", "Rename the column."))
    if len(set(columns)) != len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise FileError(name, Fault("invalid_value", f"the table has two columns named {shown_id(twice)}"))
