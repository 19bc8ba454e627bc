"""Step-time constants that earlier runs on this machine measured, one small JSON file in the user's cache."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path

from plait.model.steptime import StepTime

KEEP_BELOW_RESIDUAL = 0.5
"""A fit that misses the typical step by more than half says more about the noise than about the machine."""


def calibration_key(engine: str, model: str, threads: int) -> str:
    """What the constants belong to: another model, thread count or processor needs its own."""
    return f"{engine} {model} threads={threads} {platform.machine()} {os.cpu_count()} cpus"


def load_step_time(folder: Path, key: str) -> StepTime | None:
    """Constants of an earlier run, or None. A damaged file counts as none: it is only a cache."""
    try:
        stored = json.loads((folder / "calibration.json").read_text())[key]
        return StepTime(**{name: float(stored[name]) for name in StepTime._fields})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_step_time(folder: Path, key: str, step_time: StepTime) -> None:
    """Keep constants for the next run; a cache that cannot be written is not worth failing for."""
    path = folder / "calibration.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            stored = json.loads(path.read_text())
        except (OSError, ValueError):
            stored = {}
        stored[key] = step_time._asdict()
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as draft:
            json.dump(stored, draft, indent=1)
        Path(draft.name).replace(path)
    except OSError:
        return
