"""Length traces -> what planning and simulation need: CSV, Parquet (either may be gzipped) and Mooncake's block hashes.

Columns of a table: ``prompt_tokens,output_tokens[,arrival_s][,group,shared_tokens]``; others are ignored. Requests of
one group start with the same text, each with its ``shared_tokens`` first prompt tokens of it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import CapacityError, InputError
from plait.table import F64, I64, RequestTable
from plait.tree.build import tree_from_blocks, tree_from_groups
from plait.tree.prefix import PrefixTree

MOONCAKE_BLOCK_TOKENS = 512
_MOST_TOKENS = 10**9

Where = Callable[[int], str]
"""Row -> "file:line" for messages."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A job known by its lengths. ``output_tokens`` are the true ones: for simulation and reports, not for policies."""

    name: str
    table: RequestTable
    tree: PrefixTree
    output_tokens: I64  # [n]


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the kind follows from the name (.csv, .parquet, .jsonl = Mooncake; .gz behind any of them).

    Raises InputError naming file and line (Parquet: row) of the first bad value and how many rows are bad.
    """
    path = Path(path)
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if kind not in ("csv", "parquet", "jsonl"):
        raise InputError(f"{path}: not a trace: .csv, .parquet or .jsonl (Mooncake) is needed, each may end in .gz")
    data = _bytes(path)
    if kind == "jsonl":
        return _mooncake(data, path)
    columns, where = _csv_columns(data, path) if kind == "csv" else _parquet_columns(data, path)
    return _from_columns(columns, where, path)


def is_mooncake(path: str | Path) -> bool:
    """Whether a JSONL file is a Mooncake trace (and not a batch of requests): its first line has ``hash_ids``."""
    path = Path(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        return b'"hash_ids"' in file.readline(1 << 20)


def require_fit(trace: Trace, kv_tokens: int) -> None:
    """Raise CapacityError if a request of the trace can never run because it outgrows ``kv_tokens`` on its own."""
    total = trace.table.prompt_tokens + trace.output_tokens
    bad = np.flatnonzero(total > kv_tokens)
    if len(bad):
        row = bad[0]
        raise CapacityError(
            f"{trace.name}: request {row} (0-based) needs {total[row]:,} KV tokens ({trace.table.prompt_tokens[row]:,} "
            f"prompt + {trace.output_tokens[row]:,} output), the cache holds {kv_tokens:,}. {len(bad):,} of "
            f"{len(total):,} requests are too long; use a larger device, a higher TP degree or drop them"
        )


def _bytes(path: Path) -> bytes:
    """The file, decompressed."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except gzip.BadGzipFile:
        raise InputError(f"{path}: ends in .gz but is not gzip") from None
    except EOFError:
        raise InputError(f"{path}: the gzip data ends too early; the file is cut off") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _csv_columns(data: bytes, path: Path) -> tuple[dict[str, Sequence[Any]], Where]:
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    header: list[str] | None = None
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for values in reader:
            if not values:
                continue
            if header is None:
                header = [name.strip() for name in values]
            elif len(values) != len(header):
                raise InputError(f"{path}:{reader.line_num}: {len(values)} values, the header has {len(header)}")
            else:
                rows.append(values)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    if header is None:
        raise InputError(f"{path}: empty; a header line with prompt_tokens,output_tokens is needed")
    values_of: list[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(header)
    return dict(zip(header, values_of, strict=True)), lambda row: f"{path}:{lines[row]}"


def _parquet_columns(data: bytes, path: Path) -> tuple[dict[str, Sequence[Any]], Where]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a Parquet file: {error}") from None
    wanted = ("prompt_tokens", "output_tokens", "arrival_s", "group", "shared_tokens")
    columns = {name: table.column(name).to_pylist() for name in wanted if name in table.column_names}
    return columns, lambda row: f"{path}: row {row + 1}"


def _from_columns(columns: dict[str, Sequence[Any]], where: Where, path: Path) -> Trace:
    for name in ("prompt_tokens", "output_tokens"):
        if name not in columns:
            raise InputError(f"{path}: no column {name}; got {', '.join(columns) or 'none'}")
    if ("group" in columns) != ("shared_tokens" in columns):
        raise InputError(f"{path}: the columns group and shared_tokens come together or not at all")
    prompt = _whole(columns, "prompt_tokens", 1, where)
    output = _whole(columns, "output_tokens", 1, where)
    if len(prompt) == 0:
        raise InputError(f"{path}: no requests below the header")
    arrival = None
    if "arrival_s" in columns:
        arrival = _numbers(columns["arrival_s"], "arrival_s", where)
        _require(arrival >= 0, columns["arrival_s"], "arrival_s", "a number of seconds >= 0 is needed", where)
    table = RequestTable.of(prompt, arrival_s=arrival)
    tree = PrefixTree.without_sharing(len(prompt))
    if "group" in columns:
        shared = _whole(columns, "shared_tokens", 0, where)
        limit = "at most the row's prompt_tokens can be shared"
        _require(shared <= prompt, columns["shared_tokens"], "shared_tokens", limit, where)
        tree = tree_from_groups(prompt, _groups(columns["group"]), shared)
    return Trace(path.name, table, tree, output)


def _groups(names: Sequence[Any]) -> I64:
    """Group names -> numbers in order of appearance; -1 where there is none."""
    numbers: dict[str, int] = {}
    found = [-1 if name is None or name == "" else numbers.setdefault(str(name), len(numbers)) for name in names]
    return np.array(found, np.int64)


def _whole(columns: dict[str, Sequence[Any]], name: str, least: int, where: Where) -> I64:
    """Column as int64 [n], each in least .. 10^9."""
    values = _numbers(columns[name], name, where)
    good = (values >= least) & (values <= _MOST_TOKENS) & (values == np.floor(values))
    _require(good, columns[name], name, f"a whole number from {least} to {_MOST_TOKENS:,} is needed", where)
    return values.astype(np.int64)


def _numbers(values: Sequence[Any], name: str, where: Where) -> F64:
    """Column as finite float64 [n]."""
    try:
        numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    except (TypeError, ValueError):
        numbers = np.array([_number(value) for value in values])
    _require(np.isfinite(numbers), values, name, "a finite number is needed", where)
    return numbers


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _require(good: Any, values: Sequence[Any], name: str, needed: str, where: Where) -> None:
    bad = np.flatnonzero(~np.asarray(good))
    if len(bad):
        count = f" {len(bad):,} of {len(values):,} rows are bad." if len(bad) > 1 else ""
        raise InputError(f"{where(int(bad[0]))}: {name} is {values[bad[0]]!r}; {needed}.{count}")


def _mooncake(data: bytes, path: Path) -> Trace:
    """Mooncake JSONL: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` of 512-token blocks."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines: list[int] = []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict) or any(key not in row for key in keys):
            raise InputError(f"{path}:{number}: not a Mooncake row; an object with {', '.join(keys)} is needed")
        rows.append(row)
        lines.append(number)
    if not rows:
        raise InputError(f"{path}: empty; Mooncake rows are needed")

    def where(row: int) -> str:
        return f"{path}:{lines[row]}"

    columns: dict[str, Sequence[Any]] = {key: [row[key] for row in rows] for key in keys}
    prompt = _whole(columns, "input_length", 1, where)
    output = _whole(columns, "output_length", 1, where)
    time_ms = _numbers(columns["timestamp"], "timestamp", where)
    _require(time_ms >= 0, columns["timestamp"], "timestamp", "a number of milliseconds >= 0 is needed", where)
    ids, offsets = _blocks(columns["hash_ids"], prompt, where)
    table = RequestTable.of(prompt, arrival_s=(time_ms - time_ms.min()) / 1000)
    return Trace(path.name, table, tree_from_blocks(ids, offsets, MOONCAKE_BLOCK_TOKENS, prompt), output)


def _blocks(lists: Sequence[Any], prompt: I64, where: Where) -> tuple[I64, I64]:
    """Block ids of all rows, flat int64, and offsets int64 [n + 1]; one id for each (begun) block of the prompt."""
    for row, ids in enumerate(lists):
        needed = -(-int(prompt[row]) // MOONCAKE_BLOCK_TOKENS)
        whole = isinstance(ids, list) and all(type(value) is int and abs(value) < 2**63 for value in ids)
        if not whole or len(ids) != needed:
            raise InputError(
                f"{where(row)}: hash_ids must be a list of {needed} whole numbers, one for each "
                f"{MOONCAKE_BLOCK_TOKENS} tokens of input_length {prompt[row]}"
            )
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    return np.array([value for ids in lists for value in ids], np.int64), offsets
