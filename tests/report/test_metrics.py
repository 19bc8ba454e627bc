"""Numbers of a run from its events."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.drive import drive
from plait.events import EngineRequest, Event, Failed, Finished, Preempted, Progress, Started, Step
from plait.report.metrics import LiveStats, Summary
from plait.table import F64
from plait.testing import FakeEngine
from tests.builders import Fifo


def summary_of(events: list[Event]) -> Summary:
    summary = Summary()
    for event in events:
        summary.event(event)
    return summary


def finished(row: int, t_s: float, cached: int = 0, reason: str = "stop") -> Finished:
    return Finished(row, t_s, 200, b"{}", 100, cached, 10, (reason,))


def test_totals_count_answers_failures_and_truncations() -> None:
    events: list[Event] = [
        finished(0, 1.0),
        finished(1, 2.0, 40, "length"),
        Failed(2, 3.0, "x", "x"),
        Finished(3, 4.0, 400, b"{}"),
    ]
    numbers = summary_of(events).numbers()
    assert (numbers.answered, numbers.failed, numbers.truncated) == (2, 2, 1)
    assert numbers.finish_reasons == {"stop": 1, "length": 1}
    assert (numbers.prompt_tokens, numbers.reused_prompt_tokens, numbers.computed_prompt_tokens) == (200, 40, 160)
    assert numbers.tokens_per_s == pytest.approx(220 / 4.0) and numbers.mean_completion_s == 1.5


def test_recomputing_after_a_preemption_is_not_reuse() -> None:
    events: list[Event] = [
        Started(0, 1.0, cached_tokens=10),
        Preempted(0, 2.0, lost_tokens=95),
        Started(0, 3.0, cached_tokens=96),
        finished(0, 4.0, cached=96),
    ]
    numbers = summary_of(events).numbers()
    assert (numbers.reused_prompt_tokens, numbers.preemptions, numbers.lost_tokens) == (10, 1, 95)


def test_the_tail_is_the_end_with_less_than_half_of_the_peak_running() -> None:
    events: list[Event] = [Started(row, 0.0) for row in range(4)]
    events += [finished(0, 5.0), finished(1, 5.5), finished(2, 6.0), finished(3, 10.0)]
    assert summary_of(events).numbers().tail_share == pytest.approx(0.4)


def test_nothing_happened_is_no_error() -> None:
    numbers = Summary().numbers()
    assert numbers.answered == 0 and math.isnan(numbers.mean_completion_s)
    assert numbers.as_dict()["p99_completion_s"] is None


@given(n=st.integers(1, 40), limit=st.integers(1, 8))
def test_figures_add_up_for_any_run(n: int, limit: int) -> None:
    def request(row: int) -> EngineRequest:
        return EngineRequest(row, "/v1/completions", {"prompt": f"{row % 7}"}, np.arange(32, dtype=np.int32), 50)

    summary, engine = Summary(), FakeEngine(cache_block_tokens=8)
    drive(Fifo(n, limit), engine, request, summary.event)
    numbers = summary.numbers()
    assert numbers.answered == n == sum(numbers.finish_reasons.values())
    assert numbers.prompt_tokens == 32 * n == numbers.computed_prompt_tokens + numbers.reused_prompt_tokens
    assert numbers.p50_completion_s <= numbers.p99_completion_s <= numbers.duration_s
    assert 0.0 <= numbers.tail_share <= 1.0 and 1 <= numbers.peak_running <= limit


class Known:
    """True lengths as estimates."""

    def __init__(self, output_tokens: F64) -> None:
        self.expected = output_tokens


def serial_run(
    prompt: F64, output: F64, prompt_s: float, output_s: float
) -> tuple[LiveStats, list[tuple[float, float]]]:
    """One request after another at two fixed rates; (time, time left as shown) after each."""
    stats, now_s, shown = LiveStats(prompt.astype(np.int64), Known(output)), 0.0, []
    for row in range(len(prompt)):
        stats.sent(row, now_s)
        now_s += float(prompt[row]) * prompt_s
        stats.event(Started(row, now_s))
        stats.beat(now_s, 1, len(prompt) - row - 1)
        now_s += float(output[row]) * output_s
        stats.event(Finished(row, now_s, 200, b"{}", int(prompt[row]), 0, int(output[row])))
        shown.append((now_s, stats.beat(now_s, 1, len(prompt) - row - 1).eta_s))
    return stats, shown


@pytest.mark.parametrize("costs", [(0.001, 0.03), (0.01, 0.01), (0.002, 0.004)])
def test_the_time_left_is_right_after_a_tenth_although_the_mix_changes(costs: tuple[float, float]) -> None:
    rng = np.random.default_rng(1)
    prompt = np.concatenate((rng.integers(900, 1100, 50), rng.integers(50, 150, 50))).astype(float)
    output = np.concatenate((rng.integers(50, 80, 50), rng.integers(200, 400, 50))).astype(float)
    _, shown = serial_run(prompt, output, *costs)
    end_s = shown[-1][0]
    for now_s, eta_s in shown[10:]:
        assert eta_s == pytest.approx(end_s - now_s, rel=0.2, abs=1e-6)


def test_the_oldest_running_request_is_named() -> None:
    stats = LiveStats(np.full(3, 10), Known(np.full(3, 5.0)))
    for row in (1, 0):
        stats.sent(row, float(row == 0))
    stats.event(Progress(1, 4.0, 2))
    stats.event(Step(4.0, 0.1, 0, 2, 77))
    beat = stats.beat(5.0, 2, 1)
    assert (beat.oldest_row, beat.oldest_s, beat.kv_tokens, beat.done, beat.total) == (1, 5.0, 77, 0, 3)
    stats.event(Finished(1, 6.0, 200, b"{}", 10, 4, 5))
    assert stats.beat(6.0, 1, 1).oldest_row == 0
    assert stats.beat(7.0, 1, 1).cached_share == 0.4


def test_at_the_end_nothing_is_left_and_at_the_start_nothing_is_known() -> None:
    stats = LiveStats(np.full(2, 10), Known(np.full(2, 5.0)))
    assert math.isnan(stats.beat(0.0, 0, 2).eta_s)
    for row in range(2):
        stats.event(Failed(row, 1.0, "x", "x"))
    assert stats.beat(1.0, 0, 0).eta_s == 0.0
