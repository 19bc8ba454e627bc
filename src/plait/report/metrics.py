"""Events -> numbers: the one definition of each metric of a run. Rows are the scheduler's, times the engine's clock.

``Summary`` is what is said at the end, ``LiveStats`` what is shown meanwhile. Both take each event once, in order.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from plait.events import Event, Failed, Finished, Preempted, Progress, Started, Step
from plait.report.rates import Rates
from plait.report.steps_left import StepsLeft
from plait.table import F64, I64

TRUNCATED = "length"
"""Finish reason of an answer that was cut off."""
RATE_WINDOW_S = 10.0
"""Time constant of the shown rates."""
SECONDS_PER_FIT = 0.5
"""Shortest piece of a run that counts as one observation of the cost of tokens."""
OUTPUT_COST = 4.0
"""Seconds of an output token over those of a prompt token, as long as a run does not show it."""
COST_GUESS_S = 0.002
"""Time of a run that counts like that guess."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The figures of a run (of this run only, where the job was resumed)."""

    answered: int
    failed: int
    truncated: int
    """Answers with finish reason ``length``."""
    finish_reasons: dict[str, int]
    prompt_tokens: int
    computed_prompt_tokens: int
    """Prompt tokens the engine had to compute once. What preemptions made it compute again is in
    ``lost_tokens`` and never counts as reuse."""
    reused_prompt_tokens: int
    output_tokens: int
    preemptions: int
    lost_tokens: int
    """Tokens whose KV was thrown away by preemptions."""
    duration_s: float
    """From the start of the run (the engine is loaded then) to the last event."""
    tokens_per_s: float
    """Prompt + output tokens of answered requests over ``duration_s``."""
    mean_completion_s: float
    p50_completion_s: float
    p99_completion_s: float
    """Completion times of answered requests, from the start of the run; nan without any."""
    peak_running: int
    tail_share: float
    """Share of ``duration_s`` at the end during which fewer than half of ``peak_running`` requests ran."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; nan becomes null."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


class Summary:
    """Collects a run's events. A request runs from its first token to its end. Memory: 32 bytes an ended request."""

    def __init__(self, start_s: float = 0.0) -> None:
        """``start_s``: the engine's clock when the run starts."""
        self._start_s = start_s
        self._running: set[int] = set()
        self._first_cached: dict[int, int] = {}  # cached tokens of a row's first prefill
        self._change_s = array("d")  # when the number of running requests changed,
        self._change_to = array("i")  # and to what
        self._completion_s = array("d")
        self._reasons: Counter[str] = Counter()
        self._answered = self._failed = 0
        self._prompt = self._reused = self._output = 0
        self._preemptions = self._lost = 0
        self._last_s = start_s

    def event(self, event: Event) -> None:
        """Take one event in."""
        self._last_s = max(self._last_s, event.t_s)
        match event:
            case Started():
                self._first_cached.setdefault(event.row, event.cached_tokens)
                self._set_running(event.row, event.t_s, True)
            case Preempted():
                self._preemptions += 1
                self._lost += event.lost_tokens
                self._set_running(event.row, event.t_s, False)
            case Finished():
                self._finished(event)
            case Failed():
                self._failed += 1
                self._first_cached.pop(event.row, None)
                self._set_running(event.row, event.t_s, False)
            case Progress() | Step():
                pass

    def numbers(self) -> Numbers:
        """The figures so far."""
        duration_s = self._last_s - self._start_s
        completion_s = np.array(self._completion_s) - self._start_s
        p50, p99 = np.percentile(completion_s, [50, 99]) if len(completion_s) else (math.nan, math.nan)
        peak = max(self._change_to, default=0)
        return Numbers(
            answered=self._answered,
            failed=self._failed,
            truncated=self._reasons[TRUNCATED],
            finish_reasons=dict(self._reasons),
            prompt_tokens=self._prompt,
            computed_prompt_tokens=self._prompt - self._reused,
            reused_prompt_tokens=self._reused,
            output_tokens=self._output,
            preemptions=self._preemptions,
            lost_tokens=self._lost,
            duration_s=duration_s,
            tokens_per_s=(self._prompt + self._output) / duration_s if duration_s > 0 else 0.0,
            mean_completion_s=float(completion_s.mean()) if len(completion_s) else math.nan,
            p50_completion_s=float(p50),
            p99_completion_s=float(p99),
            peak_running=peak,
            tail_share=self._tail_share(peak, duration_s),
        )

    def _finished(self, event: Finished) -> None:
        cached = self._first_cached.pop(event.row, event.cached_tokens)
        self._set_running(event.row, event.t_s, False)
        if event.status_code != 200:
            self._failed += 1
            return
        self._answered += 1
        self._completion_s.append(event.t_s)
        self._reasons.update(event.finish_reasons)
        self._prompt += event.prompt_tokens
        self._reused += min(cached, event.prompt_tokens)
        self._output += event.output_tokens

    def _set_running(self, row: int, t_s: float, runs: bool) -> None:
        if (row in self._running) == runs:
            return
        if runs:
            self._running.add(row)
        else:
            self._running.discard(row)
        self._change_s.append(t_s)
        self._change_to.append(len(self._running))

    def _tail_share(self, peak: int, duration_s: float) -> float:
        """The time after the last moment with at least half of the peak running."""
        busy = np.flatnonzero(np.array(self._change_to) * 2 >= peak)
        if duration_s <= 0 or not len(busy) or busy[-1] + 1 == len(self._change_s):
            return 0.0
        return (self._last_s - float(self._change_s[busy[-1] + 1])) / duration_s


