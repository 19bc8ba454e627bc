"""What a fault means for its request, its server and the run: when to try again, and when to give up.

Each fault is one of four kinds. A refusal (429, or any Retry-After) pauses its server and cuts its window; it is
bounded by ``max_wait_s``. A fault of the server or the transport costs the request one of its retries and the run one.
A crash (everything in flight at a server was cut off) costs nobody anything the first time; who was there twice runs
last and alone. A stall is retried once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence

from plait.engine.answers import Fault
from plait.engine.health import WAVE_S, Health
from plait.engine.http_flight import Flight
from plait.engine.http_settings import HttpSettings
from plait.engine.servers import Server

EJECT_AFTER = 3
RETRIES_PER_ANSWER = 2
STALLS = 2
"""Times a request may be stuck before it is recorded as failed."""
UNREACHED = 30
"""Times a request may find no connection at no cost: the server's absence is none of its business."""


class Retries:
    """Flights that wait for another try. ``fail`` ends a flight, ``give_up`` ends the run."""

    def __init__(
        self,
        settings: HttpSettings,
        servers: Sequence[Server],
        health: Health,
        jitter: random.Random,
        fail: Callable[[Flight, Fault], None],
        give_up: Callable[[str], None],
    ) -> None:
        self.settings, self.servers, self.health = settings, servers, health
        self.jitter, self.fail, self.give_up = jitter, fail, give_up
        self.left = float(settings.run_retries)
        """Retries the run may still spend."""
        self._delayed: list[tuple[float, int, Flight]] = []
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._delayed)

    @property
    def due_s(self) -> float:
        """When the next one may go; infinity if none waits."""
        return self._delayed[0][0] if self._delayed else float("inf")

    def due(self, now_s: float) -> list[Flight]:
        """Take those whose time has come."""
        found = []
        while self._delayed and self._delayed[0][0] <= now_s:
            found.append(heapq.heappop(self._delayed)[2])
        return found

    def remove(self, flight: Flight) -> None:
        """Forget a flight, if it waits here."""
        self._delayed = [entry for entry in self._delayed if entry[2] is not flight]
        heapq.heapify(self._delayed)

    def answered(self) -> None:
        """An answer earns the run more retries."""
        self.left = min(self.left + RETRIES_PER_ANSWER, 1e9)

    def faulted(self, flight: Flight, server: Server, fault: Fault, now_s: float) -> None:
        """A flight came back from a server with a fault."""
        flight.fault = fault
        flight.avoid = server.index
        if fault.retry_after_s is not None:
            server.paused_until_s = max(server.paused_until_s, now_s + fault.retry_after_s)
            server.pause = fault
        if fault.code == "rate_limited" or fault.retry_after_s is not None:
            in_flight = len(self.health.balancer.members[server.index].in_flight)
            server.window.refused(flight.sent_s, now_s, in_flight)
            self._refused(flight, fault, now_s)
            return
        server.last_error = fault.message
        if fault.code == "disconnected":
            self.health.cut_off(flight, server)
        else:
            server.failures += 1
        if server.failures >= EJECT_AFTER or fault.code == "connection_failed":
            self.health.eject(server)
        if fault.code == "connection_failed" and flight.unreached < UNREACHED:
            flight.unreached += 1
            self._again(flight, now_s + self._backoff_s(1))
            return
        flight.attempts += 1
        self.left -= 1
        if flight.attempts > self.settings.retries or flight.stalls >= STALLS:
            self.fail(flight, fault)
        elif self.left < 0:
            self.give_up(f"the run's retry budget is spent; last fault: {fault.message}")
        else:
            self._again(flight, now_s + max(self._backoff_s(flight.attempts), 2 * WAVE_S))

    def _refused(self, flight: Flight, fault: Fault, now_s: float) -> None:
        """Wait as told, as long as that is within ``max_wait_s`` of the first refusal; or try another server."""
        flight.refusals += 1
        if flight.refused_s < 0:
            flight.refused_s = now_s
        if any(s.up and s.paused_until_s <= now_s and s.index != flight.avoid for s in self.servers):
            self._again(flight, now_s)
            return
        wait_s = self._backoff_s(flight.refusals) if fault.retry_after_s is None else fault.retry_after_s
        if now_s + wait_s - flight.refused_s > self.settings.max_wait_s:
            self.fail(flight, fault)
        else:
            self._again(flight, now_s + wait_s)

    def _again(self, flight: Flight, when_s: float) -> None:
        heapq.heappush(self._delayed, (when_s, next(self._serial), flight))

    def _backoff_s(self, attempt: int) -> float:
        full_s = min(self.settings.backoff_s * 2.0 ** min(attempt - 1, 32), self.settings.max_backoff_s)
        return full_s * self.jitter.uniform(0.5, 1.0)
