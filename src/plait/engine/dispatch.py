"""The event loop's side of a pool: sends what the balancer picks, within every limit, and ends every request once."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from plait.engine.answers import Answer, Fault, Outcome, error_body
from plait.engine.health import Health
from plait.engine.http_flight import Flight
from plait.engine.http_settings import HttpSettings
from plait.engine.isolating import SUSPECT_AFTER
from plait.engine.pace import Pace
from plait.engine.pool import Balancer
from plait.engine.retries import Retries
from plait.engine.servers import Server
from plait.engine.watch import Watch
from plait.engine.window import RateLimit
from plait.errors import EngineError
from plait.events import Event, Failed, Finished, Preempted, Started
from plait.table import NO_LIMIT

UNSPENT = frozenset({"rate_limited", "connection_failed"})
"""Faults after which the server has surely not counted the request's tokens."""


class Dispatcher:
    """All methods run in the loop's thread. ``emit`` hands over an event, ``on_stop`` an error that ends the run;
    ``new_server`` makes the server of an index and an endpoint."""

    def __init__(
        self,
        settings: HttpSettings,
        servers: Sequence[Server],
        now_s: Callable[[], float],
        emit: Callable[[Event], None],
        on_stop: Callable[[BaseException], None],
        new_server: Callable[[int, str], Server],
    ) -> None:
        self.settings = settings
        self.servers = list(servers)
        self.now_s, self.emit, self.on_stop, self.new_server = now_s, emit, on_stop, new_server
        self.balancer = Balancer(len(servers), prime=True)
        self.flights: dict[int, Flight] = {}
        self.suspects: deque[Flight] = deque()
        """Who may have killed servers: they run last, one by one."""
        self.alone: Flight | None = None
        """The suspect in flight."""
        self.tasks: dict[Flight, asyncio.Task[None]] = {}
        self.background: set[asyncio.Task[None]] = set()
        self.most = settings.max_concurrency or NO_LIMIT
        """Requests in flight that the user allows."""
        self.requests = RateLimit(settings.rpm)
        self.tokens = RateLimit(settings.tpm)
        self.pace = Pace()
        self.last_answer_s = 0.0
        self.wake: asyncio.TimerHandle | None = None
        self.wake_s = float("inf")
        self.stopped = False
        jitter = random.Random(settings.seed)
        self.health = Health(self.servers, self.balancer, now_s, self._spawn, self.pump, jitter)
        self.retries = Retries(settings, self.servers, self.health, jitter, self.fail, self.give_up)

    def run(self) -> None:
        """Start the background watches."""
        self._spawn(Watch(self).run())
        for server in self.servers:
            if server.up:
                self.health.watch(server)
            else:
                self.health.eject(server)

    # ---- from the driver

    def submit(self, flights: Sequence[Flight]) -> None:
        """Queue new flights."""
        for flight in flights:
            self.flights[flight.row] = flight
            self.balancer.add(flight)
        self.pump()

    def cancel(self, rows: Sequence[int]) -> None:
        """Drop flights; the ones at a server are cut off."""
        for row in rows:
            flight = self.flights.get(row)
            if flight is None:
                continue
            flight.cancelled = True
            if flight in self.tasks:  # not at once: a task that has not begun would never run its own ending
                asyncio.get_running_loop().call_soon(self.cut, flight)
            else:
                self.forget(flight)
                self._end(flight, Preempted(row, self.now_s(), requeue=True))

    def forget(self, flight: Flight) -> None:
        """Take a waiting flight from wherever it waits."""
        if self.balancer.remove(flight):
            return
        if flight in self.suspects:
            self.suspects.remove(flight)
        self.retries.remove(flight)

    # ---- sending

    def pump(self) -> None:
        """Send whatever may be sent now, and arrange to be called when the rest may."""
        if self.stopped or self.alone is not None:
            return
        now_s = self.now_s()
        for flight in self.retries.due(now_s):
            self.balancer.add(flight, front=True)
        for server in self.servers:
            if server.paused_until_s > now_s:
                self._wake_at(server.paused_until_s)
            elif server.up:
                self._fill(server, now_s)
        if self.suspects and not (self.balancer.in_flight or self.balancer.queued or len(self.retries)):
            self._send_suspect(now_s)
        self._wake_at(self.retries.due_s)

    def _send_suspect(self, now_s: float) -> None:
        free = next((s for s in self.servers if s.up and s.paused_until_s <= now_s), None)
        if free is not None:
            self.alone = self.suspects.popleft()
            self.balancer.start(self.alone, free.index)
            self._charge(self.alone, now_s)
            self._launch(self.alone, free)

    def _fill(self, server: Server, now_s: float) -> None:
        while (flight := self._next(server, now_s)) is not None:
            self._launch(flight, server)

    def _next(self, server: Server, now_s: float) -> Flight | None:
        """The flight to send to a server now, taken from the queues and charged to the rate limits; or None."""
        member = self.balancer.members[server.index]
        while server.window.room(len(member.in_flight)):
            places = min(int(server.window.limit), self._share())
            if len(member.in_flight) >= places or self.balancer.in_flight >= (
                self.settings.max_concurrency or NO_LIMIT
            ):
                return None
            wait_s = self.requests.wait_s(1, now_s)
            if wait_s > 0:
                self._wake_at(now_s + wait_s)
                return None
            flight = self.balancer.take(server.index, places)
            if flight is None:
                return None
            if flight.crashes >= SUSPECT_AFTER:
                self.balancer.end(flight, answered=False)
                self.suspects.append(flight)
                continue
            wait_s = self.tokens.wait_s(flight.reserve_tokens, now_s)
            if wait_s > 0:
                self.balancer.end(flight, answered=False)
                self.balancer.add(flight, front=True)
                self._wake_at(now_s + wait_s)
                return None
            self._charge(flight, now_s)
            return flight
        return None

    def _share(self) -> int:
        """Each server's part of ``most``: a place that gets free must not stay with one server."""
        if self.most == NO_LIMIT or len(self.servers) == 1:
            return self.most
        return -(-self.most // max(sum(server.up for server in self.servers), 1))

    def _charge(self, flight: Flight, now_s: float) -> None:
        """The flight goes out now."""
        self.requests.spend(1, now_s)
        flight.charge = self.tokens.spend(flight.reserve_tokens, now_s)
        flight.sent_s = now_s
        if flight.primer and flight.affinity in self.balancer.members[flight.server].queued_of:
            wait_s = self.pace.prefill_s(flight)
            asyncio.get_running_loop().call_later(wait_s, self._prefilled, flight, now_s)

    def _prefilled(self, flight: Flight, sent_s: float) -> None:
        """A primer whose answer is still to come has surely computed its prompt: its group need not wait longer."""
        if flight.primer and flight.sent_s == sent_s:
            self.balancer.stop_priming(flight)
            self.pump()

    def _launch(self, flight: Flight, server: Server) -> None:
        task = asyncio.get_running_loop().create_task(self._fly(flight, server))
        self.tasks[flight] = task
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    def _wake_at(self, when_s: float) -> None:
        if when_s >= self.wake_s or when_s == float("inf"):
            return
        if self.wake is not None:
            self.wake.cancel()
        self.wake_s = when_s
        delay_s = max(when_s - self.now_s(), 0.0)
        self.wake = asyncio.get_running_loop().call_later(delay_s, self._woken)

    def _woken(self) -> None:
        self.wake, self.wake_s = None, float("inf")
        self.pump()

    # ---- what came back

    async def _fly(self, flight: Flight, server: Server) -> None:
        """Send a flight and deal with what comes back; then the same for the server's next, as long as there is one."""
        task = self.tasks[flight]
        following: Flight | None = flight
        while following is not None:
            flight = following
            self.tasks[flight] = task
            await self._round_trip(flight, server)
            now_s = self.now_s()
            usable = server.up and server.paused_until_s <= now_s and not (self.stopped or self.alone)
            following = self._next(server, now_s) if usable else None
            if following is None or len(self.servers) > 1 or self._has_room(server):
                self.pump()

    def _has_room(self, server: Server) -> bool:
        """More may go there than just went: a primed group."""
        member = self.balancer.members[server.index]
        return bool(member.queue) and len(member.in_flight) < int(server.window.limit)

    async def _round_trip(self, flight: Flight, server: Server) -> None:
        killed = False
        try:
            outcome: Outcome | None = await server.exchange(flight)
            if self.alone is flight and isinstance(outcome, Fault) and outcome.code == "disconnected":
                killed = not await server.alive()
        except asyncio.CancelledError:
            if self.stopped:
                raise
            outcome = flight.fault
        del self.tasks[flight]
        self.balancer.end(flight, answered=isinstance(outcome, Answer))
        if self.alone is flight:
            self.alone = None
        if isinstance(outcome, Answer):
            self._answered(flight, server, outcome)
        elif flight.cancelled or outcome is None:
            self._end(flight, Preempted(flight.row, self.now_s(), requeue=True))
        elif killed:
            self.health.eject(server)
            message = f"the server died each of the {flight.crashes + 1} times it had this request: {outcome.message}"
            self.fail(flight, Fault("engine_killed", message), retryable=False)
        else:
            if outcome.code in UNSPENT:
                self.tokens.correct(flight.charge, -flight.reserve_tokens)
            self.retries.faulted(flight, server, outcome, self.now_s())

    def _answered(self, flight: Flight, server: Server, answer: Answer) -> None:
        now_s = self.now_s()
        server.failures = 0
        server.progress_s = self.last_answer_s = now_s
        self.retries.answered()
        if answer.status == 200:
            self.pace.learn(flight, answer, now_s - flight.sent_s)
            computed = answer.prompt_tokens - answer.cached_tokens + answer.output_tokens
            server.window.answered(computed or flight.work, now_s)
            used = answer.prompt_tokens + answer.output_tokens
            self.tokens.correct(flight.charge, used - flight.reserve_tokens if used else 0.0)
            self.emit(Started(flight.row, now_s, answer.cached_tokens))
        self._end(flight, Finished(flight.row, now_s, *answer))

    def fail(self, flight: Flight, fault: Fault, retryable: bool = True) -> None:
        """End a flight without an answer."""
        body = None if fault.status is None else error_body(fault.status, fault.body or b"")
        message = fault.message if not flight.attempts else f"{fault.message} (after {flight.attempts} faults)"
        event = Failed(flight.row, self.now_s(), fault.code, message, None, fault.status, body, retryable)
        self._end(flight, event)

    def _end(self, flight: Flight, event: Event) -> None:
        """The one place where a flight ends."""
        del self.flights[flight.row]
        self.emit(event)

    def cut(self, flight: Flight) -> None:
        """Break off a flight's round trip, if it is still on it."""
        if flight in self.tasks:
            self.tasks[flight].cancel()

    def give_up(self, message: str) -> None:
        """End the run, to be resumed."""
        self._stop(EngineError(f"{message}. Finished answers are kept; run the same command again to resume."))

    def _stop(self, error: BaseException) -> None:
        self.stopped = True
        self.on_stop(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        task.add_done_callback(self._landed)

    async def close(self) -> None:
        """Cut everything off."""
        self.stopped = True
        tasks = [*self.tasks.values(), *self.background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
