"""A pool of OpenAI-compatible servers as a place to run a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from plait.data.bytesplan import prompt_bytes, pseudo_tokens
from plait.data.problems import Fault
from plait.engine.http import HttpPool
from plait.engine.http_settings import HttpSettings
from plait.errors import UsageError
from plait.events import Engine
from plait.model.calibrate import Calibrator
from plait.model.steptime import assumed
from plait.plan import Machine
from plait.run.prepare import Tokenizer
from plait.table import I32


class Servers:
    """Opened at once, since only the servers know what they hold. Raises UsageError, EngineError if none answers."""

    passthrough = True
    retries = False
    calibrated = False
    history = None

    def __init__(self, settings: HttpSettings, tokenizer: str | None) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        key = settings.api_key()
        self.secrets: tuple[str, ...] = (key,) if key else ()
        self._engine = HttpPool(settings)
        self.name = self._engine.name
        try:
            models = self._engine.models
            if settings.model is not None and models and settings.model not in models:
                raise UsageError(f"--model is '{settings.model}'; the servers serve: {', '.join(sorted(models))}")
        except UsageError:
            self._engine.close()
            raise
        self.served = models if settings.model is None else frozenset()
        capacity = self._engine.capacity
        self.max_context_tokens = capacity.max_context_tokens
        """Of the server with the least; 0 where they do not tell."""
        self.unreachable = self._engine.unreachable
        if tokenizer is None:  # prompts are counted in bytes, so a server's own limits in tokens cannot be applied here
            capacity = replace(capacity, max_context_tokens=0)
        self.machine = Machine(capacity, assumed())

    @property
    def answer_settings(self) -> dict[str, Any]:
        """What changes answers, for the journal: the servers may change, the model may not."""
        return {"engine": "http", "model": self._settings.model}

    def tokenizer(self) -> Tokenizer:
        """The one that was named, else four bytes of text for a token."""
        if self._tokenizer is None:
            return ByteUnits()
        from plait.data.tokenize import Tokenizer as Native
        from plait.engine.models import find_model

        return Native.load(find_model(self._tokenizer).path)

    def engine(self) -> Engine:
        """The pool."""
        return self._engine

    def learn(self, seen: Calibrator) -> None:
        """Servers show no steps."""

    def close(self) -> None:
        """Let go of the servers."""
        self._engine.close()


class ByteUnits:
    """Stands in for a tokenizer: see ``plait.data.bytesplan``."""

    def encode_many(self, requests: list[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """Four-byte units of each prompt, int32."""
        units, offsets = pseudo_tokens(prompt_bytes(body) for _, body in requests)
        return [np.ascontiguousarray(part) for part in np.split(units, offsets[1:-1])]
