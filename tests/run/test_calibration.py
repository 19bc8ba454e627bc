"""Step times of earlier runs on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from plait.model.steptime import steps_s
from plait.run.calibration import REFERENCE, STEPS_KEPT, guess_step_time, learn_step_time, load_step_time
from plait.table import F64

TRUE = REFERENCE._replace(gemm_base_s=30e-3, kv_read_s_per_token=4e-6)


def steps(k: int, context: float, seed: int = 0) -> F64:
    """k steps of a machine that is slower than the reference."""
    rng = np.random.default_rng(seed)
    prefill = np.where(rng.random(k) < 0.2, rng.integers(1, 512, k), 0).astype(float)
    decode = rng.integers(1, 33, k).astype(float)
    read = decode * rng.uniform(0.5, 1.5, k) * context
    return np.stack((prefill, prefill * 300, decode, read, steps_s(TRUE, prefill, prefill * 300, decode, read)), axis=1)


def test_what_was_learnt_is_there_for_the_next_run(tmp_path: Path) -> None:
    assert load_step_time(tmp_path, "key") is None
    learn_step_time(tmp_path, "key", steps(200, 1000), REFERENCE)
    found = load_step_time(tmp_path, "key")
    assert found is not None and load_step_time(tmp_path, "other") is None
    asked = steps(50, 1500, seed=1)
    assert steps_s(found, *asked.T[:4]).sum() == pytest.approx(asked[:, 4].sum(), rel=0.06)


def test_a_run_of_short_contexts_does_not_undo_what_long_ones_have_shown(tmp_path: Path) -> None:
    learn_step_time(tmp_path, "key", steps(200, 1500), REFERENCE)
    learn_step_time(tmp_path, "key", steps(200, 5, seed=2), REFERENCE)
    found = load_step_time(tmp_path, "key")
    assert found is not None and found.kv_read_s_per_token == pytest.approx(4e-6, rel=0.1)


def test_only_the_latest_steps_are_kept(tmp_path: Path) -> None:
    for seed in range(5):
        learn_step_time(tmp_path, "key", steps(200, 1000, seed), REFERENCE)
    stored = json.loads((tmp_path / "calibration.json").read_text())["key"]["steps"]
    assert len(stored) == STEPS_KEPT and stored[-1] == pytest.approx(steps(200, 1000, 4)[-1].tolist())


@pytest.mark.parametrize("text", ["", "[]", '{"key": 3}', '{"key": {"steps": [[1]]}}', '{"key": {"steps": "x"}}'])
def test_a_damaged_file_counts_as_none_and_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "calibration.json").write_text(text)
    assert load_step_time(tmp_path, "key") is None
    learn_step_time(tmp_path, "key", steps(200, 1000), REFERENCE)
    assert load_step_time(tmp_path, "key") is not None


def test_steps_that_no_model_describes_are_not_kept(tmp_path: Path) -> None:
    noise = steps(200, 1000)
    noise[:, 4] = 10.0 ** np.random.default_rng(0).uniform(-4, 2, 200)
    learn_step_time(tmp_path, "key", noise, REFERENCE)
    assert load_step_time(tmp_path, "key") is None


def test_the_first_guess_is_slower_without_matrix_units_and_faster_with_more_threads() -> None:
    few, many, amx = (guess_step_time(threads, matrix) for threads, matrix in ((1, False), (4, False), (4, True)))
    step = [np.array([tokens]) for tokens in (512.0, 100_000.0, 16.0, 8_000.0)]
    assert steps_s(few, *step) > 3 * steps_s(many, *step) > 3 * steps_s(amx, *step)
    assert guess_step_time(2, amx=True) == REFERENCE
