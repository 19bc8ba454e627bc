"""Live calibration: a scheduler that was told the wrong step times finds the right ones by the steps it sees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from plait.drive import drive
from plait.events import EngineRequest, Event, Finished, Step
from plait.lengths import Lengths
from plait.model.steptime import StepTime
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.scheduling.live import FIRST_FIT_STEPS
from plait.simulate import simulate
from plait.simulated_engine import SimulatedEngine
from tests.simulation import STEP_TIME, capacity_for, lengths_for, small_job

WRONG = STEP_TIME._replace(gemm_s_per_token=STEP_TIME.gemm_s_per_token * 1.5, kv_read_s_per_token=3e-7)
TRUE = STEP_TIME._replace(gemm_s_per_token=2e-4, kv_read_s_per_token=1e-5)


def scheduler_of(seed: int, prior: StepTime, calibrates: bool, n: int = 200) -> tuple[Scheduler, SimulatedEngine]:
    job, capacity = small_job(seed, n, 4), capacity_for(2000)
    lengths = lengths_for(job, "known")
    view = View(job.table, job.tree, lengths.expected, capacity, prior)
    engine = SimulatedEngine(job.table, job.tree, job.output_tokens, capacity, TRUE)
    return Scheduler(view, lengths, "blend", calibrates=calibrates), engine


@pytest.mark.parametrize("calibrates", [True, False])
def test_a_scheduler_learns_step_times_from_step_events_if_told_to(calibrates: bool) -> None:
    scheduler, engine = scheduler_of(1, WRONG, calibrates, n=1000)
    drive(scheduler, engine, lambda row: EngineRequest(row, "", {}, None, 1), lambda event: None)
    c = scheduler.state.c
    believed, true = WRONG, TRUE
    expected = true if calibrates else believed
    assert c["gemm_s"] == pytest.approx(expected.gemm_s_per_token, rel=0.05)
    assert c["kv_read_s"] == pytest.approx(expected.kv_read_s_per_token, rel=0.05)


def test_steps_that_fit_no_machine_change_nothing() -> None:
    scheduler, _ = scheduler_of(2, WRONG, True)
    rng = np.random.default_rng(0)
    for _ in range(4 * FIRST_FIT_STEPS):
        scheduler.update(Step(0.0, float(10.0 ** rng.uniform(-5, 3)), 10, 10, 100, 100, 100))
    assert scheduler.state.c["gemm_s"] == WRONG.gemm_s_per_token


@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_simulation_calibrates_as_the_object_does(seed: int) -> None:
    job, capacity = small_job(seed, 200, 4), capacity_for(2000)
    compiled = simulate(
        job.table, job.tree, job.output_tokens, lengths_for(job, "known"), capacity, TRUE, "blend", believed=WRONG
    )
    scheduler, engine = scheduler_of(seed, WRONG, True)
    finish = np.full(job.table.n, np.nan)

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            finish[event.row] = event.t_s

    drive(scheduler, engine, lambda row: EngineRequest(row, "", {}, None, 1), sink)
    assert np.allclose(finish, compiled.finish_s)


def test_a_wrong_first_guess_costs_little_once_corrected() -> None:
    job, capacity = small_job(5, 2000, 4), dataclasses.replace(capacity_for(4000), max_batched_tokens=512)
    output = job.output_tokens

    def makespan(believed: StepTime | None) -> float:
        lengths = Lengths.known(job.table, output)
        return simulate(job.table, job.tree, output, lengths, capacity, TRUE, "blend", believed=believed).makespan_s

    assert makespan(WRONG) <= 1.03 * makespan(None)
