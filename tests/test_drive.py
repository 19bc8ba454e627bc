"""The loop between a scheduler and an engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.drive import Stop, drive
from plait.errors import EngineError
from plait.events import Capacity, Decision, EngineRequest, Event, Failed, Finished, Preempted, Started
from plait.testing import FakeEngine, check_engine
from tests.builders import Fifo


def request(row: int) -> EngineRequest:
    return EngineRequest(row, "/v1/completions", {"prompt": f"row {row}"}, np.arange(20, dtype=np.int32), 16)


def ends(events: list[Event]) -> list[int]:
    return [event.row for event in events if isinstance(event, Finished | Failed)]


def test_the_fake_engine_keeps_the_promises_of_the_protocol() -> None:
    check_engine(FakeEngine(), [request(row) for row in range(20)])


def test_conformance_checks_catch_an_engine_that_answers_twice() -> None:
    class Twice(FakeEngine):
        def poll(self, timeout_s: float) -> list[Event]:
            events = super().poll(timeout_s)
            return events + [event for event in events if isinstance(event, Finished)]

    with pytest.raises(AssertionError, match="ended twice"):
        check_engine(Twice(), [request(row) for row in range(20)])


FATES = st.sampled_from([None, None, Failed(0, 0, "server", "x", retryable=True), Preempted(0, 0, requeue=True)])


@given(
    n=st.integers(0, 30),
    limit=st.integers(1, 8),
    fates=st.lists(FATES, min_size=1, max_size=50),
    retries=st.integers(0, 3),
)
def test_every_row_ends_exactly_once_whatever_fails_and_is_preempted(
    n: int, limit: int, fates: list[Event | None], retries: int
) -> None:
    turn = itertools.cycle([*fates, None])
    tries: dict[int, int] = {}
    done: list[int] = []

    def sink(event: Event) -> float | None:
        if isinstance(event, Failed) and tries.setdefault(event.row, 0) < retries:
            tries[event.row] += 1
            return 0.01
        if isinstance(event, Finished | Failed):
            done.append(event.row)
        return None

    drive(Fifo(n, limit), FakeEngine(fate=lambda request, attempt: next(turn)), request, sink)
    assert sorted(done) == list(range(n))


def test_an_end_that_the_engine_repeats_is_ignored() -> None:
    class Echoing(FakeEngine):
        def poll(self, timeout_s: float) -> list[Event]:
            events = super().poll(timeout_s)
            return events + events

    seen: list[Event] = []
    drive(Fifo(10), Echoing(), request, lambda event: seen.append(event))
    assert sorted(ends(seen)) == list(range(10))


def test_a_retry_waits_for_its_time_and_holds_its_slot() -> None:
    engine = FakeEngine(fate=lambda request, attempt: Failed(0, 0, "x", "x", retryable=True) if attempt == 0 else None)
    times: dict[str, float] = {}

    def sink(event: Event) -> float | None:
        times[type(event).__name__] = event.t_s
        return 5.0 if isinstance(event, Failed) else None

    drive(Fifo(2, limit=1), engine, request, sink)
    assert engine.submitted == [0, 1, 0, 1] or engine.submitted == [0, 0, 1, 1]
    assert times["Finished"] >= 10.0


def test_drain_sends_nothing_more_and_waits_for_what_runs() -> None:
    engine, seen, stop = FakeEngine(), list[Event](), [Stop.RUN]

    def sink(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Finished):
            stop[0] = Stop.DRAIN

    drive(Fifo(20, limit=4), engine, request, sink, stop=lambda: stop[0])
    assert len(engine.submitted) == len(ends(seen)) == 4


def test_stop_now_cancels_what_runs() -> None:
    engine, seen, stop = FakeEngine(), list[Event](), [Stop.RUN]

    def sink(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Started):
            stop[0] = Stop.NOW

    drive(Fifo(20, limit=4), engine, request, sink, stop=lambda: stop[0])
    assert len(engine.submitted) == 4
    assert len(ends(seen)) < 4
    assert all(isinstance(event, Preempted) for event in engine.poll(0.0)[-1:])


def test_heartbeats_come_while_nothing_happens() -> None:
    beats: list[float] = []
    drive(Fifo(1), FakeEngine(decode_s=1.0), request, lambda event: None, heartbeat=beats.append)
    assert len(beats) > 2
    assert max(np.diff(beats)) <= 0.2 + 1e-9


def test_a_scheduler_that_admits_nothing_is_an_error_and_not_a_hang() -> None:
    class Stubborn(Fifo):
        def decide(self, now_s: float) -> Decision:
            return Decision(np.zeros(0, np.int64))

    with pytest.raises(EngineError, match="3 requests wait, none runs"):
        drive(Stubborn(3), FakeEngine(), request, lambda event: None)


def test_a_request_larger_than_the_kv_cache_comes_back_as_failed() -> None:
    seen: list[Event] = []
    drive(Fifo(2), FakeEngine(capacity=Capacity(kv_tokens=30)), request, seen.append)
    assert [event.code for event in seen if isinstance(event, Failed)] == ["kv_capacity_exceeded"] * 2


def test_a_dead_engine_raises_and_what_it_answered_was_recorded() -> None:
    seen: list[Event] = []
    with pytest.raises(EngineError, match="died after 5"):
        drive(Fifo(20, limit=1), FakeEngine(dies_after=5), request, seen.append)
    assert len(ends(seen)) == 5
