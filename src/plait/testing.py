"""A fake engine for tests of whatever drives engines, and the checks every real engine must pass.

``FakeEngine`` answers as a function of the request alone, so two runs with the same requests write the same answers
whatever the order. Its clock is virtual: ``poll`` jumps to the next event; with ``real_time`` it sleeps instead.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from plait.errors import EngineError
from plait.events import Capacity, Engine, EngineRequest, Event, Failed, Finished, Preempted, Progress, Started

Fate = Callable[[EngineRequest, int], Event | None]
"""(request, how often it was submitted before) -> a Failed, Finished or Preempted(requeue=True) to report in place of
its answer, or None. Row and time of the event are filled in."""

DEFAULT_CAPACITY = Capacity(kv_tokens=1 << 20, max_num_seqs=8)


def digest_of(request: EngineRequest) -> int:
    """A number that depends on what is asked, not on the row."""
    asked = msgspec.json.encode([request.url, request.body], order="sorted")
    return int.from_bytes(hashlib.blake2b(asked, digest_size=6).digest(), "big")


def output_tokens_of(request: EngineRequest) -> int:
    """Length of the fake answer: 1 to 40 tokens, capped by ``max_tokens``."""
    return min(1 + digest_of(request) % 40, request.max_tokens)


def answer_of(request: EngineRequest, prompt_tokens: int, cached_tokens: int) -> bytes:
    """The fake answer as a chat completion; its text names the request's digest. ``cached_tokens`` is left out of the
    body: it depends on the order."""
    output = output_tokens_of(request)
    body = {
        "id": f"chatcmpl-{digest_of(request):012x}",
        "object": "chat.completion",
        "created": 0,
        "model": request.body.get("model", "fake"),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": f"answer {digest_of(request):012x}"},
                "finish_reason": "length" if output == request.max_tokens else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output,
            "total_tokens": prompt_tokens + output,
        },
    }
    return msgspec.json.encode(body)


@dataclass(slots=True)
class _Flight:
    request: EngineRequest
    attempt: int
    cancelled: bool = False


@dataclass
class FakeEngine:
    """First come, first served: at most ``capacity.max_num_seqs`` requests run, and prompt + ``max_tokens`` of those
    running fit ``capacity.kv_tokens``. A request takes ``prefill_s`` for each prompt token that is not cached and
    ``decode_s`` for each output token. ``cache_block_tokens`` > 0 remembers prompts in blocks of that size."""

    capacity: Capacity = DEFAULT_CAPACITY
    prefill_s: float = 1e-4
    decode_s: float = 1e-3
    fate: Fate = lambda request, attempt: None
    dies_after: int | None = None
    """Answers after which every call raises EngineError."""
    cache_block_tokens: int = 0
    real_time: bool = False
    submitted: list[int] = field(default_factory=list)
    """Rows in the order they came, each as often as it came."""
    answers: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self._clock_s = 0.0
        self._began_s = time.monotonic()
        self._queue: deque[_Flight] = deque()
        self._running: dict[int, _Flight] = {}
        self._attempts: dict[int, int] = {}
        self._pending: list[tuple[float, int, Event]] = []  # a heap by time
        self._out: list[Event] = []
        self._serial = itertools.count()
        self._cache: set[bytes] = set()
        self._kv_tokens = 0

    def now_s(self) -> float:
        """The engine's clock."""
        return time.monotonic() - self._began_s if self.real_time else self._clock_s

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """Queue requests."""
        self._check_alive()
        for request in requests:
            attempt = self._attempts.get(request.row, 0)
            self._attempts[request.row] = attempt + 1
            self.submitted.append(request.row)
            if self._need(request) > self.capacity.kv_tokens:
                message = f"{self._need(request)} tokens can never fit {self.capacity.kv_tokens} tokens of KV cache"
                self._out.append(Failed(request.row, self.now_s(), "kv_capacity_exceeded", message))
            else:
                self._queue.append(_Flight(request, attempt))
        self._admit()

    def cancel(self, rows: Sequence[int]) -> None:
        """Drop requests."""
        for row in rows:
            waiting = next((flight for flight in self._queue if flight.request.row == row), None)
            if waiting is not None:
                self._queue.remove(waiting)
            elif row in self._running:
                self._leave(row)
            else:
                continue
            self._out.append(Preempted(row, self.now_s(), requeue=True))
        self._admit()

    def poll(self, timeout_s: float) -> list[Event]:
        """Events so far; with none, waits for the next one."""
        self._check_alive()
        if not self._out:
            next_s = self._pending[0][0] if self._pending else float("inf")
            until_s = min(next_s, self.now_s() + timeout_s)
            if self.real_time:
                time.sleep(max(until_s - self.now_s(), 0.0))
            else:
                self._clock_s = max(self._clock_s, until_s)
        while self._pending and self._pending[0][0] <= self.now_s():
            self._happen(heapq.heappop(self._pending)[2])
        out, self._out = self._out, []
        return out

    def close(self) -> None:
        """Forget everything."""
        self.closed = True
        self._queue.clear()
        self._running.clear()
        self._pending.clear()

    def _check_alive(self) -> None:
        if self.closed:
            raise EngineError("the fake engine is closed")
        if self.dies_after is not None and self.answers >= self.dies_after:
            raise EngineError(f"the fake engine died after {self.answers} answers")

    def _need(self, request: EngineRequest) -> int:
        return self._prompt_tokens(request) + request.max_tokens

    def _prompt_tokens(self, request: EngineRequest) -> int:
        if request.token_ids is not None:
            return len(request.token_ids)
        return max(1, len(msgspec.json.encode(request.body)) // 4)

    def _admit(self) -> None:
        while self._queue:
            flight = self._queue[0]
            full = 0 < self.capacity.max_num_seqs <= len(self._running)
            if full or self._kv_tokens + self._need(flight.request) > self.capacity.kv_tokens:
                return
            self._queue.popleft()
            self._run(flight)

    def _run(self, flight: _Flight) -> None:
        """Lay out all events of a request that starts now."""
        request, row = flight.request, flight.request.row
        self._running[row] = flight
        self._kv_tokens += self._need(request)
        prompt, output = self._prompt_tokens(request), output_tokens_of(request)
        cached = self._lookup(request)
        started_s = self.now_s() + (prompt - cached) * self.prefill_s
        finished_s = started_s + output * self.decode_s
        fate = self.fate(request, flight.attempt)
        self._at(Started(row, started_s, cached))
        self._at(Progress(row, (started_s + finished_s) / 2, max(1, output // 2)))
        if fate is None:
            reason = "length" if output == request.max_tokens else "stop"
            body = answer_of(request, prompt, cached)
            self._at(Finished(row, finished_s, 200, body, prompt, cached, output, (reason,)))
        else:
            self._at(_placed(fate, row, finished_s))

    def _at(self, event: Event) -> None:
        heapq.heappush(self._pending, (event.t_s, next(self._serial), event))

    def _happen(self, event: Event) -> None:
        if isinstance(event, Finished | Failed) or (isinstance(event, Preempted) and event.requeue):
            flight = self._running[event.row]
            self.answers += 1
            self._leave(event.row)
            self._remember(flight.request)
            self._out.append(event)
            self._admit()
        else:
            self._out.append(event)

    def _leave(self, row: int) -> None:
        """A running request ends; what it would still have reported does not happen."""
        flight = self._running.pop(row)
        self._kv_tokens -= self._need(flight.request)
        self._pending = [entry for entry in self._pending if getattr(entry[2], "row", -1) != row]
        heapq.heapify(self._pending)

    def _blocks(self, request: EngineRequest) -> list[bytes]:
        size = self.cache_block_tokens
        if not size or request.token_ids is None:
            return []
        return [request.token_ids[:end].tobytes() for end in range(size, len(request.token_ids), size)]

    def _lookup(self, request: EngineRequest) -> int:
        hits = itertools.takewhile(lambda block: block in self._cache, self._blocks(request))
        return sum(1 for _ in hits) * self.cache_block_tokens

    def _remember(self, request: EngineRequest) -> None:
        self._cache.update(self._blocks(request))


def _placed(fate: Event, row: int, t_s: float) -> Event:
    """The event with its row and time."""
    match fate:
        case Finished():
            return Finished(row, t_s, fate.status_code, fate.body)
        case Failed():
            return Failed(row, t_s, fate.code, fate.message, fate.param, fate.status_code, fate.body, fate.retryable)
        case _:
            return Preempted(row, t_s, requeue=True)


def check_engine(engine: Engine, requests: Sequence[EngineRequest], limit_s: float = 300.0) -> None:
    """Run requests through an engine and assert what the ``Engine`` protocol promises. Rows must be 0, 1, ...; at
    least four requests, all of which the engine can answer. The engine is closed at the end.

    Checked: each request ends exactly once, cancelled ones too; the clock and event times never run backwards; unknown
    rows are ignored; a cancelled row can be sent again; poll keeps to its timeout; close may be called twice.
    """
    assert len(requests) >= 4, "give check_engine at least four requests"
    capacity = engine.capacity
    assert capacity.kv_tokens > 0, "capacity.kv_tokens must be positive"
    assert min(_idle_poll_s(engine) for _ in range(3)) < 1.0, "poll(0) waited"  # more than once: machines stall
    engine.cancel([len(requests) + 7])
    engine.submit([])
    engine.submit(requests)
    engine.cancel([requests[-1].row])
    ends = _run_to_end(engine, [request.row for request in requests], limit_s)
    for row, (end,) in ends.items():
        if isinstance(end, Preempted):
            assert row == requests[-1].row, f"row {row} was sent back although it was not cancelled"
        else:
            assert isinstance(end, Finished) and end.status_code == 200, f"row {row} was not answered: {end}"
            assert isinstance(msgspec.json.decode(end.body), dict), f"row {row}: the body is not an object"
            assert b"\n" not in end.body, f"row {row}: the body is not on one line"
    engine.submit([requests[-1]])
    _run_to_end(engine, [requests[-1].row], limit_s)
    assert engine.capacity == capacity, "capacity changed"
    engine.close()
    engine.close()


def _idle_poll_s(engine: Engine) -> float:
    """Time of a poll that must not wait, before any request."""
    began_s = time.monotonic()
    assert engine.poll(0.0) == [], "events before the first request"
    return time.monotonic() - began_s


def _run_to_end(engine: Engine, rows: Sequence[int], limit_s: float) -> dict[int, list[Event]]:
    """Poll until every row has ended; the events that ended them."""
    ends: dict[int, list[Event]] = {row: [] for row in rows}
    deadline_s, last_s = time.monotonic() + limit_s, engine.now_s()
    idle = 0
    while idle < 3:  # a few more polls, to catch a row that ends twice
        assert time.monotonic() < deadline_s, f"not ended within {limit_s} s: {[r for r in rows if not ends[r]]}"
        for event in engine.poll(0.1):
            assert event.t_s <= engine.now_s() + 1e-6, f"an event from the future: {event}"
            if isinstance(event, Finished | Failed) or (isinstance(event, Preempted) and event.requeue):
                assert event.row in ends, f"a row that was not sent ended: {event}"
                ends[event.row].append(event)
                assert len(ends[event.row]) == 1, f"row {event.row} ended twice: {ends[event.row]}"
        assert engine.now_s() >= last_s, "the clock ran backwards"
        last_s = engine.now_s()
        idle += all(ends.values())
    return ends
