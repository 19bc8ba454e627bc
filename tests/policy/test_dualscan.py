"""Dual scan: the paper's worked example and its rules."""

from __future__ import annotations

import numpy as np
import pytest

from plait.events import Capacity, Progress, Started
from plait.lengths import Lengths
from plait.model.steptime import paper_a100_8b
from plait.policy.base import View
from plait.policy.dualscan import dual_scan
from plait.scheduler import Scheduler
from plait.scheduling.dualscan import footprint, left_share, prefill_share
from plait.table import RequestTable
from plait.tree.prefix import PrefixTree
from tests.simulation import small_job


def test_the_worked_example_of_the_paper() -> None:
    left = 60.0 * left_share(3.73, 0.096, 1.27)
    assert left == pytest.approx(19.3, abs=0.15) and 60.0 - left == pytest.approx(40.7, abs=0.15)


def test_shares_are_clipped_and_equal_cursors_get_half_each() -> None:
    assert left_share(2.0, 2.0, 1.0) == 0.5
    assert left_share(3.0, 2.0, 1.0) == 0.0 and left_share(0.9, 0.1, 1.0) == 1.0


def mixed(n: int = 40) -> tuple[Scheduler, np.ndarray]:
    """Half prompts of 1000 with 4 tokens of answer, half prompts of 10 with 2000; lengths known."""
    output = np.where(np.arange(n) % 2 == 0, 4, 2000)
    table = RequestTable.of(np.where(np.arange(n) % 2 == 0, 1000, 10))
    lengths = Lengths.known(table, output)
    view = View(table, PrefixTree.without_sharing(n), lengths.expected, Capacity(12_000), paper_a100_8b())
    return Scheduler(view, lengths, "dual-scan"), output


def test_both_ends_are_admitted_within_their_shares() -> None:
    scheduler, output = mixed()
    admitted = scheduler.decide(0.0).admit
    assert {4, 2000} == set(output[admitted].tolist())
    c = scheduler.state.c
    assert c["held_left"] + c["held_right"] <= 12_000 + 1002  # an idle engine takes its first row whatever the share
    sides = scheduler.state.rows["side"][admitted]
    assert np.all((output[admitted] == 2000) == (sides == 1))


def test_budgets_follow_n_and_c_of_the_paper() -> None:
    scheduler, _ = mixed()
    c = scheduler.state.c
    assert footprint(c, 0) == 1002 and footprint(c, 1) == 1010
    assert prefill_share(c, 0, 10_020.0) == pytest.approx(10 * 1000 / 4)


def test_a_row_that_outgrows_its_estimate_counts_on_the_right() -> None:
    scheduler, output = mixed()
    admitted = scheduler.decide(0.0).admit
    row = int(admitted[output[admitted] == 4][0])
    scheduler.update(Started(row, 0.1))
    scheduler.update(Progress(row, 0.2, 6000))
    scheduler.state.c["checked_step"] = -1000
    held = int(scheduler.state.c["held_right"])
    scheduler.decide(0.3)
    assert scheduler.state.rows["side"][row] == 1 and scheduler.state.c["held_right"] >= held + 7000


def test_the_right_cursor_reads_the_order_backwards() -> None:
    job = small_job(4, 50, 3)
    view = View(job.table, job.tree, job.output_tokens.astype(float), Capacity(4000), paper_a100_8b())
    order = dual_scan(view)
    assert order.right is not None and np.array_equal(order.rows[::-1], order.right)
    assert sorted(order.rows.tolist()) == list(range(50))
