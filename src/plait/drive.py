"""The loop between a scheduler and an engine: decide, submit, poll, learn. No clock of its own, no files.

The loop sleeps inside ``Engine.poll`` and wakes for events, for a row whose retry is due, and otherwise every
``POLL_S`` to call ``heartbeat`` and ``stop``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from plait.errors import EngineError
from plait.events import Decision, Engine, EngineRequest, Event, Failed, Finished, Preempted, Step

POLL_S = 0.2
"""Longest sleep: how late a stop or a heartbeat may be noticed."""


class Stop(Enum):
    """What the owner of the run wants."""

    RUN = "run"
    DRAIN = "drain"
    """Send nothing more, wait for what is at the engine."""
    NOW = "now"
    """Leave at once; what is at the engine is cancelled."""


class Decides(Protocol):
    """What the loop needs of ``plait.scheduler.Scheduler``."""

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    def update(self, event: Event) -> None: ...

    def decide(self, now_s: float) -> Decision: ...


Fetch = Callable[[int], EngineRequest]
"""Row -> its request, built when it is sent. What it raises ends the loop."""
Sink = Callable[[Event], float | None]
"""Takes every event once, in order. For a Finished or Failed it may return seconds: the row is then not done but goes
back to the scheduler (as ``Preempted(requeue=True)``) after that time."""


def drive(
    scheduler: Decides,
    engine: Engine,
    fetch: Fetch,
    sink: Sink,
    *,
    stop: Callable[[], Stop] = lambda: Stop.RUN,
    heartbeat: Callable[[float], None] = lambda now_s: None,
) -> None:
    """Run until every row of the scheduler is done, or ``stop`` says otherwise.

    Each row is recorded by ``sink`` as Finished or Failed at most once between two submissions, whatever the engine
    repeats. ``heartbeat(now_s)`` is called with the engine's clock after each batch of events and at least every
    ``POLL_S`` seconds. Raises EngineError if the engine is gone, or if rows wait, nothing runs and the scheduler admits
    none of them.
    """
    loop = _Loop(scheduler, engine, fetch, sink)
    while True:
        wanted = stop()
        if wanted is Stop.RUN:
            sent = loop.send()
            if not (sent or loop.flying or loop.held):
                break
        else:
            sent = 0
            if wanted is Stop.NOW or not loop.flying:
                break
        loop.receive(0.0 if sent else loop.patience_s())
        heartbeat(engine.now_s())
    if loop.flying:
        engine.cancel(sorted(loop.flying))
    elif wanted is Stop.RUN and scheduler.waiting:
        raise EngineError(
            f"{scheduler.waiting} requests wait, none runs, and the scheduler admits none: the next one does not fit "
            f"the engine (KV cache of {engine.capacity.kv_tokens} tokens); give it more KV cache and run again"
        )


class _Loop:
    """State of one ``drive``: rows at the engine, and rows held back until their retry is due."""

    def __init__(self, scheduler: Decides, engine: Engine, fetch: Fetch, sink: Sink) -> None:
        self.scheduler, self.engine, self.fetch, self.sink = scheduler, engine, fetch, sink
        self.flying: set[int] = set()
        self.held: list[tuple[float, int]] = []  # (due on the engine's clock, row), a heap

    def patience_s(self) -> float:
        """How long the next poll may wait."""
        if not self.held:
            return POLL_S
        return min(max(self.held[0][0] - self.engine.now_s(), 0.0), POLL_S)

    def send(self) -> int:
        """Do what the scheduler decides; the number of rows submitted. Held rows count as running for the scheduler:
        a failing engine is offered no other work in their place."""
        now_s = self.engine.now_s()
        while self.held and self.held[0][0] <= now_s:
            row = heapq.heappop(self.held)[1]
            self.scheduler.update(Preempted(row, now_s, requeue=True))
        decision = self.scheduler.decide(now_s)
        if len(decision.preempt):
            self.engine.cancel(decision.preempt.tolist())
        requests = [self.fetch(row) for row in decision.admit.tolist()]
        if requests or decision.prefill_budget_tokens is not None:
            self.flying.update(request.row for request in requests)
            self.engine.submit(requests, decision.prefill_budget_tokens)
        return len(requests)

    def receive(self, timeout_s: float) -> None:
        """Hand the engine's events to the sink and the scheduler."""
        for event in self.engine.poll(timeout_s):
            if not isinstance(event, Step) and event.row not in self.flying:
                continue
            retry_s = self.sink(event)
            if isinstance(event, Finished | Failed):
                self.flying.discard(event.row)
                if retry_s is not None:
                    heapq.heappush(self.held, (event.t_s + retry_s, event.row))
                    continue
            elif isinstance(event, Preempted) and event.requeue:
                self.flying.discard(event.row)
            self.scheduler.update(event)
