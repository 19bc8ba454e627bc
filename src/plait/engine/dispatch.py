"""The event loop's side of a pool: sends, judges, retries, ejects and re-admits servers, and ends every request once.

Each fault is one of four kinds. A refusal (429, or any Retry-After) pauses its server and cuts its window; it is
bounded by ``max_wait_s``. A fault of the server or the transport costs the request one of its retries and the run one.
A crash (everything in flight at a server was cut off) costs nobody anything the first time; who was there twice runs
last and alone. A stall is retried once; if nothing at all moved meanwhile, the run stops.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from plait.engine.answers import Answer, Fault, Outcome, error_body
from plait.engine.health import WAVE_S, Health
from plait.engine.http_settings import HttpSettings
from plait.engine.pool import Balancer, Flight
from plait.engine.servers import Server
from plait.engine.window import RateLimit
from plait.errors import EngineError
from plait.events import Event, Failed, Finished, Preempted, Started

EJECT_AFTER = 3
SUSPECT_AFTER = 2
"""Crashes a request must have been part of to be run alone."""
PRIME_WAIT_S = 2.0
"""A group waits for its primer for at most this, or for twice a usual answer's time if that is longer."""
UNBOUNDED_TOKENS = 4096
"""Output a request without a cap is given time for."""
RETRIES_PER_ANSWER = 2
UNREACHED = 30
"""Times a request may find no connection at no cost: the server's absence is none of its business."""


