"""Deadlines and priorities: judged against a forecast, honoured by the scheduler, and no request starves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.deadlines import alone_s, hopeless, missed, report
from plait.errors import InputError
from plait.events import Capacity, EngineRequest, Finished
from plait.lengths import Lengths
from plait.policy.base import View
from plait.policy.due import latest_admission_s
from plait.policy.latency import AGEING, machine_time_s
from plait.scheduler import Scheduler
from plait.simulate import Result, simulate
from plait.simulated_engine import SimulatedEngine
from plait.table import F64, I64, RequestTable
from plait.tree.prefix import PrefixTree
from tests.simulation import STEP_TIME

CAPACITY = Capacity(4000, max_batched_tokens=256, takes_prefill_budget=True)
SEQUENTIAL = STEP_TIME._replace(overlapped=0.0)
POLICIES = ("fcfs", "blend", "balanced:0.5", "latency", "dual-scan")


def mixed(n: int, seed: int) -> tuple[I64, I64]:
    """Prompts and outputs, one in five of them long."""
    rng = np.random.default_rng(seed)
    return rng.integers(5, 200, n), np.where(rng.random(n) < 0.2, rng.integers(100, 300, n), rng.integers(1, 40, n))


def run(table: RequestTable, output: I64, policy: str, overlapped: bool = True) -> Result:
    """On an engine that holds a few dozen requests, with known lengths."""
    tree = PrefixTree.without_sharing(table.n)
    step_time = STEP_TIME if overlapped else SEQUENTIAL
    return simulate(table, tree, output, Lengths.known(table, output), CAPACITY, step_time, policy)


@pytest.mark.parametrize("column", ["deadline_s", "priority", "arrival_s", "max_tokens", "min_tokens"])
def test_a_column_with_nan_is_refused_naming_the_row(column: str) -> None:
    with pytest.raises(InputError, match=f"row 1: {column} is nan"):
        RequestTable.of([1, 1], **{column: [1.0, np.nan]})  # type: ignore[arg-type]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "dual-scan"])
def test_deadlines_that_leave_room_are_met_under_every_policy(policy: str, overlapped: bool) -> None:
    prompt, output = mixed(400, 3)
    free = run(RequestTable.of(prompt), output, policy, overlapped)
    rng = np.random.default_rng(4)
    rows = rng.permutation(400)[:40]
    deadline_s = np.full(400, np.inf)
    deadline_s[rows] = free.makespan_s * rng.uniform(0.3, 0.9, 40)
    table = RequestTable.of(prompt, deadline_s=deadline_s)
    assert len(missed(table, free.finish_s)) >= 4
    kept = run(table, output, policy, overlapped)
    assert len(missed(table, kept.finish_s)) == 0
    assert kept.makespan_s <= 1.1 * free.makespan_s


@pytest.mark.parametrize("policy", POLICIES)
def test_where_not_all_deadlines_can_be_met_more_are_than_without(policy: str) -> None:
    prompt, output = mixed(300, 5)
    free = run(RequestTable.of(prompt), output, policy)
    rng = np.random.default_rng(6)
    deadline_s = np.where(rng.random(300) < 0.5, free.makespan_s * rng.uniform(0.05, 0.6, 300), np.inf)
    table = RequestTable.of(prompt, deadline_s=deadline_s)
    assert len(missed(table, run(table, output, policy).finish_s)) < len(missed(table, free.finish_s))


@pytest.mark.parametrize("policy", POLICIES)
def test_deadlines_that_are_met_anyway_change_nothing(policy: str) -> None:
    prompt, output = mixed(200, 7)
    free = run(RequestTable.of(prompt), output, policy)
    loose = RequestTable.of(prompt, deadline_s=np.where(np.arange(200) % 3, np.inf, 20 * free.makespan_s))
    assert np.array_equal(run(loose, output, policy).finish_s, free.finish_s)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_rows_due_in_order_leave_time_for_all_that_are_due_later(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    deadline_s = np.where(rng.random(n) < 0.7, rng.uniform(0, 20, n), np.inf)
    table = RequestTable.of(rng.integers(1, 100, n), deadline_s=deadline_s)
    view = View(table, PrefixTree.without_sharing(n), rng.uniform(1, 100, n), CAPACITY, STEP_TIME)
    waiting = rng.random(n) < 0.8
    latest = latest_admission_s(view, waiting)
    assert np.array_equal(np.isfinite(latest), waiting & np.isfinite(deadline_s))
    rows = np.argsort(latest)[: int(np.isfinite(latest).sum())]
    assert np.all(latest[rows] < deadline_s[rows])
    assert np.all(np.diff(latest[rows]) >= machine_time_s(view)[rows[:-1]] - 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_higher_priorities_are_admitted_first_under_every_policy(policy: str) -> None:
    prompt, output = mixed(120, 8)
    priority = np.random.default_rng(9).integers(-1, 2, 120)
    table = RequestTable.of(prompt, priority=priority)
    lengths = Lengths.known(table, output)
    view = View(table, PrefixTree.without_sharing(120), lengths.expected, Capacity(10**9), SEQUENTIAL)
    if policy == "dual-scan":
        pytest.skip("admits from both ends of every priority at once")
    admitted = Scheduler(view, lengths, policy).decide(0.0).admit
    assert len(admitted) == 120 and np.all(np.diff(priority[admitted]) <= 0)


def test_a_blocked_request_is_not_passed_by_one_of_lower_priority() -> None:
    table = RequestTable.of([90, 80, 5], priority=[0, 1, 0])
    lengths = Lengths.known(table, np.array([5, 5, 5]))
    view = View(table, PrefixTree.without_sharing(3), lengths.expected, Capacity(100), SEQUENTIAL)
    scheduler = Scheduler(view, lengths, "latency")
    assert scheduler.decide(0.0).admit.tolist() == [1, 2]  # what fits beside it may run
    blocked = RequestTable.of([90, 95, 5], priority=[1, 1, 0])
    view = View(blocked, PrefixTree.without_sharing(3), lengths.expected, Capacity(105), SEQUENTIAL)
    assert Scheduler(view, lengths, "latency").decide(0.0).admit.tolist() == [0]


def test_the_report_names_what_cannot_and_what_will_not_be_in_time() -> None:
    table = RequestTable.of([100, 100, 100, 100], deadline_s=[0.001, 5.0, np.inf, 9.0])
    output = np.full(4, 10)
    finish_s = np.array([4.0, 8.0, 9.0, 6.0])
    found = report(table, finish_s, output, STEP_TIME, 8.5)
    assert found.hopeless.tolist() == [0] and found.late.tolist() == [1] and found.in_time == 3
    lines = found.lines(lambda row: f"id-{row}")
    assert len(lines) == 3
    assert "1 requests cannot" in lines[0] and "'id-0'" in lines[0]
    assert "'id-1' by 3.0 s" in lines[1] and "3 of 4 requests" in lines[2]
    assert report(table, np.zeros(4), output, STEP_TIME).lines(lambda row: f"id-{row}") == lines[:1]


def test_alone_is_the_time_of_a_simulated_run_of_one() -> None:
    for prompt, output in ((100, 1), (200, 50), (5, 300)):
        table = RequestTable.of([prompt])
        took = simulate(
            table,
            PrefixTree.without_sharing(1),
            np.array([output]),
            Lengths.known(table, np.array([output])),
            Capacity(4000),
            STEP_TIME,
            "fcfs",
        )
        assert alone_s(table, np.array([output]), STEP_TIME)[0] == pytest.approx(took.makespan_s, rel=0.02)


def test_rows_beyond_their_deadline_are_told_worst_first() -> None:
    table = RequestTable.of([1, 1, 1], deadline_s=[5.0, np.inf, 1.0])
    assert missed(table, np.array([6.0, 9.0, 8.0])).tolist() == [2, 0]
    assert hopeless(table, np.array([2.0, 2.0, 2.0])).tolist() == [2]
    with pytest.raises(InputError, match="1 forecast times for 3"):
        missed(table, np.array([1.0]))


def serve(table: RequestTable, output: I64, policy: str, capacity: Capacity) -> F64:
    """Arrivals fed to ``Scheduler.arrive`` as a live server would; time of each row's admission, float64 [n]."""
    tree, lengths = PrefixTree.without_sharing(table.n), Lengths.known(table, output)
    scheduler = Scheduler(View(table, tree, lengths.expected, capacity, SEQUENTIAL), lengths, policy)
    engine = SimulatedEngine(table, tree, output, capacity, SEQUENTIAL)
    admitted_s, nth = np.full(table.n, np.inf), np.argsort(table.arrival_s, kind="stable")
    due, idle_s = 0, 0.0
    while scheduler.done < table.n:
        now_s = engine.now_s() + idle_s
        come = int(np.searchsorted(table.arrival_s[nth], now_s, side="right"))
        scheduler.arrive(nth[due:come], now_s)
        due = max(due, come)
        rows = scheduler.decide(now_s).admit
        admitted_s[rows] = now_s
        engine.submit([EngineRequest(int(row), "", {}, None, 1) for row in rows])
        if scheduler.running == 0 and due < table.n:
            idle_s += float(table.arrival_s[nth[due]]) - now_s
        for event in engine.poll(0.0):
            scheduler.update(event)
            assert not isinstance(event, Finished) or event.status_code == 200
    return admitted_s


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 4), st.floats(0.5, 3.0))
def test_no_request_is_passed_by_arrivals_beyond_the_stated_bound(seed: int, longs: int, load: float) -> None:
    """Short requests keep arriving, more than the engine can serve where load > 1. A request of machine time k is
    admitted before everything that arrives more than k / AGEING seconds after it."""
    rng = np.random.default_rng(seed)
    n, capacity = 150, Capacity(600, max_batched_tokens=256, takes_prefill_budget=True)
    prompt, output = rng.integers(5, 40, n), rng.integers(2, 10, n)
    where = rng.permutation(60)[:longs]
    prompt[where], output[where] = rng.integers(200, 300, longs), rng.integers(2, 40, longs)
    blank = View(RequestTable.of(prompt), PrefixTree.without_sharing(n), output.astype(float), capacity, SEQUENTIAL)
    work_s = machine_time_s(blank)
    gap_s = float(work_s.mean()) / load + 2 * float(work_s.max()) / AGEING / n  # the stream outlasts every bound
    table = RequestTable.of(prompt, arrival_s=np.cumsum(rng.exponential(gap_s, n)))
    admitted_s = serve(table, output, "latency", capacity)
    assert np.all(np.isfinite(admitted_s))
    for row in range(n):
        later = table.arrival_s > table.arrival_s[row] + work_s[row] / AGEING
        assert admitted_s[row] <= admitted_s[later].min(initial=np.inf)
