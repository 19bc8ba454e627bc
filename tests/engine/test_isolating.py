"""An engine that dies: the innocent are answered, the one that kills it is recorded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.drive import drive
from plait.engine.isolating import MOST_KILLERS, SUSPECT_AFTER, Isolating
from plait.errors import EngineError
from plait.events import EngineRequest, Event, Failed, Finished, Preempted
from plait.testing import FakeEngine, check_engine
from tests.builders import Fifo


def request(row: int) -> EngineRequest:
    return EngineRequest(row, "/v1/completions", {"prompt": f"row {row}"}, np.arange(20, dtype=np.int32), 16)


def hush(line: str) -> None:
    """Say nothing."""


class Mortal(FakeEngine):
    """Dies when a row of ``killers`` runs; all engines write into one diary what was sent to them."""

    def __init__(self, killers: set[int], diary: list[list[int]], lives: int = 1 << 30) -> None:
        super().__init__(real_time=True, decode_s=1e-4, prefill_s=1e-6)
        self.killers, self.lives = killers, lives
        self.submitted = []
        diary.append(self.submitted)

    def poll(self, timeout_s: float) -> list[Event]:
        if self.killers & self._running.keys() or self.answers >= self.lives:
            raise EngineError(f"out of order with {sorted(self._running)}")
        return super().poll(timeout_s)


def run(n: int, killers: set[int], limit: int = 8, lives: int = 1 << 30) -> tuple[list[Event], list[list[int]]]:
    """All rows through an isolated engine: what was told, and what each engine was sent. The first engine dies of
    itself after ``lives`` answers."""
    diary: list[list[int]] = []
    told: list[Event] = []
    engine = Isolating(Mortal(killers, diary, lives), lambda: Mortal(killers, diary), hush)
    drive(Fifo(n, limit), engine, request, told.append)
    return told, diary


def ends(told: list[Event], kind: type[Event]) -> list[int]:
    return sorted(event.row for event in told if isinstance(event, kind))  # type: ignore[union-attr]


def test_it_keeps_the_protocol() -> None:
    diary: list[list[int]] = []
    check_engine(
        Isolating(Mortal(set(), diary), lambda: Mortal(set(), diary), hush), [request(row) for row in range(9)]
    )
    assert len(diary) == 1


def test_the_killer_runs_last_and_alone_and_all_others_are_answered() -> None:
    told, diary = run(30, {5})
    assert ends(told, Finished) == [row for row in range(30) if row != 5]
    (failed,) = [event for event in told if isinstance(event, Failed)]
    assert failed.row == 5 and failed.code == "engine_killed" and not failed.retryable
    assert "3 times" in failed.message and "out of order with [5]" in failed.message, "it ran alone"
    assert sum(sent.count(5) for sent in diary) == SUSPECT_AFTER + 1
    innocent = set(range(8, 30))  # never beside it
    assert innocent <= set(ends(told[: told.index(failed)], Finished)), "it ran last"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24), st.sets(st.integers(0, 23), max_size=MOST_KILLERS), st.integers(1, 9))
def test_whoever_kills_each_row_ends_once(n: int, killers: set[int], limit: int) -> None:
    killers = {row for row in killers if row < n}
    told, diary = run(n, killers, limit)
    assert ends(told, Finished) == [row for row in range(n) if row not in killers]
    assert ends(told, Failed) == sorted(killers)
    tries = Counter(row for sent in diary for row in sent)
    assert all(tries[row] == SUSPECT_AFTER + 1 for row in killers)


def test_an_engine_that_dies_by_itself_costs_no_answer() -> None:
    told, diary = run(60, set(), limit=4, lives=7)
    assert ends(told, Finished) == list(range(60)) and ends(told, Failed) == []
    assert len(diary) == 2 and 1 <= len(ends(told, Preempted)) <= 4


def test_a_machine_on_which_every_engine_dies_ends_the_run() -> None:
    with pytest.raises(EngineError, match="out of order"):
        run(40, set(range(40)))
    diary: list[list[int]] = []

    def cannot_start() -> FakeEngine:
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        drive(Fifo(9), Isolating(Mortal({3}, diary), cannot_start, hush), request, lambda event: None)


def test_an_engine_that_dies_with_nothing_to_do_is_told_at_once() -> None:
    made = Isolating(Mortal(set(), [], lives=0), lambda: Mortal(set(), []), hush)
    with pytest.raises(EngineError, match="out of order"):
        made.poll(0.0)


def test_suspects_and_those_behind_them_can_be_cancelled() -> None:
    said: list[str] = []
    made = Isolating(Mortal({0, 1}, []), lambda: Mortal({0, 1}, []), said.append)
    for _ in range(SUSPECT_AFTER):
        made.submit([request(0), request(1)])
        assert ends(made.poll(0.0), Preempted) == [0, 1]
    made.submit([request(0), request(1)])
    made.cancel([1])
    assert [(type(event), getattr(event, "row", -1)) for event in made.poll(0.0)] == [(Preempted, 1)]
    made.poll(0.0)  # row 0 runs alone now
    made.submit([request(7)])
    made.cancel([7, 0])
    found = made.poll(0.0) + made.poll(0.0)
    assert [type(event) for event in found if getattr(event, "row", -1) == 7] == [Preempted]
    assert len(said) >= SUSPECT_AFTER and all("run again" in line or "recorded" in line for line in said)
