"""Small things that tests of runs build again and again: batch files, jobs, a first-come-first-served scheduler."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plait.data.job import BatchRequest, Job, open_job
from plait.events import Decision, EngineRequest, Event, Failed, Finished, Preempted
from plait.run.executor import Planned
from plait.table import I64


def batch_line(custom_id: str, content: str, **body: Any) -> str:
    """One chat request as a line of a batch file; greedy unless told otherwise."""
    message = {"role": "user", "content": content}
    full = {"model": "m", "messages": [message], "max_tokens": 16, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": full})


def write_batch(folder: Path, lines: Sequence[str], name: str = "requests.jsonl") -> Path:
    """A batch file."""
    path = folder / name
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def job_of(folder: Path, lines: Sequence[str]) -> Job:
    """A job of these lines, kept in ``folder``."""
    return open_job([write_batch(folder, lines)], folder)


class Fifo:
    """First come, first served, ``limit`` at once: the least a scheduler can be."""

    def __init__(self, n: int, limit: int = 8) -> None:
        self._queue = deque(range(n))
        self._limit = limit
        self._running: set[int] = set()

    @property
    def waiting(self) -> int:
        """Rows not at the engine."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Rows at the engine."""
        return len(self._running)

    def update(self, event: Event) -> None:
        """A row that ended leaves; one that was preempted queues again."""
        if isinstance(event, Finished | Failed):
            self._running.discard(event.row)
        elif isinstance(event, Preempted) and event.requeue:
            self._running.discard(event.row)
            self._queue.append(event.row)

    def decide(self, now_s: float) -> Decision:
        """Fill up to the limit."""
        take = min(self._limit - len(self._running), len(self._queue))
        rows = [self._queue.popleft() for _ in range(take)]
        self._running.update(rows)
        return Decision(np.array(rows, np.int64))


def fifo_plan(rows: I64, limit: int = 8) -> Planned:
    """A run of rows in input order, without tokens."""
    return Planned(rows, Fifo(len(rows), limit), engine_request)


def engine_request(i: int, request: BatchRequest) -> EngineRequest:
    """What an engine gets for a row that was not tokenised."""
    return EngineRequest(i, request.url, request.body, None, int(request.body.get("max_tokens", 16)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSONL file; every line must parse."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
