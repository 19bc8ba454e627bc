"""The time left, on the simulated engine: its steps cost what they cost, so the truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.drive import drive
from plait.events import Capacity, EngineRequest, Event, Finished, Progress, Started, Step
from plait.lengths import Lengths
from plait.model.specs import device, model
from plait.model.steptime import for_machine
from plait.plan import Machine, scheduler
from plait.report.metrics import LiveStats
from plait.report.steps_left import StepsLeft
from plait.simulated_engine import SimulatedEngine
from plait.table import I64, RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.sharing import shared_with_previous

STEP_TIME = for_machine(device("CPU"), model("SmolLM2-135M"), "sequential")
COSTS = (
    STEP_TIME.overhead_s + max(STEP_TIME.gemm_base_s, STEP_TIME.weights_s),
    STEP_TIME.gemm_s_per_token,
    STEP_TIME.gemm_s_per_token + STEP_TIME.decode_seq_s,
    STEP_TIME.kv_read_s_per_token,
)
CAPACITY = Capacity(40_000, 16, 16, 256, prefix_lookup_at_submit=True)


def shown(
    prompt: I64,
    output: I64,
    most: I64,
    policy: str,
    known: bool = False,
    longest: bool = False,
    capacity: Capacity = CAPACITY,
) -> tuple[list[tuple[float, float]], float]:
    """(time, time left as shown) about every hundredth of a run, and when the run ended. ``longest``: instead, the time
    left if each answer went on to its ``max_tokens``."""
    n = len(prompt)
    tree = tree_from_groups(prompt, np.arange(n) % 8, np.full(n, 160))
    table = RequestTable.of(prompt, most, min_tokens=most if known else None)
    machine = Machine(capacity, STEP_TIME)
    chosen = scheduler(table, tree, Lengths.unknown(table, tree), machine, policy)
    engine = SimulatedEngine(table, tree, output, capacity, STEP_TIME)
    new = prompt.copy()
    new[tree.dfs_rows] -= shared_with_previous(tree, tree.dfs_rows)
    own = Lengths.unknown(table, tree)
    stats = LiveStats(prompt, own, new, 0.0, StepsLeft(own, prompt, most, capacity, COSTS))
    found: list[tuple[float, float]] = []
    generated: dict[int, int] = {}

    def fetch(row: int) -> EngineRequest:
        stats.sent(row, engine.now_s())
        return EngineRequest(row, "", {}, None, int(most[row]))

    def sink(event: Event) -> None:
        stats.event(event)
        match event:
            case Started():
                generated[event.row] = 1
            case Finished():
                generated.pop(event.row, None)
            case Step():
                for row, tokens in generated.items():
                    generated[row] = tokens + 1
                    stats.event(Progress(row, event.t_s, tokens))

    def beat(now_s: float) -> None:
        if not found or now_s >= found[-1][0] + 0.5:
            left_s = stats.beat(now_s, chosen.running, chosen.waiting).eta_s
            if longest and (longest_s := stats.longest_s()) is not None:
                left_s = longest_s
            else:
                assert not longest or now_s == 0.0, "no step yet"
            found.append((now_s, left_s))

    drive(chosen, engine, fetch, sink, heartbeat=beat)
    return found, engine.now_s()


def lengths_of(kind: str, rng: np.random.Generator) -> tuple[I64, I64]:
    """True lengths and caps; where lengths are not known, so many rows that the first tenth ends some answers."""
    if kind == "known":
        most = rng.integers(4, 120, 160)
        return most, most
    if kind == "short":
        return rng.integers(1, 3, 160), np.full(160, 16)
    if kind == "even":
        return rng.integers(50, 120, 480), np.full(480, 400)
    most = np.full(480, 100)
    return np.minimum(most, rng.geometric(1 / 80, 480)), most


@pytest.mark.parametrize("policy", ["blend", "fcfs"])
@pytest.mark.parametrize("kind", ["known", "short", "even", "cut off at max_tokens"])
def test_the_predicted_total_time_is_right_within_a_fifth_from_the_first_tenth_on(kind: str, policy: str) -> None:
    rng = np.random.default_rng(3)
    output, most = lengths_of(kind, rng)
    found, end_s = shown(rng.integers(200, 900, len(most)), output, most, policy, known=kind == "known")
    checked = [(now_s, eta_s) for now_s, eta_s in found if 0.1 * end_s <= now_s < end_s]
    assert len(checked) >= 10
    wrong = [abs(now_s + eta_s - end_s) / end_s for now_s, eta_s in checked]
    assert max(wrong) <= 0.2, wrong


@pytest.mark.parametrize("kind", ["known", "even"])
def test_the_time_left_is_right_within_a_fifth_up_to_three_quarters_of_the_job(kind: str) -> None:
    rng = np.random.default_rng(4)
    output, most = lengths_of(kind, rng)
    found, end_s = shown(rng.integers(200, 900, len(most)), output, most, "blend", known=kind == "known")
    at, eta_s = np.array(found).T
    for share in (0.1, 0.25, 0.5, 0.75):
        assert np.interp(share * end_s, at, eta_s) == pytest.approx((1 - share) * end_s, rel=0.2)


@pytest.mark.parametrize("kv_tokens", [40_000, 10_000])
def test_what_is_said_of_the_longest_that_it_can_take_is_what_it_takes_when_all_answers_are_that_long(
    kv_tokens: int,
) -> None:
    prompt = np.random.default_rng(5).integers(200, 900, 160)
    most = np.full(160, 400)
    capacity = replace(CAPACITY, kv_tokens=kv_tokens)
    found, end_s = shown(prompt, most, most, "blend", longest=True, capacity=capacity)
    checked = [(now_s, left_s) for now_s, left_s in found if 0.1 * end_s <= now_s < end_s]
    assert len(checked) >= 10
    for now_s, left_s in checked:
        assert now_s + left_s == pytest.approx(end_s, rel=0.2)
