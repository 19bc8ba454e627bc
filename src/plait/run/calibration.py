"""What steps take on this machine, from those of earlier runs: one small JSON file in the user's cache.

Steps are kept, not only what was fitted to them: a run of few and short requests says little of what reading a full
KV cache costs, and must not undo what another run has shown."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from plait.model.calibrate import TRUSTED_RESIDUAL, Observed, fit_steps
from plait.model.steptime import StepTime
from plait.table import F64

STEPS_A_RUN, STEPS_KEPT = 200, 600
"""Steps that one run adds, and that are kept in all: about the last three runs."""
REFERENCE = StepTime(
    gemm_s_per_token=0.6e-3,
    weights_s=0.0,
    prefill_attn_s=0.0,
    kv_read_s_per_token=1.95e-6,
    overhead_s=3e-3,
    gemm_base_s=17e-3,
    overlapped=0.0,
)
"""SmolLM2-135M (q4) on two cores of a server CPU with AMX, measured with ``benchmarks/eta.py``."""
REFERENCE_THREADS = 2
"""What ``REFERENCE`` was measured with."""
WITHOUT_AMX = REFERENCE._replace(
    gemm_s_per_token=5.2e-3, kv_read_s_per_token=9.0e-6, overhead_s=13e-3, gemm_base_s=42e-3
)
"""The same on one core of a server CPU with AVX2 only: what ``benchmarks/eta.py --only example`` left behind there."""


def guess_step_time(threads: int, amx: bool) -> StepTime:
    """Step times of the built-in model where nothing was measured yet: the machine measured that is most alike, its
    computing and reading shared by ``threads``."""
    alike, measured_threads = (REFERENCE, REFERENCE_THREADS) if amx else (WITHOUT_AMX, 1)
    share = measured_threads / threads
    return alike._replace(
        gemm_s_per_token=alike.gemm_s_per_token * share,
        gemm_base_s=alike.gemm_base_s * share,
        kv_read_s_per_token=alike.kv_read_s_per_token * share,
    )


def calibration_key(engine: str, model: str, threads: int) -> str:
    """What the constants belong to: another model, thread count or processor needs its own."""
    return f"{engine} {model} threads={threads} {platform.machine()} {os.cpu_count()} cpus"


def load_step_time(folder: Path, key: str) -> StepTime | None:
    """Constants of earlier runs, or None. A damaged file counts as none: it is only a cache."""
    try:
        stored = _stored(folder)[key]
        return StepTime(**{name: float(stored[name]) for name in StepTime._fields})
    except (KeyError, TypeError, ValueError):
        return None


def learn_step_time(folder: Path, key: str, steps: F64, prior: StepTime) -> None:
    """Add a run's steps, float64 [k, 5] as in ``Observed``, and fit the constants anew to all that are kept."""
    stored = _stored(folder)
    rows = np.concatenate((_kept(stored.get(key)), steps))[-STEPS_KEPT:]
    found = fit_steps(Observed(*rows.T), prior)
    if found.residual < TRUSTED_RESIDUAL:
        stored[key] = {**found.step_time._asdict(), "steps": rows.tolist()}
        _save(folder, stored)


def _kept(entry: Any) -> F64:
    try:
        rows = np.array(entry["steps"], np.float64).reshape(-1, len(Observed._fields))
    except (KeyError, TypeError, ValueError):
        return np.zeros((0, len(Observed._fields)))
    return rows[(rows[:, -1] > 0) & np.isfinite(rows).all(axis=1)]


def _stored(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "calibration.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _save(folder: Path, stored: dict[str, Any]) -> None:
    """A cache that cannot be written is not worth failing for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as draft:
            json.dump(stored, draft)
        Path(draft.name).replace(folder / "calibration.json")
    except OSError:
        return
