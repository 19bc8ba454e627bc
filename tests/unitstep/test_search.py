"""Search over schedules: the beam, annealing, and the clock they are given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from tests.unitstep.test_kernel import Backlog, backlogs, usage

from plait.unitstep.beam import WORTH, Beam
from plait.unitstep.kernel import total_completion
from plait.unitstep.orders import starts_of
from plait.unitstep.search import ANNEALED_ROWS, anneal, improve


def asked(times: int) -> Callable[[], bool]:
    left = iter(range(times))
    return lambda: next(left, None) is not None


@settings(max_examples=60, deadline=None)
@given(backlogs(most=40))
def test_a_beam_finds_a_schedule_within_the_budget_and_knows_its_total(backlog: Backlog) -> None:
    s, o, budget = backlog
    beam = Beam(s, o, budget, 4, 3, 0.4, 7)
    rounds = 0
    while not beam.advance(1):
        rounds += 1
    starts = beam.best_starts()
    assert np.min(starts) >= 0
    assert np.max(usage(s, o, starts)) <= budget
    assert rounds == -(-len(s) // 8) - 1
    assert abs(total_completion(starts, o) - beam._now.totals[0, WORTH]) < 1e-6 * (1 + total_completion(starts, o))


@settings(max_examples=60, deadline=None)
@given(backlogs(most=40))
def test_annealing_never_ends_worse_than_it_began(backlog: Backlog) -> None:
    s, o, budget = backlog
    before = starts_of("fcfs", s, o, budget)
    after = anneal(s, o, before, budget, asked(3))
    assert np.max(usage(s, o, after)) <= budget
    assert np.sum(after) <= np.sum(before)


def test_search_stops_when_told_and_improves_a_hard_backlog() -> None:
    generator = np.random.default_rng(1)
    for n in (80, ANNEALED_ROWS + 1):
        s, o = generator.integers(1, 400, n), generator.integers(1, 200, n)
        before = starts_of("latency", s, o, 1200)
        left = iter(range(60))
        after = improve(s, o, before, 1200, lambda left=left: next(left, None) is not None)  # type: ignore[misc]
        assert np.max(usage(s, o, after)) <= 1200
        assert np.sum(after) < np.sum(before)
        assert next(left, None) is None


def test_a_clock_that_has_run_out_leaves_the_first_list() -> None:
    generator = np.random.default_rng(1)
    s, o = generator.integers(1, 400, 80), generator.integers(1, 200, 80)
    assert np.array_equal(starts_of("latency", s, o, 1200, asked(0)), starts_of("dispersed", s, o, 1200))
