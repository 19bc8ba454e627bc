"""Time left of a run on an engine that shows its steps: the steps to come, the work in them, and what that costs.

A step costs a fixed time, and time for each prompt token, each decoding sequence and each token of KV cache that those
read; the four rates are fitted to the steps so far. What is to come is found by playing the rest of the job: lengths
are drawn from the survival curves (given what each running request has generated already), and the requests take turns
in as many places as the engine has. So the end of a job, where few requests run, is counted as the slow time it is.
"""

from __future__ import annotations

import heapq
from typing import Protocol

import numpy as np

from plait.events import Capacity, Event, Failed, Finished, Preempted, Progress, Started, Step
from plait.report.rates import Rates
from plait.table import F64, I64

PLAYED_ROWS = 400
"""Waiting requests that are played one by one; the others count with their mean."""
DRAWS = 4
STEP_COSTS = (25e-3, 0.5e-3, 0.5e-3, 2e-6)
"""Seconds of a step, of a prompt token, of a decoding sequence and of a KV token read, until steps show them: only the
proportions matter (SmolLM2-135M on two cores)."""
FOLLOWS = (0.5, 1.0, 1.0, 0.5)
"""How they vary between machines: computing tokens differs most, reading weights and KV cache about half as much."""


class Curves(Protocol):
    """What is known of output lengths; ``plait.lengths.Lengths`` is one."""

    @property
    def expected(self) -> F64: ...

    def drawn(self, rows: I64, generated: I64, shift: float) -> F64: ...

    def observe_rows(self, rows: I64, output_tokens: I64, finished: bool = True) -> None: ...

    def refresh(self) -> None: ...


class StepsLeft:
    """Takes each event once, in order. ``curves`` are its own: they learn here."""

    def __init__(
        self,
        curves: Curves,
        prompt_tokens: I64,
        max_tokens: I64,
        capacity: Capacity,
        step_costs: tuple[float, float, float, float] = STEP_COSTS,
    ) -> None:
        self._curves, self._prompt, self._most, self._capacity = curves, prompt_tokens, max_tokens, capacity
        self._rates = Rates(step_costs, follows=FOLLOWS)
        self._ended: list[tuple[int, int]] = []
        self._steps = 0
        self._told: dict[int, tuple[int, int]] = {}  # running row -> tokens when last told, and steps by then
        self._peak = 1
        self._last_s = np.inf

    def event(self, event: Event) -> None:
        """Learn from a step or an answer."""
        match event:
            case Started():
                self._told[event.row] = (1, self._steps)
            case Progress():
                self._told[event.row] = (event.output_tokens, self._steps)
            case Step() if event.duration_s > 0:
                self._steps += 1
                self._peak = max(self._peak, event.decode_seqs)
                work = (1.0, event.prefill_tokens, event.decode_seqs, event.decode_context_tokens)
                began_s = event.t_s - event.duration_s
                idle_s = began_s - self._last_s  # what an engine does between two steps is part of their cost
                if self._steps > 1:  # the first one also pays for what an engine sets up when it is first used
                    self._rates.add(work, event.duration_s + max(0.0, min(idle_s, event.duration_s)))
                self._last_s = event.t_s
            case Finished() | Failed() | Preempted():
                self._told.pop(event.row, None)
        if isinstance(event, Finished) and event.status_code == 200:
            self._ended.append((event.row, max(1, event.output_tokens)))

    @property
    def begun(self) -> bool:
        """Whether any step was seen: this engine shows them."""
        return self._steps > 0

    def seconds(self, running: I64, waiting: I64, prompt_left: float, longest: bool = False) -> float:
        """Seconds left, nan before the second step. ``running`` and ``waiting`` are rows, ``prompt_left`` prompt tokens
        still to compute; ``longest``: as if each answer went on to its ``max_tokens``."""
        generated = np.array([self._generated(row) for row in running.tolist()], np.int64)
        self._learn(running, generated)
        expected = self._most.astype(np.float64) if longest else self._curves.expected
        drawn = self._longest if longest else self._curves.drawn
        places = self._places(running, waiting, expected, 1 if longest else self._peak)
        played = waiting[np.linspace(0, len(waiting) - 1, min(len(waiting), PLAYED_ROWS)).astype(np.int64)]
        decoded = read = steps = 0.0
        for draw in range(DRAWS):
            now = np.maximum(drawn(running, generated, draw / DRAWS) - generated, 1.0)
            later = drawn(played, np.zeros(len(played), np.int64), draw / DRAWS)
            steps += _play(now, later, places) / DRAWS
            decoded += (now.sum() + (later - 1).sum()) / DRAWS
            read += (_read(self._prompt[running] + generated, now) + _read(self._prompt[played], later)) / DRAWS
        others = 1 - len(played) / max(len(waiting), 1)
        if others > 0:
            tokens = others * expected[waiting]
            decoded += float(tokens.sum())
            steps += float(tokens.sum()) / places
            read += _read(self._prompt[waiting], expected[waiting]) * others
        if self._capacity.max_batched_tokens:
            steps = max(steps, prompt_left / self._capacity.max_batched_tokens)
        return self._rates.seconds((steps, prompt_left, decoded, read))

    def _longest(self, rows: I64, generated: I64, shift: float) -> F64:
        """What ``Curves.drawn`` says of answers that all go on to their ``max_tokens``."""
        longest: F64 = self._most[rows].astype(np.float64)
        return longest

    def _learn(self, running: I64, generated: I64) -> None:
        """Bring the curves up to date."""
        if self._ended:
            ended = np.array(self._ended, np.int64)
            self._curves.observe_rows(ended[:, 0], ended[:, 1])
            self._ended.clear()
        begun = generated > 0
        self._curves.observe_rows(running[begun], generated[begun], finished=False)
        self._curves.refresh()

    def _generated(self, row: int) -> int:
        """Tokens of a running row: engines tell only now and then, and each step since then made one more."""
        tokens, step = self._told.get(row, (0, self._steps))
        return min(tokens + self._steps - step, int(self._most[row]))

    def _places(self, running: I64, waiting: I64, expected: F64, seen: int) -> int:
        """Requests that the engine runs at once: ``seen``, or what its limits allow."""
        rest = np.concatenate((running, waiting))
        need = float((self._prompt[rest] + expected[rest]).mean())
        allowed = int(self._capacity.kv_tokens / need)
        if self._capacity.max_num_seqs:
            allowed = min(allowed, self._capacity.max_num_seqs)
        return max(seen, allowed)


def _read(context: I64, tokens: F64) -> float:
    """KV tokens that requests read while they generate so many more on top of a context."""
    return float((tokens * (context + tokens / 2)).sum())


def _play(now: F64, later: F64, places: int) -> float:
    """Steps until all have ended: ``later`` requests follow, in order, wherever a place becomes free."""
    ends = now.tolist()
    ends = [0.0] * max(0, min(places - len(ends), len(later))) + ends
    heapq.heapify(ends)
    last = max(ends, default=0.0)
    for length in later.tolist():
        end = heapq.heapreplace(ends, ends[0] + length)
        last = max(last, end + length)
    return last
