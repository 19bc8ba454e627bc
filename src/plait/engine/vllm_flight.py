"""A request inside vLLM: what its outputs say about where it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from plait.events import Event, Preempted, Progress, Started

Emit = Callable[[Event], None]
Clock = Callable[[], float]


class Flight:
    """Turns the outputs of one request into events."""

    def __init__(self, row: int, emit: Emit, now_s: Clock) -> None:
        self.row = row
        self.cached_tokens = 0
        self._emit, self._now_s = emit, now_s
        self._started = False
        self._tokens: dict[str, int] = {}  # generated so far, by vLLM's request: a body may hold several prompts
        self._preemptions: dict[str, int] = {}

    def saw(self, output: Any) -> None:
        """Take in a ``vllm.RequestOutput``."""
        name, now_s = output.request_id, self._now_s()
        preemptions = getattr(output.metrics, "num_preemptions", 0)
        if preemptions > self._preemptions.get(name, 0):
            self._preemptions[name] = preemptions  # seen late: by now it computes again
            self._emit(Preempted(self.row, now_s))
            self._started = False
        if name not in self._tokens:
            self.cached_tokens += output.num_cached_tokens or 0
        self._tokens[name] = sum(len(each.token_ids) for each in output.outputs)
        self.start()
        self._emit(Progress(self.row, now_s, sum(self._tokens.values())))

    def start(self) -> None:
        """There is a first token, or an answer."""
        if not self._started:
            self._started = True
            self._emit(Started(self.row, self._now_s(), self.cached_tokens))


FLIGHT: ContextVar[Flight | None] = ContextVar("plait_flight", default=None)
"""Whose request the current task serves."""


def watch(engine: Any) -> None:
    """Let every generation of the ``AsyncLLM`` tell the flight that it belongs to how far it is. Its answers stay the
    same: of a request with one sequence the last cumulative output is its final output."""
    generate = engine.generate

    async def watched(prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        flight = FLIGHT.get()
        if flight is not None and sampling_params.n == 1:
            sampling_params.output_kind = RequestOutputKind.CUMULATIVE
        async with aclosing(generate(prompt, sampling_params, *args, **kwargs)) as outputs:
            async for output in outputs:
                if flight is not None:
                    flight.saw(output)
                yield output

    engine.generate = watched
