"""A job's rows -> planning data: token columns, prefix tree, output caps; what cannot fit is found here, before any
engine is loaded."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from plait.data.job import BatchRequest, Job
from plait.data.problems import Fault, context_length_exceeded, kv_capacity_exceeded
from plait.data.urgency import deadline_s, priority
from plait.data.urgency import settings as urgency_of
from plait.events import Capacity
from plait.table import I32, I64, RequestTable
from plait.tree.build import build_tree
from plait.tree.prefix import PrefixTree

CHUNK_ROWS = 1024
"""Requests tokenised at once: their text is in memory, that of the others is not."""

LEAST_SHARED_TOKENS = 16
"""Prompts that share fewer tokens (the same first word, a template's first line) are no group: computing those again
takes less than waiting for them to be in a cache."""

ENDS = (
    *("stop", "stop_token_ids", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)
"""Parameters that may end an answer even where the end-of-sequence token is ignored."""

Overflow = Literal["error", "clamp", "skip"]


class Tokenizer(Protocol):
    """Prompts as the engine will see them."""

    def encode_many(self, requests: list[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """Token ids of each (url, body), or what is wrong with it."""


@dataclass(slots=True)
class Prepared:
    """Rows of a job that can run, in input order: row i of the table is row ``rows[i]`` of the job."""

    rows: I64
    table: RequestTable
    tree: PrefixTree
    faults: dict[int, Fault] = field(default_factory=dict)
    """Job rows that cannot run, and why."""
    clamped: dict[int, int] = field(default_factory=dict)
    """Job rows whose output cap was lowered, and the cap they had asked for."""

    def notes(self) -> dict[int, dict[str, Any]]:
        """What the output line of a job row must say beside the answer."""
        return {row: {"max_tokens_clamped_from": asked} for row, asked in self.clamped.items()}


def prepare(
    job: Job,
    rows: I64,
    tokenizer: Tokenizer,
    capacity: Capacity,
    on_overflow: Overflow = "error",
    default_max_tokens: int | None = None,
    refused: Mapping[int, Fault] | None = None,
    progress: Callable[[int], None] | None = None,
    started_unix_s: float = 0.0,
) -> Prepared:
    """Tokenise ``rows`` (job rows, int64 [k]), resolve their output caps and build the prefix tree.

    A request without ``max_tokens`` gets ``default_max_tokens`` or, without that, all the room its prompt leaves.
    ``refused``: rows that are known not to run, and why; they are not tokenised. ``progress`` is called with the number
    of rows done so far. Deadlines that are points in time count from ``started_unix_s``. Memory: 4 bytes a prompt token
    (half as many again while the column grows), 48 a row.
    """
    columns = _Columns(started_unix_s)
    if refused:
        columns.faults.update(refused)
        rows = rows[~np.isin(rows, list(refused))]
    for at, requests in _chunks(job, rows):
        encoded = tokenizer.encode_many([(request.url, request.body) for request in requests])
        for request, ids in zip(requests, encoded, strict=True):
            columns.add(request, ids, capacity, on_overflow, default_max_tokens)
        if progress is not None:
            progress(at + len(requests))
    return columns.finish(capacity)


def _chunks(job: Job, rows: I64) -> Iterator[tuple[int, list[BatchRequest]]]:
    for at in range(0, len(rows), CHUNK_ROWS):
        yield at, [job.request(int(row)) for row in rows[at : at + CHUNK_ROWS]]


def asked_tokens(body: dict[str, Any]) -> int | None:
    """The request's own cap on generated tokens, a sequence; None where it sets none."""
    asked = body.get("max_completion_tokens")
    asked = body.get("max_tokens") if asked is None else asked
    return asked if isinstance(asked, int) else None


def least_tokens(body: dict[str, Any], cap: int) -> int:
    """Tokens that a sequence of ``cap`` at most will have at least: the whole cap where nothing else can end it."""
    if body.get("ignore_eos") is True and not any(body.get(name) for name in ENDS):
        return cap
    asked = body.get("min_tokens")
    return min(asked, cap) if isinstance(asked, int) and asked > 0 else 0


def with_cap(body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The body with this cap in place of its own."""
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return {**body, name: max_tokens}


class _Columns:
    """Growing columns of the rows that can run."""

    def __init__(self, started_unix_s: float) -> None:
        self.started_unix_s = started_unix_s
        self.tokens = array("i")
        self.rows = array("q")
        self.prompt_tokens = array("q")
        self.caps = array("q")
        self.least = array("q")
        self.priority = array("q")
        self.deadline_s = array("d")
        self.faults: dict[int, Fault] = {}
        self.clamped: dict[int, int] = {}

    def add(
        self, request: BatchRequest, ids: I32 | Fault, capacity: Capacity, on_overflow: Overflow, default: int | None
    ) -> None:
        """Take one request in, or note why it cannot run."""
        if isinstance(ids, Fault):
            self.faults[request.row] = ids
            return
        sequences = int(request.body.get("n") or 1)
        room = _room(len(ids), sequences, capacity)
        asked = asked_tokens(request.body)
        cap = asked if asked is not None else min(default or room, room)
        if cap > room or room < 1:
            if on_overflow != "clamp" or room < 1:
                self.faults[request.row] = _overflow(len(ids), max(1, cap), sequences, capacity, on_overflow)
                return
            self.clamped[request.row] = cap
            cap = room
        self.rows.append(request.row)
        self.tokens.frombytes(ids.astype(np.int32, copy=False).tobytes())
        self.prompt_tokens.append(len(ids))
        self.caps.append(cap * sequences)
        self.least.append(least_tokens(request.body, cap) * sequences)
        urgency = urgency_of(request.metadata, request.body)
        self.priority.append(priority(urgency.get("priority")) or 0)
        due_s = deadline_s(urgency.get("deadline"), self.started_unix_s)
        self.deadline_s.append(np.inf if due_s is None else due_s)

    def finish(self, capacity: Capacity) -> Prepared:
        """The table and its tree."""
        lengths = _column(self.prompt_tokens, np.int64)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        tokens = _column(self.tokens, np.int32)
        table = RequestTable.of(
            lengths,
            _column(self.caps, np.int64),
            None,
            _column(self.priority, np.int64),
            _column(self.deadline_s, np.float64),
            tokens,
            offsets,
            _column(self.least, np.int64),
        )
        tree = build_tree(tokens, offsets, LEAST_SHARED_TOKENS, capacity.block_tokens)
        return Prepared(_column(self.rows, np.int64), table, tree, self.faults, self.clamped)


def _column(values: array[Any], kind: type[np.generic]) -> Any:
    """The array's own memory as a NumPy array: a token column of gigabytes is never copied."""
    return np.frombuffer(values, kind) if values else np.zeros(0, kind)


def _room(prompt_tokens: int, sequences: int, capacity: Capacity) -> int:
    """Tokens a sequence may generate before the context or the KV cache is full."""
    rooms = [(capacity.kv_tokens // capacity.block_tokens * capacity.block_tokens - prompt_tokens) // sequences]
    if capacity.max_context_tokens:
        rooms.append(capacity.max_context_tokens - prompt_tokens)
    return min(rooms)


def _overflow(prompt: int, cap: int, sequences: int, capacity: Capacity, on_overflow: Overflow) -> Fault:
    """Why the request cannot fit; a skipped one says so."""
    context = capacity.max_context_tokens
    if context and prompt + cap > context:
        fault = context_length_exceeded(prompt, cap, context)
    else:
        fault = kv_capacity_exceeded(prompt, cap * sequences, capacity.kv_tokens)
    if on_overflow != "skip":
        return fault
    return Fault("skipped", f"skipped as asked: {fault.message}", fault.param, fault.fix, severity="warning")
