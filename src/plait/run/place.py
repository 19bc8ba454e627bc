"""Where a job can be run, seen from the job: an engine to be, with what is known of it before it is loaded."""

from __future__ import annotations

from typing import Any, Protocol

from plait.events import Engine
from plait.model.calibrate import Calibrator
from plait.plan import Machine
from plait.run.history import History
from plait.run.prepare import Tokenizer


class Place(Protocol):
    """Where a job can be run: ``plait.run.embedded.Embedded`` or a pool of servers."""

    name: str
    calibrated: bool
    """Whether the machine's step times were measured here."""
    passthrough: bool
    """Whether lines that only a server can judge (other endpoints, unknown parameters) may pass."""
    retries: bool
    """Whether the run retries failed requests; False where the engine does that itself."""
    served: frozenset[str]
    """Model names that a request may ask for; empty: any name stands for the one model there is."""
    secrets: tuple[str, ...]

    @property
    def machine(self) -> Machine:
        """What the engine can hold and how long its steps take; loads the engine where only that can tell."""

    @property
    def history(self) -> History | None:
        """Output lengths of earlier runs, where they are kept."""

    @property
    def answer_settings(self) -> dict[str, Any]:
        """What changes answers, for the journal."""

    def tokenizer(self) -> Tokenizer:
        """Prompts as the engine will see them, or the best stand-in."""

    def engine(self) -> Engine:
        """The engine, ready. Raises EngineError."""

    def learn(self, seen: Calibrator) -> None:
        """Keep measured step times for the next forecast."""

    def close(self) -> None:
        """Let go of what was opened. Idempotent."""
