"""Whether a job suits the servers it is meant for: asked of the servers, without a request to be answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plait.data.job import Job
from plait.data.limits import model_problems
from plait.data.problems import Problem
from plait.engine.http_settings import HttpSettings
from plait.errors import EngineError, UsageError
from plait.events import Capacity
from plait.run.prepare import Tokenizer, prepare
from plait.run.servers import Servers


@dataclass(frozen=True, slots=True)
class Seen:
    """What servers said of themselves."""

    name: str
    models: tuple[str, ...]
    """Empty where they do not tell."""
    max_context_tokens: int
    """Of the one with the least; 0 where they do not tell."""
    tokenizer: Tokenizer | None
    """None: prompts cannot be counted."""

    def __str__(self) -> str:
        served = ", ".join(self.models) or "they do not tell which models"
        length = f"{self.max_context_tokens} tokens" if self.max_context_tokens else "not told"
        unchecked = "" if self.tokenizer or not self.max_context_tokens else ", not checked: give --tokenizer"
        return f"{self.name}: reachable; serves {served}; context length {length}{unchecked}"

    def problems(self, job: Job) -> Iterator[Problem]:
        """Rows that ask for a model which is not served, then rows too long for the context, by row."""
        found = list(model_problems(job, self.models)) if self.models else []
        if self.tokenizer is not None and self.max_context_tokens:
            capacity = Capacity(kv_tokens=1 << 40, max_context_tokens=self.max_context_tokens)
            rows = np.flatnonzero(~job.bad).astype(np.int64)
            faults = prepare(job, rows, self.tokenizer, capacity).faults
            found += [job.problem(row, fault) for row, fault in faults.items()]
        yield from sorted(found, key=lambda problem: problem.row)


def look_at_servers(endpoints: Sequence[str], api_key_env: str | None, tokenizer: str | None) -> Seen:
    """Ask the servers. Raises UsageError if one does not answer, a key is refused, or the tokenizer cannot be had."""
    settings = HttpSettings(tuple(endpoints), api_key_env=api_key_env)
    try:
        place = Servers(settings, tokenizer)
    except EngineError as error:
        raise UsageError(str(error)) from error
    try:
        if place.unreachable:
            raise UsageError(f"not every server answers ({'; '.join(place.unreachable)}); start it or check --endpoint")
        models, context = tuple(sorted(place.served)), place.max_context_tokens
        return Seen(place.name, models, context, place.tokenizer() if tokenizer else None)
    finally:
        place.close()
