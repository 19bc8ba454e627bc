"""Latency orders in the simulator under real step costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import paper_a100_8b
from plait.policy.base import View, order_function
from plait.policy.latency import (
    AGEING,
    delay_weight,
    in_batches,
    lost_prefix_tokens,
    machine_time_s,
    private_prompt_tokens,
    started_in_time,
    worth_running,
)
from plait.scheduler import Scheduler
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


def test_a_prefix_group_runs_in_batches_only_where_memory_would_not_keep_its_prefix() -> None:
    """Two groups of 50 prompts that share 400 tokens; in each, every other answer is a little longer."""
    table = RequestTable.of(np.full(100, 420))
    group = np.arange(100) % 2
    tree = tree_from_groups(table.prompt_tokens, group, np.full(100, 400))
    output = (20 + np.arange(100) // 2 % 2).astype(np.float64)
    small = View(table, tree, output, Capacity(2000), paper_a100_8b())
    large = dataclasses.replace(small, capacity=Capacity(100_000))
    key = machine_time_s(small)
    assert in_batches(key, large, lost_prefix_tokens(large)) is key
    batched = in_batches(key, small, lost_prefix_tokens(small))
    switches = int((np.diff(group[np.lexsort((group, batched))]) != 0).sum())
    assert switches == 1
    prefixes_s = 2 * 400 * small.step_time.gemm_s_per_token
    assert batched.sum() == pytest.approx(key.sum() + prefixes_s)


def test_long_answers_stay_in_their_group_and_go_last_there_where_memory_would_not_keep_its_prefix() -> None:
    """Eight groups of four prompts, one answer of each long; one long request on its own."""
    group = np.append(np.arange(32) % 8, -1)
    long = np.append(np.arange(32) // 8 == 1, True)
    shared = np.where(group < 0, 0, 700 + 20 * group)
    table = RequestTable.of(shared + 100)
    tree = tree_from_groups(table.prompt_tokens, group, shared)
    view = View(table, tree, np.where(long, 96.0, 4.0), Capacity(4000), paper_a100_8b())
    assert (lost_prefix_tokens(view) > 0).tolist() == (group >= 0).tolist()
    batched = in_batches(machine_time_s(view), view, lost_prefix_tokens(view))
    assert (started_in_time(batched, view) < batched)[1:32].any(), "some would be pulled forward without their group"
    order = order_function("latency")(view).rows
    assert order.tolist().index(32) < 8 and batched[32] == batched.max(), "alone, it costs the same whenever it runs"
    grouped = order[order != 32]
    assert long[grouped].reshape(8, 4).tolist() == [[False, False, False, True]] * 8
    assert (np.diff(group[grouped]) != 0).sum() == 7


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=40))
def test_batches_of_one_group_never_get_cheaper_than_their_rows_and_pay_a_prefix_each(
    rows: list[tuple[int, int, int]],
) -> None:
    group, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    table = RequestTable.of(prompt + 100)
    tree = tree_from_groups(table.prompt_tokens, group, np.full(len(rows), 100))
    view = View(table, tree, output.astype(float), Capacity(500), paper_a100_8b())
    key = machine_time_s(view)
    batched = in_batches(key, view, lost_prefix_tokens(view))
    assert batched.sum() >= key.sum() * (1 - 1e-9)
    assert np.bincount(group, batched - key).min() >= -1e-9 * key.sum()
    alone = np.bincount(group)[group] == 1
    assert batched[alone] == pytest.approx(key[alone])


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


def test_requests_that_an_engine_only_queues_make_no_long_answer_urgent() -> None:
    """llama.cpp with four slots is handed 64 requests, and ends the long ones in time though they come last."""
    s, o = [60] * 96, [96] * 24 + [8] * 72
    table, capacity = RequestTable.of(s, max_tokens=o), Capacity(1 << 40, max_num_seqs=4, queued_seqs=60)
    view = View(table, PrefixTree.without_sharing(96), np.array(o, float), capacity, paper_a100_8b("sequential"))
    handed_over = Scheduler(view, Lengths.known(table, np.array(o)), "latency").decide(0.0).admit
    assert len(handed_over) == 64 and handed_over.min() >= 24


def test_an_answer_that_would_outlast_all_others_starts_before_its_turn() -> None:
    s = [*range(10, 510)]
    view = view_of([*s, 10], [50] * 500 + [2000])
    assert 100 < order_function("latency")(view).rows.tolist().index(500) < 480
    assert np.array_equal(np.delete(order_function("latency")(view).rows[:300], 0)[:50], np.arange(1, 51))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=40))
def test_only_long_answers_are_pulled_forward_and_the_rest_keep_their_order(rows: list[tuple[int, int]]) -> None:
    view = view_of([s for s, _ in rows], [o for _, o in rows])
    key = machine_time_s(view)
    moved = started_in_time(key, view)
    stay = moved == key
    assert np.all(moved <= key) and moved.min() > 0
    order = np.argsort(moved, kind="stable")
    assert np.all(np.diff(key[order][stay[order]]) >= 0)


def test_a_backlog_with_a_few_huge_answers_takes_hardly_longer_than_its_longest_first() -> None:
    generator = np.random.default_rng(0)
    o = np.concatenate((generator.integers(5, 60, 300), [500, 600, 700]))
    s = generator.integers(5, 100, 303)
    table, tree = RequestTable.of(s, o), PrefixTree.without_sharing(303)
    capacity = Capacity(3000, max_num_seqs=32, max_batched_tokens=512)
    machine = paper_a100_8b("sequential")
    took = {
        name: simulate(table, tree, o, Lengths.known(table, o), capacity, machine, name)
        for name in ("latency", "area", "blend")
    }
    assert took["latency"].makespan_s <= 1.1 * took["blend"].makespan_s < took["area"].makespan_s
    assert took["latency"].finish_s.mean() <= 1.15 * took["area"].finish_s.mean()


def test_running_more_costs_nothing_where_answers_are_as_spread_as_exponential_ones() -> None:
    view = view_of([1] * 50, [200] * 50)
    spread = dataclasses.replace(view, expected_square=2.0 * view.expected_output_tokens**2)
    assert delay_weight(view) == pytest.approx(1.0) and 1 < worth_running(view) < 1000
    assert delay_weight(spread) == pytest.approx(0.0, abs=1e-6)
    prefill = view_of([3000] * 50, [200] * 50)
    spread = dataclasses.replace(prefill, expected_square=2.0 * prefill.expected_output_tokens**2)
    assert delay_weight(prefill) == 1.0 and 0.5 < delay_weight(spread) <= 1.0
    assert worth_running(prefill) < worth_running(view)


def test_it_pays_to_run_a_number_that_grows_with_the_root_of_the_job() -> None:
    few, many = view_of([100] * 25, [200] * 25), view_of([100] * 100, [200] * 100)
    assert worth_running(many) == pytest.approx(2 * worth_running(few))


def test_memory_that_never_binds_does_not_send_every_long_answer_first() -> None:
    generator = np.random.default_rng(0)
    o = np.rint(generator.lognormal(7, 1, 1000)) + 1
    view = View(
        RequestTable.of(np.full(1000, 200)),
        PrefixTree.without_sharing(1000),
        o,
        Capacity(int(o.sum()) + 200_000),
        paper_a100_8b("sequential"),
    )
    key = machine_time_s(view)
    assert 0 < (started_in_time(key, view) < key).mean() < 0.5
