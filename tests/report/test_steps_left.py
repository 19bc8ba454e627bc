"""The time left, on the simulated engine: its steps cost what they cost, so the truth is known."""

from __future__ import annotations

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
CAPACITY = Capacity(40_000, 16, 16, 256, prefix_lookup_at_submit=True)


def shown(prompt: I64, output: I64, most: I64, policy: str) -> tuple[list[tuple[float, float]], float]:
    """(time, time left as shown) about every hundredth of a run, and when the run ended."""
    n = len(prompt)
    tree = tree_from_groups(prompt, np.arange(n) % 8, np.full(n, 160))
    table = RequestTable.of(prompt, most)
    machine = Machine(CAPACITY, STEP_TIME)
    chosen = scheduler(table, tree, Lengths.unknown(table, tree), machine, policy)
    engine = SimulatedEngine(table, tree, output, CAPACITY, STEP_TIME)
    new = prompt.copy()
    new[tree.dfs_rows] -= shared_with_previous(tree, tree.dfs_rows)
    own = Lengths.unknown(table, tree)
    stats = LiveStats(prompt, own, new, 0.0, StepsLeft(own, prompt, most, CAPACITY))
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
            found.append((now_s, stats.beat(now_s, chosen.running, chosen.waiting).eta_s))

    drive(chosen, engine, fetch, sink, heartbeat=beat)
    return found, engine.now_s()


@pytest.mark.parametrize("policy", ["blend", "fcfs"])
@pytest.mark.parametrize("kind", ["cut off at max_tokens", "short", "even"])
def test_the_time_left_is_right_within_a_fifth_on_average_after_a_tenth_of_the_job(kind: str, policy: str) -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(200, 900, 160)
    if kind == "cut off at max_tokens":
        output = rng.integers(4, 120, 160)
        most = output
    elif kind == "short":
        output, most = rng.integers(1, 3, 160), np.full(160, 16)
    else:
        output, most = rng.integers(50, 120, 160), np.full(160, 400)
    found, end_s = shown(prompt, output, most, policy)
    checked = [(now_s, eta_s) for now_s, eta_s in found if 0.1 * end_s <= now_s <= 0.9 * end_s]
    assert len(checked) >= 10
    wrong = [abs(eta_s / (end_s - now_s) - 1) for now_s, eta_s in checked]
    assert np.mean(wrong) <= 0.2 and max(wrong) <= 0.45, wrong