class Estimates(Protocol):
    """What the time left is computed from; ``plait.lengths.Lengths`` is one."""

    @property
    def expected(self) -> F64:
        """Expected output tokens of each row, float64 [n]."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a display shows at one moment."""

    t_s: float
    elapsed_s: float
    """Since the start of the run: the engine is loaded then."""
    done: int
    total: int
    running: int
    waiting: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float
    """Of the prompt tokens so far, those that were reused."""
    kv_tokens: int
    """KV tokens held, as the engine last said; 0 where it does not."""
    oldest_row: int | None
    oldest_s: float
    """The request that has been running longest, and for how long."""
    eta_s: float
    """Seconds left; nan before anything can be said."""


class LiveStats:
    """Rates, the oldest request and the time left of a run.

    Where the engine shows its steps, the time left is ``StepsLeft``'s. Elsewhere it is (prompt tokens to compute x
    seconds per one) + (output tokens to come x seconds per one), both rates fitted to the run so far (least squares
    over its pieces, prompt and output apart), corrected by how the fit compares with the time that has really passed.
    """

    def __init__(
        self,
        prompt_tokens: I64,
        estimates: Estimates,
        new_prompt_tokens: I64 | None = None,
        start_s: float = 0.0,
        steps_left: StepsLeft | None = None,
    ) -> None:
        """``prompt_tokens``: int64 [n]. ``new_prompt_tokens``: those a depth-first order has to compute, int64 [n];
        without it, the share computed so far is taken for the rest too. ``start_s``: the engine's clock at first."""
        self._prompt = prompt_tokens
        self._new_prompt = new_prompt_tokens
        self._estimates = estimates
        n = len(prompt_tokens)
        self._done = np.zeros(n, np.bool_)
        self._output = np.zeros(n, np.int64)  # generated so far
        self._started_s: dict[int, float] = {}
        self._prefilled = np.zeros(n, np.bool_)
        self._prompt_seen = self._cached = 0
        self._computed = self._generated = 0.0
        self._kv_tokens = 0
        self._fit = Rates((1.0, OUTPUT_COST), COST_GUESS_S)
        self._rates = [0.0, 0.0]
        self._steps_left, self._start_s = steps_left, start_s
        self._since_s, self._since = start_s, (0.0, 0.0)
        self._beat: Beat | None = None

    def sent(self, row: int, now_s: float) -> None:
        """A row was submitted."""
        self._started_s.setdefault(row, now_s)

    def event(self, event: Event) -> None:
        """Take one event in."""
        if self._steps_left is not None:
            self._steps_left.event(event)
        match event:
            case Started():
                self._start(event.row, event.t_s, event.cached_tokens)
            case Progress():
                self._grow(event.row, event.output_tokens)
            case Preempted():
                self._started_s.pop(event.row, None)
            case Finished():
                if not self._prefilled[event.row] and event.status_code == 200:
                    self._start(event.row, event.t_s, event.cached_tokens)
                self._grow(event.row, event.output_tokens)
                self._end(event.row)
            case Failed():
                self._end(event.row)
            case Step():
                self._kv_tokens = event.kv_tokens

    def beat(self, now_s: float, running: int, waiting: int) -> Beat:
        """The moment's figures; call it about once a second. Two that ask at one moment get the same."""
        if self._beat is None or self._beat.t_s != now_s:
            self._beat = self._at(now_s, running, waiting)
        return self._beat

    def longest_s(self) -> float | None:
        """Seconds left if each answer went on to its ``max_tokens``; None where the engine shows no steps."""
        return self._eta_s(longest=True) if self._steps_left is not None and self._steps_left.begun else None

    def _at(self, now_s: float, running: int, waiting: int) -> Beat:
        self._observe(now_s)
        oldest = min(self._started_s.items(), key=lambda item: item[1], default=None)
        return Beat(
            t_s=now_s,
            elapsed_s=now_s - self._start_s,
            done=int(np.count_nonzero(self._done)),
            total=len(self._done),
            running=running,
            waiting=waiting,
            prompt_tokens_per_s=self._rates[0],
            output_tokens_per_s=self._rates[1],
            cached_share=self._cached / self._prompt_seen if self._prompt_seen else 0.0,
            kv_tokens=self._kv_tokens,
            oldest_row=oldest[0] if oldest else None,
            oldest_s=now_s - oldest[1] if oldest else 0.0,
            eta_s=self._eta_s(),
        )

    def _start(self, row: int, t_s: float, cached_tokens: int) -> None:
        self._started_s.setdefault(row, t_s)
        if not self._prefilled[row]:
            self._prefilled[row] = True
            self._prompt_seen += int(self._prompt[row])
            self._cached += cached_tokens
        self._computed += max(0, int(self._prompt[row]) - cached_tokens)

    def _grow(self, row: int, output_tokens: int) -> None:
        self._generated += max(0, output_tokens - int(self._output[row]))
        self._output[row] = max(output_tokens, int(self._output[row]))

    def _end(self, row: int) -> None:
        self._done[row] = True
        self._started_s.pop(row, None)

    def _observe(self, now_s: float) -> None:
        """Close a piece of the run: its tokens and its time go into the rates."""
        took_s = now_s - self._since_s
        if took_s < SECONDS_PER_FIT:
            return
        computed, generated = self._computed - self._since[0], self._generated - self._since[1]
        self._fit.add((computed, generated), took_s)
        weight = 1 - math.exp(-took_s / RATE_WINDOW_S)
        for i, tokens in enumerate((computed, generated)):
            self._rates[i] += weight * (tokens / took_s - self._rates[i])
        self._since_s, self._since = now_s, (self._computed, self._generated)

    def _eta_s(self, longest: bool = False) -> float:
        rest = ~self._done
        if not rest.any():
            return 0.0
        unfilled = rest & ~self._prefilled
        if self._new_prompt is not None:
            prompt = float(self._new_prompt[unfilled].sum())
        else:
            share = self._computed / self._prompt_seen if self._prompt_seen else 1.0
            prompt = float(self._prompt[unfilled].sum()) * min(share, 1.0)
        if self._steps_left is not None and self._steps_left.begun:
            running = np.fromiter(self._started_s, np.int64, len(self._started_s))
            rest[running] = False
            return self._steps_left.seconds(running, np.flatnonzero(rest), prompt, longest)
        output = float(np.maximum(self._estimates.expected[rest] - self._output[rest], 1.0).sum())
        return self._fit.seconds((prompt, output))
