"""Shared prefixes in the scheduler's picture of the KV cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.events import Capacity, Finished, Preempted, Started
from plait.lengths import Lengths
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.scheduling.state import CACHED, COLD, COMPUTING
from plait.table import RequestTable
from plait.tree.build import tree_from_groups
from tests.simulation import STEP_TIME


def three_of_a_group(capacity: Capacity) -> Scheduler:
    """Three requests of 150 tokens that share 100; a fourth shares nothing."""
    table = RequestTable.of(np.full(4, 150))
    tree = tree_from_groups(table.prompt_tokens, np.array([0, 0, 0, -1]), np.full(4, 100))
    lengths = Lengths.known(table, np.full(4, 10))
    return Scheduler(View(table, tree, lengths.expected, capacity, STEP_TIME), lengths, "fcfs")


def test_a_prefix_whose_computing_request_is_preempted_is_computed_by_another_that_waits_for_it() -> None:
    scheduler = three_of_a_group(Capacity(10_000))
    assert scheduler.decide(0.0).admit.tolist() == [0, 1, 2, 3]
    rows, nodes = scheduler.state.rows, scheduler.state.nodes
    assert rows["need"].tolist() == [150, 50, 50, 150] and nodes["owner"][1] == 0
    backlog = int(scheduler.state.c["backlog"])
    scheduler.update(Preempted(0, 0.1, requeue=True))
    assert nodes["state"][1] == COMPUTING and nodes["owner"][1] == 1, "nobody has computed it yet"
    assert rows["need"][1] == 150 and rows["need"][2] == 50
    assert scheduler.state.c["backlog"] == backlog - 50
    scheduler.update(Started(1, 0.2))
    assert nodes["state"][1] == CACHED
    scheduler.update(Finished(1, 0.3, 200, b"{}", output_tokens=10))
    assert scheduler.decide(0.3).admit.tolist() == [0]
    assert rows["need"][0] == 50, "its return finds the prefix"


def test_engines_that_look_prefixes_up_at_submission_are_not_sent_more_of_the_group_meanwhile() -> None:
    scheduler = three_of_a_group(replace(Capacity(10_000), max_num_seqs=4))
    scheduler.decide(0.0)
    scheduler.state.scalars["gate"] = 1
    scheduler.update(Preempted(0, 0.1, requeue=True))
    assert scheduler.decide(0.2).admit.tolist() == []
    scheduler.update(Finished(3, 0.2, 200, b"{}", output_tokens=10))
    assert scheduler.decide(0.2).admit.tolist() == [], "the prefix is being computed"
    scheduler.update(Started(1, 0.3))
    assert scheduler.decide(0.4).admit.tolist() == [0]


def test_a_prefix_nobody_else_needs_vanishes_with_its_computing_request() -> None:
    scheduler = three_of_a_group(Capacity(10_000, 1, 1))
    assert scheduler.decide(0.0).admit.tolist() == [0]
    scheduler.update(Preempted(0, 0.1, requeue=True))
    assert scheduler.state.nodes["state"][1] == COLD and scheduler.state.c["kv_nodes"] == 0


def test_a_prefix_that_another_request_decodes_with_is_there_whoever_was_to_compute_it() -> None:
    scheduler = three_of_a_group(Capacity(10_000))
    scheduler.decide(0.0)
    scheduler.update(Started(1, 0.1))
    scheduler.update(Started(2, 0.1))
    scheduler.update(Preempted(0, 0.2, requeue=True))
    assert scheduler.state.nodes["state"][1] == CACHED


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_no_kv_is_left_when_all_who_shared_a_prefix_have_gone(order: list[int]) -> None:
    scheduler = three_of_a_group(Capacity(10_000, 1, 2))
    scheduler.decide(0.0)
    for row in order:
        scheduler.update(Preempted(row, 0.1, requeue=True))
    c = scheduler.state.c
    assert c["kv_private"] == 0 and c["kv_nodes"] == c["kv_evictable"] and c["backlog"] == 0
