"""The constants of a machine are found again from the steps it took."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.events import Capacity, Step
from plait.lengths import Lengths
from plait.model.calibrate import Calibrator, Observed, fit_steps
from plait.model.specs import device, model
from plait.model.steptime import StepTime, for_machine, paper_a100_8b, steps_s
from plait.simulate import simulate
from plait.table import F64, RequestTable
from plait.tree.prefix import PrefixTree

CPU = for_machine(device("CPU"), model("SmolLM2-135M"), "sequential")


def mixed_steps(truth: StepTime, k: int, seed: int, noise: float) -> Observed:
    """k steps as a run has them: pure decode, pure prefill and both."""
    rng = np.random.default_rng(seed)
    prefill = np.where(rng.random(k) < 0.5, rng.integers(1, 2048, k), 0).astype(np.float64)
    decode = np.where((rng.random(k) < 0.8) | (prefill == 0), rng.integers(1, 200, k), 0).astype(np.float64)
    pairs = prefill * (prefill + 1) / 2 + prefill * rng.integers(0, 1000, k)
    kv = decode * rng.integers(50, 3000, k)
    seconds = steps_s(truth, prefill, pairs, decode, kv) * rng.lognormal(0, noise, k)
    return Observed(prefill, pairs, decode, kv, seconds)


def total_error(found: StepTime, truth: StepTime, seed: int = 99) -> float:
    """Relative error of the total time of a run that the fit has not seen."""
    x = mixed_steps(truth, 2000, seed, 0.0)
    predicted: F64 = steps_s(found, *x[:4])
    return float(abs(predicted.sum() / x.duration_s.sum() - 1))


@pytest.mark.parametrize("factor", [0.8, 1.25, 3.0])
def test_a_prior_that_is_wrong_by_a_factor_is_corrected(factor: float) -> None:
    truth = paper_a100_8b()
    prior = truth._replace(
        gemm_s_per_token=truth.gemm_s_per_token * factor,
        weights_s=truth.weights_s * factor,
        prefill_attn_s=truth.prefill_attn_s * factor,
    )
    found = fit_steps(mixed_steps(truth, 1000, 1, 0.02), prior)
    assert found.residual < 0.03
    assert found.step_time.gemm_s_per_token == pytest.approx(truth.gemm_s_per_token, rel=0.05)
    assert found.step_time.kv_read_s_per_token == pytest.approx(truth.kv_read_s_per_token, rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.3, 3.0), min_size=6, max_size=6),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**32),
)
def test_totals_are_predicted_within_5_percent_whatever_the_machine(
    factors: list[float], overlapped: float, seed: int
) -> None:
    names = StepTime._fields[:6]
    changed = {name: getattr(CPU, name) * factor for name, factor in zip(names, factors, strict=True)}
    truth = CPU._replace(overlapped=overlapped, **changed)
    prior = CPU._replace(overlapped=overlapped)
    found = fit_steps(mixed_steps(truth, 600, seed, 0.1), prior)
    assert total_error(found.step_time, truth) < 0.05
    assert all(value >= 0 for value in found.step_time)


def test_slow_first_steps_and_stalls_do_not_count() -> None:
    x = mixed_steps(CPU, 500, 3, 0.02)
    x.duration_s[0] += 30.0
    x.duration_s[100::50] *= 10
    found = fit_steps(x, CPU._replace(gemm_s_per_token=CPU.gemm_s_per_token * 2))
    assert found.outliers >= 9
    assert total_error(found.step_time, CPU) < 0.02


def test_a_machine_that_gets_slower_is_followed() -> None:
    slower = CPU._replace(
        **{name: value * 2 for name, value in CPU._asdict().items() if name.endswith(("_s", "_token"))}
    )
    live = Calibrator(CPU, window_steps=200)
    for machine in (CPU, slower):
        for row in zip(*mixed_steps(machine, 300, 5, 0.02), strict=True):
            prefill, pairs, decode, kv, seconds = (float(value) for value in row)
            live.observe(Step(0.0, seconds, int(prefill), int(decode), 0, int(pairs), int(kv)))
    assert live.fit().steps == 200
    assert total_error(live.fit().step_time, slower) < 0.03


def test_a_wrong_cost_model_is_corrected_from_a_simulated_run() -> None:
    rng = np.random.default_rng(0)
    table, output = RequestTable.of(rng.integers(1, 3000, 400)), rng.integers(1, 500, 400)
    tree, capacity = PrefixTree.without_sharing(400), Capacity(100_000, 16, 0, 2048)
    truth = paper_a100_8b()
    run = simulate(table, tree, output, Lengths.known(table, output), capacity, truth, "fcfs")
    for factor in (0.8, 1.25):
        prior = truth._replace(gemm_s_per_token=truth.gemm_s_per_token * factor)
        found = fit_steps(Observed.of_records(run.steps), prior)
        assert found.step_time.gemm_s_per_token == pytest.approx(truth.gemm_s_per_token, rel=0.03)
        assert found.residual < 0.01


def test_without_steps_the_prior_stands() -> None:
    live = Calibrator(CPU)
    live.observe(Step(0.0, 0.0, 0, 0, 0))
    assert live.fit().step_time == CPU and live.fit().steps == 0


def test_decode_only_steps_leave_prefill_in_the_priors_proportion() -> None:
    x = mixed_steps(CPU, 400, 7, 0.01)
    decode_only = Observed(
        x.prefill_tokens * 0, x.prefill_context_pairs * 0, x.decode_seqs + 1, x.decode_kv_tokens, x[4]
    )
    seconds = steps_s(CPU, *decode_only[:4]) * 2
    found = fit_steps(decode_only._replace(duration_s=seconds), CPU)
    assert found.step_time.prefill_attn_s == pytest.approx(2 * CPU.prefill_attn_s, rel=0.05)
    assert found.residual < 0.01
