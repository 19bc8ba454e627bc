"""Kills runs on the fake engine at every operation they do on their files, goes on with each, and compares the files.

    python -m tests.crash.killed FOLDER           # prints one JSON object; exit 1 if anything differs

Every trial is two forked children of this small process: one with a kill armed, one that resumes. An operation is a
write, sync, cut, rename or removal; a kill comes before it, after it, or in the middle of a write.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from plait.data.job import open_job
from plait.events import EngineRequest, Event, Failed, Finished, Preempted
from plait.run import journal
from plait.run.executor import Options, execute
from plait.testing import FakeEngine
from tests.builders import batch_line, fifo_plan, write_batch

ROWS = 48
SYNC_RECORDS = 5
FILES = ("out.jsonl", "out.errors.jsonl")
MOMENTS = ("before", "middle", "after")
OPERATIONS = ((os, "write"), (os, "pwrite"), (os, "fsync"), (os, "ftruncate"), (Path, "replace"), (Path, "unlink"))

_write = os.write  # never counted


class Killer:
    """Counts file operations; at the given one it kills this process."""

    def __init__(self, at: int = -1, moment: str = "before") -> None:
        self.at, self.moment = at, moment
        self.is_write: list[bool] = []  # of each operation so far

    def arm(self) -> None:
        """Put the counter around every operation."""
        for owner, name in OPERATIONS:
            setattr(owner, name, self._counted(getattr(owner, name), name == "write"))

    def _counted(self, operation: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        @wraps(operation)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.is_write.append(is_write)
            if len(self.is_write) != self.at:
                return operation(*arguments, **named)
            if self.moment == "middle" and is_write:
                descriptor, data = arguments
                operation(descriptor, bytes(data)[: len(data) // 2])
            elif self.moment == "after":
                operation(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("still alive")

        return counted


def lines() -> list[str]:
    """Answers, refusals, passing and lasting server faults, preemptions, identical requests, a bad line."""
    return [
        *(batch_line(f"q-{i}", f"question {i}") for i in range(ROWS)),
        *(batch_line(f"same-{i}", "the same question") for i in range(6)),
        "{not json",
        batch_line("bad", "x", max_tokens="many"),
    ]


def fate(request: EngineRequest, attempt: int) -> Event | None:
    """What happens to a request depends on its text alone, but for faults that pass."""
    number = str(request.body["messages"][-1]["content"]).removeprefix("question ")
    fates: dict[str, Event] = {
        "3": Finished(0, 0, 400, b'{"error":{"message":"no"}}'),
        "7": Failed(0, 0, "disconnected", "gone", retryable=True),
    }
    if attempt == 0:
        fates |= {"11": Finished(0, 0, 503, b'{"error":{"message":"busy"}}'), "13": Preempted(0, 0, requeue=True)}
    return fates.get(number)


def run(folder: Path) -> list[str]:
    """One run to its end; the texts that were sent to the engine."""
    sent: list[str] = []

    def noted(request: EngineRequest, attempt: int) -> Event | None:
        sent.append(str(request.body["messages"][-1]["content"]))
        return fate(request, attempt)

    with open_job([folder / "requests.jsonl"], folder) as job:
        execute(job, fifo_plan, FakeEngine(fate=noted), Options(folder / "out.jsonl", retries=1))
    return sent


def fresh(folder: Path) -> Path:
    """An empty place with the batch file, always of the same name: messages contain it."""
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    write_batch(place, lines())
    return place


def in_child(work: Callable[[], object]) -> tuple[int, Any]:
    """Do something in a forked child: its wait status, and what it returned (None if it was killed)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            result = work()
            code = 0
            _write(writing, json.dumps(result).encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        content = stream.read()
    return os.waitpid(child, 0)[1], json.loads(content) if content else None


def counted_run(folder: Path) -> list[bool]:
    """An undisturbed run; for each of its operations, whether it is a write."""
    killer = Killer()
    killer.arm()
    run(folder)
    return killer.is_write


def killed_run(folder: Path, at: int, moment: str) -> None:
    """A run that dies at an operation, if it gets that far."""
    Killer(at, moment).arm()
    run(folder)


def answered(folder: Path) -> set[str]:
    """custom_ids whose answers the live file holds whole."""
    path = folder / "out.live.jsonl"
    whole = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    recorded = [json.loads(raw) for raw in whole]
    return {line["custom_id"] for line in recorded if line["plait"]["ok"]}


def trial(folder: Path, reference: dict[str, bytes], kills: list[tuple[int, str]]) -> str:
    """Kill, maybe kill the resumed run too, then go on to the end; what was wrong, or nothing."""
    for at, moment in kills:
        status, _ = in_child(partial(killed_run, folder, at, moment))
        if status not in (0, signal.SIGKILL):
            return f"the run to be killed ended with wait status {status}"
    kept = answered(folder)
    status, sent = in_child(partial(run, folder))
    if status:
        return f"the resumed run ended with wait status {status}"
    found = {name: (folder / name).read_bytes() for name in FILES}
    if found != reference:
        return f"{[name for name in FILES if found[name] != reference[name]]} differ"
    again = {f"q-{text.removeprefix('question ')}" for text in sent} & kept
    return f"answered before, sent again: {sorted(again)}" if again else ""


def main(folder: Path) -> int:
    """All kill points once, then pairs of kills at random points."""
    journal.SYNC_RECORDS = SYNC_RECORDS
    place = fresh(folder)
    _, is_write = in_child(partial(counted_run, place))
    operations = len(is_write)
    reference = {name: (place / name).read_bytes() for name in FILES}
    trials = [
        [(at, moment)]
        for at in range(1, operations + 1)
        for moment in MOMENTS
        if is_write[at - 1] or moment != "middle"
    ]
    chance = random.Random(1)
    trials += [
        [(chance.randint(1, operations), chance.choice(MOMENTS)), (chance.randint(1, 30), chance.choice(MOMENTS))]
        for _ in range(40)
    ]
    wrong = []
    for kills in trials:
        if fault := trial(fresh(folder), reference, kills):
            wrong.append(f"{kills}: {fault}")
    print(json.dumps({"operations": operations, "kills": len(trials), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
