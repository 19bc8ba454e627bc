"""The order of a live server's waiting queue: nothing lost, peek and pop agree, nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.waiting import AGEING, GOALS, SLACK_POPS, OutputLengths, Waiting, WaitingOrder


def item(key: object, tokens: Sequence[int] = (1, 2, 3), max_tokens: int = 8, priority: int = 0) -> Waiting:
    return Waiting(key, np.asarray(tokens, ">i4").tobytes(), max_tokens, priority)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "pop", "remove", "put_back", "again"]),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
        st.integers(1, 50),
        st.integers(0, 2),
    ),
    max_size=80,
)


@pytest.mark.parametrize("goal", GOALS)
@given(actions=ACTIONS)
def test_whatever_happens_each_request_waits_once_and_pop_takes_what_peek_showed(
    goal: str, actions: list[tuple[str, list[int], int, int]]
) -> None:
    order = WaitingOrder(goal)
    waiting: set[object] = set()
    taken: list[Waiting] = []
    for serial, (action, tokens, max_tokens, priority) in enumerate(actions):
        if action == "add":
            order.add(item(serial, tokens, max_tokens, priority))
            waiting.add(serial)
        elif action == "pop" and waiting:
            shown = order.peek()
            taken.append(order.pop())
            assert taken[-1] is shown
            waiting.remove(shown.key)
        elif action == "remove":
            assert order.remove(serial // 2) == (serial // 2 in waiting)
            waiting.discard(serial // 2)
        elif action in ("put_back", "again") and taken:
            back = taken.pop()
            (order.put_back if action == "put_back" else order.add_again)(back)
            waiting.add(back.key)
        assert len(order) == len(waiting) and {each.key for each in order.in_order()} == waiting
    left = [order.pop().key for _ in range(len(waiting))]
    assert len(order) == 0 and sorted(map(str, left)) == sorted(map(str, waiting))
    with pytest.raises(IndexError):
        order.pop()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=40))
def test_throughput_walks_depth_first_and_in_order_says_so(prompts: list[list[int]]) -> None:
    order = WaitingOrder("throughput")
    for key, tokens in enumerate(prompts):
        order.add(item(key, tokens))
    told = [each.key for each in order.in_order()]
    taken = [order.pop() for _ in prompts]
    assert [each.key for each in taken] == told
    assert [each.tokens for each in taken] == sorted(each.tokens for each in taken)


@given(st.integers(0, 60), st.integers(1, 4))
def test_throughput_passes_nobody_over_longer_than_its_bound(others: int, arrivals_a_pop: int) -> None:
    """Arrivals always sort right behind the last one taken, so the walk alone would never come around."""
    order = WaitingOrder("throughput")
    for key in range(others):
        order.add(item(f"old{key}", [500 + key]))
    order.add(item("victim", [0]))
    order._cursor = (np.asarray([100], ">i4").tobytes(), 0)
    bound = 2 * others + SLACK_POPS + others + 1
    serial = 0
    for _ in range(bound + 1):
        for _ in range(arrivals_a_pop):
            serial += 1
            order.add(item(serial, [200, serial]))
        if order.pop().key == "victim":
            return
    pytest.fail(f"passed over more than {bound} times")


def test_latency_serves_short_work_first_and_ages_what_waits() -> None:
    lengths = OutputLengths()
    order = WaitingOrder("latency", lengths)
    long = item("long", [7] * 10, max_tokens=1000)
    order.add(long)
    work = order.work(long)
    served, pops = 0.0, 0
    while True:
        pops += 1
        order.add(item(pops, [8] * 10, max_tokens=1))
        taken = order.pop()
        if taken.key == "long":
            break
        served += order.work(taken)
    assert pops > 10
    assert served <= work / AGEING + order.work(item("x", [8] * 10, max_tokens=1))


@pytest.mark.parametrize("goal", GOALS)
def test_a_lower_priority_number_is_never_overtaken(goal: str) -> None:
    order = WaitingOrder(goal)
    for key in range(30):
        order.add(item(key, [key % 5], max_tokens=1 + key % 7, priority=key % 3))
    priorities = [order.pop().priority for _ in range(30)]
    assert priorities == sorted(priorities)


@pytest.mark.parametrize("goal", GOALS)
def test_a_request_that_comes_back_keeps_its_age(goal: str) -> None:
    order = WaitingOrder(goal)
    order.add(item("first"))
    first = order.pop()
    for key in range(SLACK_POPS):
        order.add(item(key))
        order.pop()
    order.add_again(first)
    assert order.peek().serial == first.serial and order.peek().due_pops == first.due_pops


def test_lengths_are_learned_per_opening_and_capped() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.observe(b"a", 4)
        lengths.observe(b"b", 400)
    assert lengths.expected(b"a", 1000) < 20 < 200 < lengths.expected(b"b", 1000)
    assert lengths.expected(b"b", 7) == 7.0
    assert 20 < lengths.expected(b"new", 1000) < 400


def test_an_unknown_goal_is_refused() -> None:
    with pytest.raises(ValueError, match="known: throughput, latency"):
        WaitingOrder("speed")
