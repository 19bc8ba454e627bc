"""The live queue's order: exactly once, in the order of the goal, nobody starved."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.waiting import AGEING, OUTPUT_WORK, SLACK_POPS, OutputLengths, Waiting, WaitingOrder


def waiting(key: object, tokens: list[int], max_tokens: int = 1 << 30, priority: int = 0) -> Waiting:
    return Waiting(key, np.array(tokens, ">i4").tobytes(), max_tokens, priority)


def drain(order: WaitingOrder) -> list[object]:
    return [order.pop().key for _ in range(len(order))]


def test_throughput_takes_prefix_groups_one_after_the_other() -> None:
    rows = [(group, leaf) for group in range(20) for leaf in range(10)]
    random.Random(1).shuffle(rows)
    order = WaitingOrder("throughput")
    for group, leaf in rows:
        order.add(waiting((group, leaf), [group * 1000, 5, leaf]))
    assert drain(order) == sorted(rows)


def test_throughput_goes_on_where_it_was_when_requests_arrive() -> None:
    order = WaitingOrder("throughput")
    for first in (1, 2, 3):
        order.add(waiting(first, [first]))
    assert order.pop().key == 1
    order.add(waiting("again 1", [1, 1]))
    order.add(waiting(0, [0]))
    assert drain(order) == ["again 1", 2, 3, 0]


@given(st.integers(0, 10**6))
def test_under_an_endless_stream_of_a_favourite_prefix_nobody_starves(seed: int) -> None:
    dice = random.Random(seed)
    order = WaitingOrder("throughput")
    for row in range(dice.randrange(50)):
        order.add(waiting(("before", row), [dice.randrange(5)]))
    ahead = len(order)
    order.add(waiting("victim", [9]))
    order._cursor = (b"", -1)
    for step in range(3 * ahead + 2 * SLACK_POPS):
        order.add(waiting(("favourite", step), [0, step]))
        order._cursor = (waiting(0, [0, step]).tokens[:4], -1)
        if order.pop().key == "victim":
            break
    else:
        pytest.fail("the victim was never taken")


def test_latency_takes_the_least_work_first_and_learns_lengths_by_prefix() -> None:
    lengths = OutputLengths()
    order = WaitingOrder("latency", lengths)
    long, short = waiting(0, [7] * 70), waiting(1, [8] * 70)
    for _ in range(20):
        lengths.observe(long.group, 500)
        lengths.observe(short.group, 5)
    order.add(long)
    order.add(short)
    order.add(waiting(2, [7] * 70, max_tokens=1))
    assert drain(order) == [2, 1, 0]


def test_latency_lets_only_arrivals_within_its_own_work_over_ageing_overtake() -> None:
    order = WaitingOrder("latency")
    big = waiting("big", [1] * 1000, max_tokens=100)
    order.add(big)
    overtaken = 0.0
    for step in range(100_000):
        small = waiting(step, [2], max_tokens=1)
        order.add(small)
        taken = order.pop()
        if taken is big:
            break
        overtaken += 1 + OUTPUT_WORK
    assert 0 < overtaken <= (1000 + OUTPUT_WORK * 100) / AGEING + 10


def test_lower_priority_numbers_always_come_first() -> None:
    for goal in ("throughput", "latency"):
        order = WaitingOrder(goal)
        for row in range(30):
            order.add(waiting(row, [row % 3], priority=row % 4))
        priorities = [order.pop().priority for _ in range(30)]
        assert priorities == sorted(priorities)


def test_what_is_put_back_comes_first() -> None:
    order = WaitingOrder("throughput")
    for row in range(3):
        order.add(waiting(row, [row]))
    first, second = order.pop(), order.pop()
    order.put_back(second)
    order.put_back(first)
    assert drain(order) == [0, 1, 2]


@given(
    goal=st.sampled_from(["throughput", "latency"]),
    steps=st.lists(st.tuples(st.sampled_from("aapprb"), st.integers(0, 4), st.integers(0, 2)), max_size=150),
)
def test_under_any_history_each_request_is_taken_or_removed_once_and_peek_agrees_with_pop(
    goal: str, steps: list[tuple[str, int, int]]
) -> None:
    order = WaitingOrder(goal)
    inside: dict[object, Waiting] = {}
    outside: list[Waiting] = []
    for serial, (kind, token, priority) in enumerate(steps):
        if kind == "a":
            item = waiting(serial, [token, serial % 3], priority=priority)
            order.add(item)
            inside[serial] = item
        elif kind == "p" and inside:
            expected = order.peek()
            taken = order.pop()
            assert taken is expected and inside.pop(taken.key) is taken
            outside.append(taken)
        elif kind == "r" and inside:
            key = max(inside, key=str)
            del inside[key]
            assert order.remove(key) and not order.remove(key)
        elif kind == "b" and outside:
            item = outside.pop()
            order.put_back(item)
            inside[item.key] = item
        assert len(order) == len(inside) and {item.key for item in order.in_order()} == set(inside)
    assert set(drain(order)) == set(inside)