class Dispatcher:
    """All methods run in the loop's thread. ``emit`` hands over an event, ``on_stop`` an error that ends the run."""

    def __init__(
        self,
        settings: HttpSettings,
        servers: Sequence[Server],
        now_s: Callable[[], float],
        emit: Callable[[Event], None],
        on_stop: Callable[[BaseException], None],
    ) -> None:
        self.settings = settings
        self.servers = servers
        self.now_s = now_s
        self.emit = emit
        self.on_stop = on_stop
        self.balancer = Balancer(len(servers), prime=not all(s.info.shares_within_a_batch for s in servers if s.up))
        self.flights: dict[int, Flight] = {}
        self.delayed: list[tuple[float, int, Flight]] = []
        self.suspects: deque[Flight] = deque()
        self.alone: Flight | None = None
        self.tasks: dict[Flight, asyncio.Task[None]] = {}
        self.background: set[asyncio.Task[None]] = set()
        self.requests = RateLimit(settings.rpm)
        self.tokens = RateLimit(settings.tpm)
        self.retries_left = float(settings.run_retries)
        self.answer_s = 0.0
        """Usual time of an answer."""
        self.token_s = 0.0
        """Usual time per output token."""
        self.last_answer_s = 0.0
        self.bytes_per_token = 4.0
        self.serial = itertools.count()
        self.jitter = random.Random(settings.seed)
        self.health = Health(servers, self.balancer, now_s, self._spawn, self.pump, self.jitter)
        self.wake: asyncio.TimerHandle | None = None
        self.wake_s = float("inf")
        self.stopped = False

    def run(self) -> None:
        """Start the background watches."""
        self._spawn(self._sweep())
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
                asyncio.get_running_loop().call_soon(self._cut, flight)
            else:
                self._forget(flight)
                self._end(flight, Preempted(row, self.now_s(), requeue=True))

    def _forget(self, flight: Flight) -> None:
        """Take a waiting flight from wherever it waits."""
        if self.balancer.remove(flight):
            return
        if flight in self.suspects:
            self.suspects.remove(flight)
        self.delayed = [entry for entry in self.delayed if entry[2] is not flight]
        heapq.heapify(self.delayed)

    # ---- sending

    def pump(self) -> None:
        """Send whatever may be sent now, and arrange to be called when the rest may."""
        if self.stopped or self.alone is not None:
            return
        now_s = self.now_s()
        while self.delayed and self.delayed[0][0] <= now_s:
            flight = heapq.heappop(self.delayed)[2]
            self.balancer.add(flight, front=True)
        for server in self.servers:
            if server.paused_until_s > now_s:
                self._wake_at(server.paused_until_s)
            elif server.up:
                self._fill(server, now_s)
        if self.suspects and not (self.balancer.in_flight or self.balancer.queued or self.delayed):
            free = next((s for s in self.servers if s.up and s.paused_until_s <= now_s), None)
            if free is not None:
                self.alone = self.suspects.popleft()
                self.balancer.start(self.alone, free.index)
                self._charge(self.alone, now_s)
                self._launch(self.alone, free)
        if self.delayed:
            self._wake_at(self.delayed[0][0])

    def _fill(self, server: Server, now_s: float) -> None:
        while (flight := self._next(server, now_s)) is not None:
            self._launch(flight, server)

    def _next(self, server: Server, now_s: float) -> Flight | None:
        """The flight to send to a server now, taken from the queues and charged to the rate limits; or None."""
        limit = self.settings.max_concurrency
        while server.window.room(len(self.balancer.members[server.index].in_flight)):
            if limit and self.balancer.in_flight >= limit:
                return None
            wait_s = self.requests.wait_s(1, now_s)
            if wait_s > 0:
                self._wake_at(now_s + wait_s)
                return None
            flight = self.balancer.take(server.index)
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

    def _charge(self, flight: Flight, now_s: float) -> None:
        self.requests.spend(1, now_s)
        flight.charge = self.tokens.spend(flight.reserve_tokens, now_s)
        flight.sent_s = now_s

    def _launch(self, flight: Flight, server: Server) -> None:
        task = asyncio.get_running_loop().create_task(self._fly(flight, server))
        self.tasks[flight] = task
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    def _wake_at(self, when_s: float) -> None:
        if when_s >= self.wake_s:
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
            if following is None or len(self.servers) > 1:
                self.pump()

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
            self._fail(flight, Fault("engine_killed", message), retryable=False)
        else:
            self._faulted(flight, server, outcome)

    def _answered(self, flight: Flight, server: Server, answer: Answer) -> None:
        now_s = self.now_s()
        took_s = now_s - flight.sent_s
        server.failures = 0
        server.progress_s = self.last_answer_s = now_s
        self.retries_left = min(self.retries_left + RETRIES_PER_ANSWER, 1e9)
        if answer.status == 200:
            self._learn(flight, answer, took_s)
            computed = answer.prompt_tokens - answer.cached_tokens + answer.output_tokens
            server.window.answered(computed or flight.work, now_s)
            used = answer.prompt_tokens + answer.output_tokens
            self.tokens.correct(flight.charge, used - flight.reserve_tokens if used else 0.0)
            self.emit(Started(flight.row, now_s, answer.cached_tokens))
        self._end(
            flight,
            Finished(
                flight.row,
                now_s,
                answer.status,
                answer.body,
                answer.prompt_tokens,
                answer.cached_tokens,
                answer.output_tokens,
                answer.finish_reasons,
            ),
        )

    def _learn(self, flight: Flight, answer: Answer, took_s: float) -> None:
        self.answer_s += 0.05 * (took_s - self.answer_s) if self.answer_s else took_s
        if answer.output_tokens:
            token_s = took_s / answer.output_tokens
            self.token_s += 0.05 * (token_s - self.token_s) if self.token_s else token_s
        if answer.prompt_tokens:
            self.bytes_per_token += 0.02 * (len(flight.body) / answer.prompt_tokens - self.bytes_per_token)

    def _faulted(self, flight: Flight, server: Server, fault: Fault) -> None:
        now_s = self.now_s()
        flight.fault = fault
        flight.avoid = server.index
        self.tokens.correct(flight.charge, -flight.reserve_tokens)
        if fault.retry_after_s is not None:
            server.paused_until_s = max(server.paused_until_s, now_s + fault.retry_after_s)
            server.pause = fault
        if fault.code == "rate_limited" or fault.retry_after_s is not None:
            server.window.refused(flight.sent_s, now_s, len(self.balancer.members[server.index].in_flight))
            self._refused(flight, fault, now_s)
            return
        server.last_error = fault.message
        server.failures += 1
        if fault.code == "disconnected":
            self.health.cut_off(flight, server)
        if server.failures >= EJECT_AFTER or fault.code == "connection_failed":
            self.health.eject(server)
        if fault.code == "connection_failed" and flight.unreached < UNREACHED:
            flight.unreached += 1
            self._retry(flight, now_s + self._backoff_s(1))
            return
        flight.attempts += 1
        self.retries_left -= 1
        if flight.attempts > self.settings.retries:
            self._fail(flight, fault)
        elif self.retries_left < 0:
            self._give_up(f"the run's retry budget is spent; last fault: {fault.message}")
        else:
            self._retry(flight, now_s + max(self._backoff_s(flight.attempts), 2 * WAVE_S))

    def _refused(self, flight: Flight, fault: Fault, now_s: float) -> None:
        """Wait as told, as long as that is within ``max_wait_s`` of the first refusal; or try another server."""
        flight.refusals += 1
        if flight.refused_s < 0:
            flight.refused_s = now_s
        if any(s.up and s.paused_until_s <= now_s and s.index != flight.avoid for s in self.servers):
            self._retry(flight, now_s)
            return
        wait_s = self._backoff_s(flight.refusals) if fault.retry_after_s is None else fault.retry_after_s
        if now_s + wait_s - flight.refused_s > self.settings.max_wait_s:
            self._fail(flight, fault)
        else:
            self._retry(flight, now_s + wait_s)

    def _retry(self, flight: Flight, when_s: float) -> None:
        heapq.heappush(self.delayed, (when_s, next(self.serial), flight))

    def _backoff_s(self, attempt: int) -> float:
        full_s = min(self.settings.backoff_s * 2.0 ** min(attempt - 1, 32), self.settings.max_backoff_s)
        return full_s * self.jitter.uniform(0.5, 1.0)

    def _fail(self, flight: Flight, fault: Fault, retryable: bool = True) -> None:
        body = None if fault.status is None else error_body(fault.status, fault.body or b"")
        message = fault.message if not flight.attempts else f"{fault.message} (after {flight.attempts} faults)"
        event = Failed(flight.row, self.now_s(), fault.code, message, None, fault.status, body, retryable)
        self._end(flight, event)

    def _end(self, flight: Flight, event: Event) -> None:
        """The one place where a flight ends."""
        del self.flights[flight.row]
        self.emit(event)

    # ---- on a timer

    async def _sweep(self) -> None:
        """Everything that must happen on a timer."""
        while not self.stopped:
            await asyncio.sleep(min(1.0, self.settings.stall_timeout_s / 4, self.settings.patience_s / 4))
            now_s = self.now_s()
            if (
                self.health.all_down_s >= 0
                and self.flights
                and now_s - self.health.all_down_s > self.settings.patience_s
            ):
                faults = "; ".join(f"{server.name}: {server.last_error}" for server in self.servers)
                self._give_up(f"no server has answered for {now_s - self.health.all_down_s:.0f} s: {faults}")
            self._fail_hopeless(now_s)
            for server in self.servers:
                for flight in list(self.balancer.members[server.index].in_flight):
                    if flight.primer and now_s - flight.sent_s > max(PRIME_WAIT_S, 2 * self.answer_s):
                        self.balancer.stop_priming(flight)
                    if self._stuck(flight, server, now_s):
                        self._unstick(flight, server, now_s)
            self.pump()

    def _fail_hopeless(self, now_s: float) -> None:
        """Flights that no server will take within ``max_wait_s`` are not held back silently."""
        up = [server for server in self.servers if server.up]
        if not up or any(server.paused_until_s - now_s <= self.settings.max_wait_s for server in up):
            return
        for flight in [*self.balancer.waiting(), *self.suspects]:
            self._forget(flight)
            self._fail(flight, up[0].pause or Fault("rate_limited", "the server asked for a pause", 429))

    def _stuck(self, flight: Flight, server: Server, now_s: float) -> bool:
        """Nothing moves here, or this one takes ten times what its tokens usually do. A server without metrics moves
        unseen while it generates: a long answer gets the time its tokens usually take on top."""
        usual_s = self.token_s * min(flight.max_tokens, UNBOUNDED_TOKENS)
        quiet_s = now_s - max(flight.sent_s, server.progress_s)
        unseen_s = 0.0 if server.window.measured else 2 * usual_s
        timeout_s = self.settings.stall_timeout_s
        return quiet_s > timeout_s + unseen_s or now_s - flight.sent_s > timeout_s + 10 * usual_s

    def _unstick(self, flight: Flight, server: Server, now_s: float) -> None:
        still_s = now_s - max(server.progress_s, flight.sent_s)
        message = f"{server.name} has sent nothing for {now_s - flight.sent_s:.0f} s (row {flight.row})"
        flight.stalls += 1
        if flight.stalls == 1:
            flight.first_stall_s = now_s
        elif self.last_answer_s < flight.first_stall_s:
            self._give_up(f"nothing has moved for {max(still_s, now_s - self.last_answer_s):.0f} s: {message}")
            return
        flight.fault = Fault("stall_timeout", message)
        self._cut(flight)

    def _cut(self, flight: Flight) -> None:
        """Break off a flight's round trip, if it is still on it."""
        if flight in self.tasks:
            self.tasks[flight].cancel()

    def _give_up(self, message: str) -> None:
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
