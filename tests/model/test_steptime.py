"""Step times: the prototype's constants, scalar = vector, and measured kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.model.specs import device, model
from plait.model.steptime import StepTime, chunk_pairs, for_machine, layer_time, paper_a100_8b, step_s, steps_s

MACHINES = [
    paper_a100_8b(),
    paper_a100_8b("sequential"),
    for_machine(device("H100"), model("Llama-3.1-70B"), "overlapped", tp=8),
    for_machine(device("CPU"), model("SmolLM2-135M"), "sequential"),
]


def test_the_prototypes_machine_is_reproduced() -> None:
    machine = paper_a100_8b()
    assert machine.weights_s == pytest.approx(8.9e-3, rel=0.01)
    assert machine.kv_read_s_per_token * 457_763 == pytest.approx(33e-3, rel=0.02)
    assert machine.kv_read_s_per_token * 457_763 / machine.gemm_s_per_token == pytest.approx(545, rel=0.02)
    assert (machine.overhead_s, machine.interference) == (1.5e-3, 0.15)


def test_an_overlapped_step_hides_the_shorter_side_and_a_sequential_one_does_not() -> None:
    overlapped, sequential = paper_a100_8b(), paper_a100_8b("sequential")
    compute = 600 * overlapped.gemm_s_per_token + 1e5 * overlapped.prefill_attn_s
    memory = 300_000 * overlapped.kv_read_s_per_token
    assert step_s(overlapped, 500.0, 1e5, 100.0, 3e5) == pytest.approx(compute + 0.15 * memory + 1.5e-3)
    assert step_s(sequential, 500.0, 1e5, 100.0, 3e5) == pytest.approx(compute + memory + 1.5e-3)


def test_a_small_step_takes_as_long_as_reading_the_weights() -> None:
    machine = paper_a100_8b()
    assert step_s(machine, 0.0, 0.0, 1.0, 0.0) == pytest.approx(machine.weights_s + machine.overhead_s)
    assert step_s(machine, 0.0, 0.0, 0.0, 0.0) == 0.0


@given(
    st.sampled_from(MACHINES),
    st.lists(st.tuples(*[st.integers(0, 100_000)] * 4), min_size=1, max_size=10),
)
def test_scalar_and_vector_forms_agree(machine: StepTime, steps: list[tuple[int, ...]]) -> None:
    columns = np.array(steps, np.float64).T
    scalar = [step_s(machine, *(float(x) for x in step)) for step in steps]
    assert steps_s(machine, *columns).tolist() == pytest.approx(scalar, rel=1e-12)


@given(st.sampled_from(MACHINES), st.tuples(*[st.integers(0, 100_000)] * 4), st.integers(0, 3))
def test_more_work_never_takes_less_time(machine: StepTime, step: tuple[int, ...], which: int) -> None:
    more = [float(x) + (i == which) for i, x in enumerate(step)]
    assert step_s(machine, *more) >= step_s(machine, *(float(x) for x in step))


@given(st.integers(0, 5000), st.integers(1, 500), st.integers(1, 500))
def test_a_chunk_cut_in_two_attends_to_as_much(context: int, first: int, second: int) -> None:
    parts = chunk_pairs(float(context), float(first)) + chunk_pairs(float(context + first), float(second))
    assert parts == chunk_pairs(float(context), float(first + second))


def test_tensor_parallelism_divides_work_and_adds_all_reduces() -> None:
    a100, llama = device("A100-80"), model("Llama-3.1-70B")
    one, eight = for_machine(a100, llama), for_machine(a100, llama, tp=8)
    assert eight.kv_read_s_per_token == pytest.approx(one.kv_read_s_per_token / 8)
    assert one.comm_s_per_token == 0 and eight.comm_s_per_token > 0
    assert one.comm_base_s == 0 and eight.comm_base_s > 0


def test_unknown_modes_and_degrees_are_refused() -> None:
    a100, llama = device("A100-80"), model("Llama-3.1-8B")
    with pytest.raises(UsageError, match="unknown engine mode 'fast'; known: overlapped, sequential"):
        for_machine(a100, llama, "fast")
    with pytest.raises(UsageError, match="tp is 0"):
        for_machine(a100, llama, tp=0)


@pytest.mark.parametrize(
    ("batch", "gemm_ms", "attention_ms"), [(512, 1.087, 1.317), (768, 1.537, 1.913), (1024, 2.005, 2.515)]
)
def test_blendserves_measured_operators_within_10_percent(batch: int, gemm_ms: float, attention_ms: float) -> None:
    layer = layer_time(device("A100-80"), model("Llama-3.1-8B"))
    gemm = max(layer.weights_s, layer.gemm_base_s + layer.gemm_token_s * batch)
    attention = layer.attention_base_s + layer.kv_read_s * batch * 1024
    assert gemm * 1e3 == pytest.approx(gemm_ms, rel=0.10)
    assert attention * 1e3 == pytest.approx(attention_ms, rel=0.10)


def test_kernel_profiles_are_met_with_a_median_error_of_10_percent_each(shared: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks/steptime_fit.py"
    out = tmp_path / "fit.json"
    command = [sys.executable, str(script), "--profiles", str(shared / "data/profiles"), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    errors = json.loads(out.read_text())["median_error"]
    assert len(errors) > 150
    assert {name: error for name, error in errors.items() if error > 0.10} == {}
