"""What goes into a run and what comes out of it: plain data, and the observer's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from plait.data.job import BatchRequest
from plait.data.problems import Fault
from plait.drive import Decides
from plait.events import EngineRequest, Event, Failed, Finished
from plait.table import I64


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is run and where its files go."""

    output: Path
    inputs: Sequence[str | Path] = ()
    """Input files, to refuse an output that would overwrite one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What changes answers (engine, model, sampling overrides): plain JSON values without secrets. A run is resumed
    only with equal settings."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What does not (policy, concurrency): recorded when a journal is made, never compared."""
    retries: int = 3
    """Tries after the first one for a row that failed by the server's fault. 0 where the engine retries itself."""
    backoff_s: float = 0.5
    """First pause before a retry; doubled each time up to ``max_backoff_s``, with jitter."""
    max_backoff_s: float = 30.0
    max_failures: int = 20
    """Rows in a row that fail for good by the server's fault before the run stops, to be resumed; 0: never."""
    retry_failed: Literal["server", "all", "none"] = "server"
    """Which failed rows of an earlier run are run again: those that failed by the server's fault, all, none."""
    order: Literal["input", "completion"] = "input"
    dedupe: bool = True
    """Compute equal deterministic requests once."""
    restart: bool = False
    """Throw away what an earlier run recorded, and replace any existing output."""
    grace_s: float = 30.0
    """How long a stopping run waits for what is at the engine."""
    heartbeat_s: float = 1.0
    secrets: tuple[str, ...] = ()
    """Replaced by asterisks in every line that is written."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A scheduler over rows of a run, and how their requests are made."""

    rows: I64
    """Row i of the scheduler is row ``rows[i]`` of the job."""
    scheduler: Decides
    request: Callable[[int, BatchRequest], EngineRequest]
    """(i, request as read from the input) -> what the engine gets; its ``row`` is i."""
    faults: Mapping[int, Fault] = field(default_factory=dict)
    """Job rows of the run that cannot be run after all (context, KV), and why."""
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Job row -> keys that its output line carries beside the request's own metadata."""


class Observer(Protocol):
    """Watches a run. Rows are the scheduler's."""

    def event(self, event: Event) -> None:
        """Every event of the engine, in order, but for failures that are tried again."""

    def retrying(self, event: Finished | Failed, after_s: float) -> None:
        """A row failed by the server's fault and goes back to the queue."""

    def heartbeat(self, now_s: float) -> None:
        """Called about every ``heartbeat_s``, also when nothing happens; the engine's clock."""


class Unwatched:
    """An observer that does nothing."""

    def event(self, event: Event) -> None:
        """Ignore it."""

    def retrying(self, event: Finished | Failed, after_s: float) -> None:
        """Ignore it."""

    def heartbeat(self, now_s: float) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and what the job's files hold now."""

    total: int
    answered: int
    failed: int
    remaining: int
    """Rows that have not run."""
    interrupted: bool = False
    reason: str = ""
    """Why the run gave up; empty if it did not."""

    @property
    def exit_code(self) -> int:
        """0 all answered, 1 some failed, 3 gave up, 130 interrupted; both of the last can be resumed."""
        if self.interrupted and self.remaining:
            return 130
        if self.reason:
            return 3
        return 1 if self.failed else 0
