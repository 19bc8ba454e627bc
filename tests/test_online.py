"""A job without an end: whatever comes and goes, each request is admitted once, in an order that is the scheduler's."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.events import Capacity, Step
from plait.model.steptime import assumed
from plait.online import PASSED_SHARE, PASSED_SLACK, OnlineScheduler
from plait.policy.base import POLICIES
from plait.table import I32


class Clock:
    """Goes only when told to, so that every change is planned at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def server(policy: str, kv_tokens: int = 4096, max_num_seqs: int = 4, chunk: int = 512) -> OnlineScheduler:
    capacity = Capacity(kv_tokens, 16, max_num_seqs, chunk, takes_prefill_budget=True)
    return OnlineScheduler(capacity, assumed(), policy, Clock())


def prompt(group: int, own: int, tokens: int = 64) -> I32:
    """The group's tokens, then some that only this prompt has."""
    shared = np.random.default_rng(group).integers(0, 30000, tokens)
    return np.append(shared, np.random.default_rng([group, own]).integers(30000, 40000, 16)).astype(np.int32)


def serve(online: OnlineScheduler, running: dict[Hashable, int], output: dict[Hashable, int]) -> list[Hashable]:
    """One step of an engine: takes what is admitted, generates a token each; returns what was admitted."""
    admitted, _ = online.decide(0)
    online.step(Step(0.0, 1e-3, 80 * len(admitted), len(running), 0, 80 * 40 * len(admitted), 80 * len(running)))
    for key in admitted:
        assert key not in running
        running[key] = 0
    for key in list(running):
        running[key] += 1
        online.progress(key, running[key])
        if running[key] >= output[key]:
            online.leave(key, running.pop(key))
    return admitted


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "serve", "serve", "abort", "preempt"]), st.integers(0, 5)),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(actions=ACTIONS, kv_tokens=st.sampled_from([512, 4096]))
def test_whatever_happens_each_request_is_admitted_until_it_ends(
    policy: str, actions: list[tuple[str, int]], kv_tokens: int
) -> None:
    online = server(policy, kv_tokens)
    running: dict[Hashable, int] = {}
    output: dict[Hashable, int] = {}
    waiting: set[Hashable] = set()
    for serial, (action, value) in enumerate(actions):
        if action == "arrive":
            output[serial] = 1 + 5 * value
            online.arrive(serial, prompt(value, serial), 40, priority=value % 2)
            waiting.add(serial)
        elif action == "serve":
            waiting -= set(serve(online, running, output))
        elif action == "abort" and output:
            key = list(output)[value % len(output)]
            online.leave(key)
            waiting.discard(key)
            running.pop(key, None)
        elif running:
            key = list(running)[value % len(running)]
            output[key] = max(1, output[key] - running.pop(key))
            online.preempted(key)
            waiting.add(key)
        assert set(online) == waiting and len(online) == len(waiting)
    for _ in range(2000):
        if not (waiting or running):
            break
        waiting -= set(serve(online, running, output))
    assert not waiting and not running and len(online) == 0


def test_prefix_groups_stay_together_though_they_come_mixed_and_in_waves() -> None:
    online = server("blend", kv_tokens=1 << 16)
    dice = np.random.default_rng(1)
    output: dict[Hashable, int] = {}
    running: dict[Hashable, int] = {}
    taken: list[Hashable] = []
    for wave in range(4):
        for group in dice.permutation(np.repeat(np.arange(8), 4)).tolist():
            key = (group, len(output))
            output[key] = 3
            online.arrive(key, prompt(group, len(output)), 8)
        for _ in range(8 if wave < 3 else 400):
            taken += serve(online, running, output)
    assert len(taken) == len(output) == 128
    groups = [key[0] for key in taken]  # type: ignore[index]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes <= 8 + 3 * 4, "once round, and a few more for each wave"


def test_short_work_goes_first_under_latency_and_lengths_are_learned_by_prefix() -> None:
    online = server("latency", max_num_seqs=1)
    output: dict[Hashable, int] = {}
    running: dict[Hashable, int] = {}

    def served(first: int, n: int) -> list[Hashable]:
        for key in range(first, first + n):
            output[key] = 100 if key % 2 else 2
            online.arrive(key, prompt(key % 2, key), 400)
        taken: list[Hashable] = []
        while len(online) or running:
            taken += serve(online, running, output)
        return taken

    served(0, 40)
    later = served(100, 20)
    assert [key % 2 for key in later] == [0] * 10 + [1] * 10  # type: ignore[operator]


@pytest.mark.parametrize("policy", ["blend", "latency", "mc-sf-skip"])
def test_nobody_is_passed_more_often_than_the_bound_says(policy: str) -> None:
    """The victim is the longest, of a group of its own; for each that ends, one comes that is better in every way."""
    online = server(policy, max_num_seqs=2)
    output: dict[Hashable, int] = {"victim": 200}
    running: dict[Hashable, int] = {}
    passed, key = 0, 20
    for first in (0, 10):  # the first lengths are learned
        for early in range(first, first + 10):
            output[early] = 1
            online.arrive(early, prompt(0, early), 2)
        serve(online, running, output)
    waited = len(online)
    online.arrive("victim", prompt(1, 1, 400), 4000)
    while "victim" not in running:
        passed += len(serve(online, running, output))
        while len(online) < 10:
            output[key] = 1
            online.arrive(key, prompt(0, key), 2)
            key += 1
        assert passed <= PASSED_SHARE * waited + PASSED_SLACK + 10
    assert policy == "blend" or passed > 20, "it was not simply first come, first served"


def test_a_higher_priority_is_passed_by_nobody_lower() -> None:
    online = server("latency", max_num_seqs=1)
    for key in range(20):
        online.arrive(key, prompt(key, key, 16 + 16 * (key % 3)), 8, priority=key % 4)
    taken: list[Hashable] = []
    running: dict[Hashable, int] = {}
    while len(online) or running:
        taken += serve(online, running, dict.fromkeys(range(20), 2))
    assert [key % 4 for key in taken] == sorted((key % 4 for key in range(20)), reverse=True)  # type: ignore[operator]


def test_planning_pauses_but_a_request_that_finds_room_does_not_wait_for_a_plan() -> None:
    ticks = iter(range(1 << 20))
    capacity = Capacity(1 << 16, 16, 4, 1 << 12, takes_prefill_budget=True)
    online = OnlineScheduler(capacity, assumed(), "blend", lambda: 0.01 * next(ticks))  # whatever it does takes time
    online.arrive("a", prompt(0, 0), 8)
    assert online.decide(0)[0] == ["a"]
    planned = online.scheduler.state
    online.arrive("b", prompt(0, 1), 8)
    assert online.decide(0)[0] == ["b"] and online.scheduler.state is planned, "not planned anew, and not held up"
    online.preempted("b")
    online.progress("a", 3)
    for _ in range(60):
        next(ticks)
    online.arrive("c", prompt(0, 2), 8)
    assert online.decide(0)[0] == ["b", "c"] and online.scheduler.state is not planned
    assert online.scheduler.running == 3
