"""Time left of a run on an engine that shows its steps: how many steps are to come, and what a step costs.

A step costs a fixed time and a time for each token in it (least squares over the steps so far). How many are to come is
found by playing the rest of the job: lengths are drawn from the survival curves (given what each running request has
generated already), and the requests take turns in as many places as the engine has. So the end of a job, where few
requests run and steps carry few tokens, is counted as the slow time it is.
"""

from __future__ import annotations

import heapq
from typing import Protocol

import numpy as np

from plait.events import Capacity, Event, Failed, Finished, Preempted, Progress, Started, Step
from plait.report.rates import TwoRates
from plait.table import F64, I32, I64

PLAYED_ROWS = 400
"""Waiting requests that are played one by one; those before them only count with their mean."""
DRAWS = 4
STEP_IN_TOKENS = 8.0
"""Tokens that take as long as a step's fixed time, until steps show it."""
LONGER = 1.1
"""An answer that is the longest already will be this much longer."""
RAREST = 0.05
"""Draws stop at the answer that one of twenty exceeds: the far end of a curve is a guess, and the longest of many draws
would be nothing else."""
GOLDEN = 0.6180339887498949


class Curves(Protocol):
    """What is known of output lengths; ``plait.lengths.Lengths`` is one."""

    @property
    def classes(self) -> I32: ...

    @property
    def grid_tokens(self) -> I64: ...

    @property
    def survival(self) -> F64: ...

    @property
    def expected(self) -> F64: ...

    def observe_rows(self, rows: I64, output_tokens: I64, finished: bool = True) -> None: ...

    def refresh(self) -> None: ...


class StepsLeft:
    """Takes each event once, in order. ``curves`` are its own: they learn here."""

    def __init__(self, curves: Curves, prompt_tokens: I64, max_tokens: I64, capacity: Capacity) -> None:
        self._curves, self._prompt, self._most, self._capacity = curves, prompt_tokens, max_tokens, capacity
        self._rates = TwoRates(STEP_IN_TOKENS)
        self._ended: list[tuple[int, int]] = []
        self._steps = 0
        self._told: dict[int, tuple[int, int]] = {}  # running row -> tokens when last told, and steps by then
        self._peak = 1
        self._answers = self._longest = 0

    def event(self, event: Event) -> None:
        """Learn from a step or an answer."""
        if isinstance(event, Started | Progress):
            self._told[event.row] = (event.output_tokens if isinstance(event, Progress) else 1, self._steps)
        elif isinstance(event, Finished | Failed | Preempted):
            self._told.pop(event.row, None)
        if isinstance(event, Step) and event.duration_s > 0:
            self._steps += 1
            self._rates.add(float(event.prefill_tokens + event.decode_seqs), 1.0, event.duration_s)
            self._peak = max(self._peak, event.decode_seqs)
        elif isinstance(event, Finished) and event.status_code == 200 and event.output_tokens:
            self._ended.append((event.row, event.output_tokens))
            self._answers += 1
            self._longest = max(self._longest, event.output_tokens)

    @property
    def ready(self) -> bool:
        """Whether any step was seen."""
        return self._rates.seen

    def seconds(self, running: I64, waiting: I64, prompt_left: float, passed_s: float) -> float:
        """Seconds left. ``running`` and ``waiting`` are rows, ``prompt_left`` prompt tokens still to compute,
        ``passed_s`` the time of the run so far."""
        if self._ended:
            ended = np.array(self._ended, np.int64)
            self._curves.observe_rows(ended[:, 0], ended[:, 1])
            self._ended.clear()
        generated = np.array([self._generated(row) for row in running.tolist()], np.int64)
        begun = generated > 0
        self._curves.observe_rows(running[begun], generated[begun], finished=False)
        self._curves.refresh()
        expected = self._curves.expected
        places = self._places(running, waiting, expected)
        played = waiting[np.linspace(0, len(waiting) - 1, min(len(waiting), PLAYED_ROWS)).astype(np.int64)]
        unplayed = float(expected[waiting].sum()) * (1 - len(played) / max(len(waiting), 1))
        longest = self._longest if self._answers >= len(running) + len(waiting) else np.inf
        steps = tokens = 0.0
        for draw in range(DRAWS):
            now = self._drawn(running, generated, draw, longest)
            later = self._drawn(played, np.zeros(len(played), np.int64), draw, longest)
            steps += _play(now, later, places) / DRAWS
            tokens += (now.sum() + later.sum()) / DRAWS
        steps += unplayed / places
        if self._capacity.max_batched_tokens:
            steps = max(steps, prompt_left / self._capacity.max_batched_tokens)
        return float(self._rates.seconds(prompt_left + tokens + unplayed, steps, passed_s))

    def _generated(self, row: int) -> int:
        """Tokens of a running row: engines tell only now and then, and each step since then made one more."""
        tokens, step = self._told.get(row, (0, self._steps))
        return min(tokens + self._steps - step, int(self._most[row]))

    def _places(self, running: I64, waiting: I64, expected: F64) -> int:
        """Requests that the engine runs at once: the most seen, or what its limits allow."""
        rest = np.concatenate((running, waiting))
        need = float((self._prompt[rest] + expected[rest]).mean())
        allowed = int(self._capacity.kv_tokens / need)
        if self._capacity.max_num_seqs:
            allowed = min(allowed, self._capacity.max_num_seqs)
        return max(1, self._peak, allowed)

    def _drawn(self, rows: I64, generated: I64, draw: int, longest: float) -> F64:
        """Tokens that rows will still generate, float64 [k], by a quantile that is the row's own. ``longest``: once
        more answers have ended than are to come, the longest of all is more likely among those that ended."""
        at = self._curves.grid_tokens
        curves = self._curves.survival[self._curves.classes[rows]]
        alive = np.array([np.interp(g, at, curve) for g, curve in zip(generated, curves, strict=True)])
        level = np.maximum(((rows + 1) * GOLDEN + draw / DRAWS) % 1.0, RAREST) * alive
        index = np.clip((curves > level[:, None]).sum(axis=1), 1, len(at) - 1)
        lengths = np.minimum((at[index - 1] + at[index]) / 2, self._most[rows])
        lengths = np.minimum(lengths, np.maximum(longest, LONGER * generated))
        left: F64 = np.maximum(lengths - generated, 1.0)
        return left


def _play(now: F64, later: F64, places: int) -> float:
    """Steps until all have ended: ``later`` requests follow, in order, wherever a place becomes free."""
    ends = now.tolist()
    ends = [0.0] * max(0, min(places - len(ends), len(later))) + ends
    heapq.heapify(ends)
    last = max(ends, default=0.0)
    for length in later.tolist():
        end = heapq.heapreplace(ends, ends[0] + length) + length
        last = max(last, end)
    return last
