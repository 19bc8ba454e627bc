"""The blend's plan: sides on an overlapped engine, primed depth-first on a sequential one."""

from __future__ import annotations

import numpy as np
import pytest

from plait.events import Capacity
from plait.model.steptime import paper_a100_8b
from plait.policy.base import View
from plait.policy.blend import blend, depth_first_long_first, running_below, work
from plait.policy.units import shuffled_depth_first, shuffled_units, split_units
from plait.table import RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree
from tests.simulation import small_job


def test_compute_heavy_rows_go_left_and_memory_heavy_rows_right() -> None:
    table = RequestTable.of([3000, 20, 3000, 20])
    tree = tree_from_groups(table.prompt_tokens, np.full(4, -1), np.zeros(4, np.int64))
    order = blend(View(table, tree, np.array([5.0, 9000.0, 5.0, 9000.0]), Capacity(400_000), paper_a100_8b()))
    assert order.kernel == "blend" and order.right is not None
    assert sorted(order.rows.tolist()) == [0, 2] and sorted(order.right.tolist()) == [1, 3]


def test_a_sequential_engine_gets_every_row_once_with_groups_together() -> None:
    job = small_job(1, 60, 4)
    view = View(job.table, job.tree, np.full(60, 10.0), Capacity(4000), paper_a100_8b("sequential"))
    order = blend(view)
    assert order.kernel == "queue" and order.right is None
    assert sorted(order.rows.tolist()) == list(range(60))
    nodes = job.tree.node_of[order.rows]
    assert np.count_nonzero(np.diff(nodes[nodes > 0])) < job.tree.n_nodes


def test_long_outputs_come_first_in_a_depth_first_order() -> None:
    job = small_job(2, 40)
    expected = np.arange(40, dtype=np.float64)
    assert depth_first_long_first(job.tree, expected)[0] == 39


def test_lone_requests_of_equal_length_keep_their_order() -> None:
    assert depth_first_long_first(PrefixTree.without_sharing(5), np.full(5, 7.0)).tolist() == [0, 1, 2, 3, 4]
    prompt = np.full(6, 100)
    mixed = tree_from_groups(prompt, np.array([-1, 0, 0, -1, 0, -1]), np.array([0, 80, 80, 0, 80, 0]))
    assert depth_first_long_first(mixed, np.full(6, 7.0)).tolist() == [0, 3, 5, 1, 2, 4]


def test_shares_of_a_prefix_add_up_to_computing_it_once() -> None:
    table = RequestTable.of([110, 120, 130])
    tree = tree_from_groups(table.prompt_tokens, np.zeros(3, np.int64), np.full(3, 100))
    _, _, tokens = work(View(table, tree, np.ones(3), Capacity(1000), paper_a100_8b()))
    assert np.isclose(tokens.sum(), 100 + 10 + 20 + 30)


def test_a_short_system_prompt_is_opened_and_a_long_group_prefix_is_not() -> None:
    prompt = np.full(200, 1000)
    tree = tree_from_groups(prompt, np.arange(200) // 50, np.full(200, 900))
    unit = split_units(tree, 0.995)
    assert len(np.unique(unit)) == 4
    assert len(np.unique(split_units(tree_from_groups(prompt, np.zeros(200, np.int64), np.full(200, 4)), 0.0))) == 200


def test_a_prefix_of_which_many_rows_run_at_a_time_is_opened_as_it_stays_in_the_cache() -> None:
    tree = tree_from_groups(np.full(200, 1000), np.arange(200) // 50, np.full(200, 900))
    for running, units in ((0.5, 4), (20.0, 200)):
        assert len(np.unique(split_units(tree, 0.995, np.full(tree.n_nodes, running)))) == units


def test_rows_that_run_at_a_time_follow_from_the_steps_of_the_job() -> None:
    table = RequestTable.of([100] * 8)
    tree = tree_from_groups(table.prompt_tokens, np.array([0] * 6 + [-1] * 2), np.array([50] * 6 + [0] * 2))
    output = np.full(8, 40.0)

    def found(limit: Capacity) -> list[float]:
        return sorted(set(running_below(View(table, tree, output, limit, paper_a100_8b())).tolist()))

    steps = 8 * (100 * 40 + 40 * 40 / 2) / 600
    assert found(Capacity(600)) == pytest.approx([6 * 40 / steps, 8 * 40 / steps])
    assert found(Capacity(10**9, max_num_seqs=2)) == pytest.approx([2 * 6 / 8, 2.0])
    assert found(Capacity(0)) == [0.0]


def test_a_shuffled_depth_first_order_keeps_every_subtree_together() -> None:
    job = small_job(5, 100, 6)
    rows = shuffled_depth_first(job.tree, 3)
    assert sorted(rows.tolist()) == list(range(100))
    place = np.empty(100, np.int64)
    place[rows] = np.arange(100)
    for v in range(1, job.tree.n_nodes):
        below = place[job.tree.dfs_rows[job.tree.row_begin[v] : job.tree.row_end[v]]]
        assert below.max() - below.min() == len(below) - 1


def test_shuffled_units_spread_an_application_and_keep_groups_together() -> None:
    n = 2000  # one half begins with a system prompt of eight tokens, a quarter with a prefix of 500
    group = np.where(np.arange(n) < n // 2, 0, np.where(np.arange(n) < 3 * n // 4, 1, -1))
    tree = tree_from_groups(np.full(n, 1000), group, np.where(group == 0, 8, 500))
    unit = split_units(tree, 0.95)
    rows = shuffled_units(tree, unit, 0)
    assert sorted(rows.tolist()) == list(range(n))
    place = np.empty(n, np.int64)
    place[rows] = np.arange(n)
    together, apart = place[group == 1], np.sort(place[group == 0])
    assert together.max() - together.min() == len(together) - 1
    assert np.diff(apart).max() <= len(together) + 30 and apart[0] < 30 + len(together)
