"""Latency orders in the simulator under real step costs."""

from __future__ import annotations

import numpy as np
import pytest

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import paper_a100_8b
from plait.policy.base import View, order_function
from plait.policy.latency import AGEING, machine_time_s, private_prompt_tokens
from plait.simulate import simulate
from plait.table import RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree

NAMES = ("mc-sf", "mc-sf-skip", "size", "area", "latency")


def view_of(s: list[int], o: list[int]) -> View:
    return View(
        RequestTable.of(s), PrefixTree.without_sharing(len(s)), np.array(o, float), Capacity(1000), paper_a100_8b()
    )


def test_each_order_ranks_by_its_own_measure() -> None:
    view = view_of([90, 10, 1], [2, 20, 60])
    heads = {name: order_function(name)(view).rows.tolist() for name in NAMES}
    assert heads["mc-sf"] == heads["mc-sf-skip"] == [0, 1, 2]
    assert heads["size"] == [1, 2, 0]
    assert heads["area"] == [0, 1, 2]


def test_a_cached_prefix_does_not_count() -> None:
    table = RequestTable.of([100, 100, 40])
    tree = tree_from_groups(table.prompt_tokens, np.array([0, 0, -1]), np.array([80, 80, 0]))
    view = View(table, tree, np.full(3, 10.0), Capacity(1000), paper_a100_8b())
    assert private_prompt_tokens(view).tolist() == [20, 20, 40]
    assert order_function("latency")(view).rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_every_order_finishes_a_mixed_backlog(name: str) -> None:
    generator = np.random.default_rng(0)
    s, o = generator.integers(1, 400, 200), generator.integers(1, 200, 200)
    table, tree = RequestTable.of(s), PrefixTree.without_sharing(200)
    result = simulate(table, tree, o, Lengths.known(table, o), Capacity(3000), paper_a100_8b("sequential"), name)
    assert np.all(np.isfinite(result.finish_s))


def test_a_request_is_passed_only_by_those_that_arrive_soon_after_it() -> None:
    s = [400] + [10] * 50
    arrival = [0.0, *range(0, 500, 10)]
    table = RequestTable.of(s, arrival_s=arrival)
    view = View(table, PrefixTree.without_sharing(51), np.full(51, 200.0), Capacity(1000), paper_a100_8b())
    place = order_function("latency")(view).rows.tolist().index(0)
    lead_s = (machine_time_s(view)[0] - machine_time_s(view)[1]) / AGEING
    assert 0 < place <= lead_s / 10 + 1 < 50


def test_known_lengths_are_hardly_ever_preempted() -> None:
    generator = np.random.default_rng(0)
    s, o = generator.integers(1, 400, 300), generator.integers(1, 200, 300)
    table, tree = RequestTable.of(s), PrefixTree.without_sharing(300)
    capacity = Capacity(3000, max_batched_tokens=512, takes_prefill_budget=True)
    for name in NAMES:
        result = simulate(table, tree, o, Lengths.known(table, o), capacity, paper_a100_8b("sequential"), name)
        assert result.preemptions <= 0.01 * table.n
