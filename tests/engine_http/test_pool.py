"""Routing as bookkeeping: exactly once, groups together, work balanced, nobody idle."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.http_flight import Flight, affinity_of
from plait.engine.pool import Balancer
from plait.events import EngineRequest

PLACES = 8


def flight(row: int, affinity: int = 0, work: float = 100.0) -> Flight:
    return Flight(row, f"row {row}", "/v1/completions", b"{}", 8, affinity, work, work)


def drain(balancer: Balancer, slots: int) -> list[tuple[int, int]]:
    """Serve everything, ``slots`` at a time per server, oldest first: (server, row) in order of dispatch."""
    sent: list[tuple[int, int]] = []
    flying: list[Flight] = []
    while balancer.queued or flying:
        for index, member in enumerate(balancer.members):
            while member.up and len(member.in_flight) < slots and (taken := balancer.take(index, slots)):
                sent.append((index, taken.row))
                flying.append(taken)
        assert flying, "something waits although nothing is in flight"
        balancer.end(flying.pop(0), answered=True)
    return sent


def test_groups_stay_on_one_server_each_and_both_servers_work() -> None:
    balancer = Balancer(2, prime=True)
    for row in range(200):
        balancer.add(flight(row, affinity=row // 20))
    sent = drain(balancer, 4)
    assert sorted(row for _, row in sent) == list(range(200))
    servers = Counter(server for server, _ in sent)
    assert abs(servers[0] - servers[1]) <= 50
    spread = [len({server for server, row in sent if row // 20 == group}) for group in range(10)]
    assert sum(spread) <= 12, "few groups are cut"


def test_the_rest_of_a_group_waits_for_its_primer_while_other_groups_go() -> None:
    balancer = Balancer(1, prime=True)
    for row, group in enumerate([1, 1, 1, 2, 2]):
        balancer.add(flight(row, group))
    first, second = balancer.take(0, PLACES), balancer.take(0, PLACES)
    assert first is not None and second is not None and (first.row, second.row) == (0, 3)
    assert balancer.take(0, PLACES) is None
    balancer.end(first, answered=True)
    assert [taken.row for taken in iter(lambda: balancer.take(0, PLACES), None) if taken] == [1, 2]


def test_a_primer_that_failed_leaves_its_part_to_the_next() -> None:
    balancer = Balancer(1, prime=True)
    balancer.add(flight(0, 1))
    balancer.add(flight(1, 1))
    balancer.add(flight(2, 1))
    first = balancer.take(0, PLACES)
    assert first is not None and balancer.take(0, PLACES) is None
    balancer.end(first, answered=False)
    second = balancer.take(0, PLACES)
    assert second is not None and second.row == 1 and balancer.take(0, PLACES) is None
    balancer.stop_priming(second)
    assert balancer.take(0, PLACES) is not None


def test_an_idle_server_takes_work_from_the_end_of_a_long_queue() -> None:
    balancer = Balancer(2, prime=False)
    for row in range(3):
        balancer.add(flight(row, affinity=7, work=1.0))
    taken = [balancer.take(0, PLACES), balancer.take(1, PLACES)]
    assert all(taken), "nobody idles while there is work"


def test_a_request_returns_elsewhere_after_a_fault() -> None:
    balancer = Balancer(2, prime=False)
    one = flight(0)
    balancer.add(one)
    index = next(i for i in range(2) if balancer.members[i].queue)
    assert balancer.take(index, PLACES) is one
    balancer.end(one, answered=False)
    one.avoid = index
    balancer.add(one, front=True)
    assert balancer.members[1 - index].queue[0] is one


@given(st.lists(st.tuples(st.sampled_from("atercd"), st.integers(0, 2), st.integers(0, 5)), max_size=120))
def test_under_any_history_every_flight_is_in_exactly_one_place(steps: list[tuple[str, int, int]]) -> None:
    balancer = Balancer(3, prime=True)
    waiting, flying, row = set(), set(), 0
    for kind, index, number in steps:
        if kind == "a":
            new = flight(row, number, 10.0 * (number + 1))
            waiting.add(new)
            balancer.add(new, front=index == 1)
            row += 1
        elif kind == "t" and balancer.members[index].up:
            taken = balancer.take(index, PLACES)
            if taken is not None:
                assert taken in waiting
                waiting.discard(taken)
                flying.add(taken)
        elif kind == "e" and flying:
            done = min(flying, key=lambda f: f.row)
            flying.discard(done)
            balancer.end(done, answered=number > 1)
        elif kind == "r" and waiting:
            gone = max(waiting, key=lambda f: f.row)
            waiting.discard(gone)
            assert balancer.remove(gone) and not balancer.remove(gone)
        elif kind == "c" and balancer.members[index].up:
            balancer.eject(index)
        elif kind == "d" and not balancer.members[index].up:
            balancer.admit(index)
        assert Counter(balancer.waiting()) == Counter(waiting) and balancer.in_flight == len(flying)
        for member in balancer.members:
            assert member.offered == sum(member.open(f.affinity) for f in member.queue)
            assert member.queued_of == Counter(f.affinity for f in member.queue)
            assert member.flying_of == Counter(f.affinity for f in member.in_flight)
    for member in balancer.members:
        assert abs(member.work - sum(f.work for f in [*member.queue, *member.in_flight])) < 1e-6


def test_affinity_is_the_drivers_own_or_follows_the_openings_of_prompts() -> None:
    def request(body: dict[str, object], affinity: int = -1, ids: list[int] | None = None) -> EngineRequest:
        tokens = None if ids is None else np.array(ids, np.int32)
        return EngineRequest(0, "/v1/chat/completions", body, tokens, 8, affinity)

    system = "s" * 300
    same = [request({"messages": [{"content": system + end}, {"content": end}]}) for end in "ab"]
    assert affinity_of(same[0]) == affinity_of(same[1]) != affinity_of(request({"prompt": "other"}))
    assert affinity_of(request({}, affinity=5)) == 5
    assert affinity_of(request({}, ids=[1] * 64 + [2])) == affinity_of(request({}, ids=[1] * 64 + [3]))
    odd_bodies: list[dict[str, object]] = [
        {},
        {"messages": []},
        {"messages": "x"},
        {"prompt": [1, 2]},
        {"input": [["a"]]},
        {"prompt": "\ud800"},
    ]
    for odd in odd_bodies:
        assert affinity_of(request(odd)) >= 0


def started(balancer: Balancer, places: int) -> list[int]:
    """Rows that one server takes until it should get no more, or has ``places`` in flight."""
    rows = []
    while len(balancer.members[0].in_flight) < places and (taken := balancer.take(0, places)):
        rows.append(taken.row)
    return rows


def test_no_more_groups_are_opened_than_fill_the_server() -> None:
    balancer = Balancer(1, prime=True)
    for row in range(60):
        balancer.add(flight(row, affinity=row // 12))
    assert started(balancer, 8) == [0], "eleven more of its group will fill the eight places"
    many = Balancer(1, prime=True)
    for row in range(60):
        many.add(flight(row, affinity=row // 3))
    assert started(many, 8) == [0, 3, 6, 9], "four groups have eight more, as many as there are places"


def test_the_next_group_is_primed_before_the_open_one_runs_dry() -> None:
    balancer = Balancer(1, prime=True)
    for row in range(24):
        balancer.add(flight(row, affinity=row // 12))
    first = balancer.take(0, 4)
    assert first is not None and balancer.take(0, 4) is None
    balancer.end(first, answered=True)
    order: list[int] = []
    flying: list[Flight] = []
    while 12 not in order:
        taken = balancer.take(0, 4)
        assert taken is not None
        order.append(taken.row)
        flying.append(taken)
        if len(flying) == 4:
            balancer.end(flying.pop(0), answered=True)
    assert 5 <= len(order) <= 9, "while three or more of the first group are still to come"


def test_requests_that_share_with_nobody_keep_their_place_in_the_order() -> None:
    balancer = Balancer(1, prime=True)
    for row in range(40):
        balancer.add(flight(row, affinity=7 if row < 20 else row))
    sent = [row for _, row in drain(balancer, 4)]
    assert sorted(sent) == list(range(40))
    assert max(sent.index(row) for row in range(20)) < min(sent.index(row) for row in range(24, 40))


def test_slots_run_one_request_of_each_group_and_long_groups_take_a_second_slot_at_the_end() -> None:
    balancer = Balancer(1, prime=True)
    balancer.members[0].slots = 3
    for row in range(40):
        balancer.add(flight(row, affinity=row // 10))
    assert started(balancer, 3) == [0, 10, 20]
    first = next(f for f in balancer.members[0].in_flight if f.row == 10)
    balancer.end(first, answered=True)
    assert started(balancer, 3) == [11], "the group goes on in its slot"
    alone = Balancer(1, prime=True)
    alone.members[0].slots = 3
    for row in range(9):
        alone.add(flight(row, affinity=1))
    assert started(alone, 3) == [0, 1], "eight waited: worth a second slot; seven are not"


def test_slots_together_hold_no_more_than_the_cache() -> None:
    balancer = Balancer(1, prime=True)
    member = balancer.members[0]
    member.slots, member.kv_tokens = 4, 300
    for row in range(4):
        balancer.add(flight(row, affinity=row))  # 100 prompt tokens and up to 8 generated each
    assert started(balancer, 4) == [0, 1]
    one_alone = Balancer(1, prime=True)
    one_alone.members[0].kv_tokens = 50
    one_alone.add(flight(0))
    assert started(one_alone, 4) == [0], "whether it fits at all is the server's to say"
