"""An engine that outlives its own death: it is started again, and the request that kills it is found and recorded.

The first time nobody is at fault: all that were in flight run again, in the scheduler's order. Who was there twice
waits here until nothing else runs, then runs alone; if the engine dies of it again, that request has no answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence

from plait.errors import EngineError
from plait.events import Capacity, Engine, EngineRequest, Event, Failed, Finished, Preempted, Step

SUSPECT_AFTER = 2
"""Crashes a request must have been part of to be run alone."""
MOST_KILLERS = 3
"""Requests that may kill it one after the other, without an answer between: beyond, the machine is at fault."""


class Isolating:
    """Satisfies ``plait.events.Engine`` with the engines that ``start`` makes, one at a time; the first is ``engine``.
    ``say`` gets a line for each crash. Raises EngineError where no new engine can be started, or each dies at once."""

    def __init__(self, engine: Engine, start: Callable[[], Engine], say: Callable[[str], None]) -> None:
        self._engine: Engine | None = engine
        self._start, self._say = start, say
        self._capacity = engine.capacity
        self._zero_s = time.perf_counter() - engine.now_s()
        self._late_s = 0.0  # of the running engine's clock behind ours
        self._flying: dict[int, EngineRequest] = {}
        self._crashes: dict[int, int] = {}
        self._suspects: deque[EngineRequest] = deque()
        self._held: list[EngineRequest] = []  # came while a suspect ran alone
        self._alone: int | None = None
        self._events: list[Event] = []
        self._kills = self._fruitless = 0  # since the last answer: crashes with one request alone, and others
        self._closed = False

    @property
    def capacity(self) -> Capacity:
        """The first engine's."""
        return self._capacity

    def now_s(self) -> float:
        """The first engine's clock, which goes on."""
        return time.perf_counter() - self._zero_s

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """See ``Engine``; suspects wait for their time."""
        free = [request for request in requests if not self._is_suspect(request.row)]
        self._suspects += [request for request in requests if self._is_suspect(request.row)]
        if self._alone is not None:
            self._held += free
        else:
            self._forward(free, prefill_budget_tokens)

    def cancel(self, rows: Sequence[int]) -> None:
        """See ``Engine``."""
        wanted = set(rows)
        kept_here = [request.row for request in (*self._suspects, *self._held) if request.row in wanted]
        self._suspects = deque(request for request in self._suspects if request.row not in wanted)
        self._held = [request for request in self._held if request.row not in wanted]
        self._events += [Preempted(row, self.now_s(), requeue=True) for row in kept_here]
        if self._engine is not None:
            with contextlib.suppress(EngineError):  # the next poll finds out
                self._engine.cancel(rows)

    def poll(self, timeout_s: float) -> list[Event]:
        """See ``Engine``."""
        if not self._flying and self._suspects and not self._events:
            suspect = self._suspects.popleft()
            self._alone = suspect.row
            self._forward([suspect], None)
        if self._engine is None:
            if not self._events:
                time.sleep(timeout_s)
        else:
            try:
                self._take(self._engine.poll(0.0 if self._events else timeout_s))
            except EngineError as error:
                self._crashed(error)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See ``Engine``."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def _is_suspect(self, row: int) -> bool:
        return self._crashes.get(row, 0) >= SUSPECT_AFTER

    def _forward(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None) -> None:
        """To the engine; to a new one if the last has died and there is something to do."""
        if self._engine is None and requests:
            self._engine = self._start()
            self._late_s = self.now_s() - self._engine.now_s()
        self._flying.update((request.row, request) for request in requests)
        if self._engine is not None:
            try:
                self._engine.submit(requests, prefill_budget_tokens)
            except EngineError as error:
                self._crashed(error)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._events.append(dataclasses.replace(event, t_s=event.t_s + self._late_s) if self._late_s else event)
            ended = isinstance(event, Finished | Failed) or (isinstance(event, Preempted) and event.requeue)
            if isinstance(event, Step) or not ended:
                continue
            self._flying.pop(event.row, None)
            if isinstance(event, Finished):
                self._kills = self._fruitless = 0
            if event.row == self._alone:
                self._end_solo()

    def _end_solo(self) -> None:
        self._alone = None
        held, self._held = self._held, []
        self._forward(held, None)

    def _crashed(self, error: EngineError) -> None:
        """Everything in flight is lost; who is to blame is known if it was alone."""
        assert self._engine is not None
        if self._closed:
            raise error
        self._engine.close()
        self._engine = None
        self._kills += self._alone is not None
        self._fruitless += self._alone is None
        if not self._flying or self._kills > MOST_KILLERS or self._fruitless > SUSPECT_AFTER * MOST_KILLERS:
            raise error
        lost, self._flying = list(self._flying), {}
        for row in lost:
            self._crashes[row] = self._crashes.get(row, 0) + 1
            if row != self._alone:
                self._events.append(Preempted(row, self.now_s(), requeue=True))
        if self._alone is None:
            self._say(f"{error}; its {len(lost):,} requests run again")
            return
        self._say(f"{error}; it had one request only, which is recorded as failed")
        times = self._crashes.pop(self._alone)
        message = f"the engine died each of the {times} times it had this request: {error}"
        self._events.append(Failed(self._alone, self.now_s(), "engine_killed", message))
        self._end_solo()
