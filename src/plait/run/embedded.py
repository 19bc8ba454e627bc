"""The embedded engine as a place to run a job: model files, capacity, step times, tokenizer, and the engine itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.data.tokenize import Tokenizer
from plait.engine import load_engine
from plait.engine.machine import EngineSettings, resolve
from plait.engine.models import LocalModel, cache_dir, find_model
from plait.engine.openvino import capacity_of
from plait.errors import UsageError
from plait.events import Engine
from plait.model.calibrate import Calibration
from plait.model.specs import device, model
from plait.model.steptime import StepTime, for_machine
from plait.plan import Machine
from plait.run.calibration import KEEP_BELOW_RESIDUAL, calibration_key, load_step_time, save_step_time

_REFERENCE = "SmolLM2-135M"
_REFERENCE_BYTES = 98_362_432
"""Size of the built-in model's file: a model that no row describes is taken to be slower in proportion."""


class Embedded:
    """Known without loading the engine. Raises UsageError for settings that cannot work, EngineError where the model
    cannot be fetched."""

    passthrough = False
    retries = True
    served: frozenset[str] = frozenset()
    secrets: tuple[str, ...] = ()

    def __init__(self, model_name: str | None, settings: EngineSettings, say: Callable[[str], None]) -> None:
        self.model: LocalModel = find_model(model_name, say)
        self.name = self.model.name
        self.settings = settings
        limits = resolve(settings, self.model)
        self._key = calibration_key("openvino", self.model.name, limits.threads)
        known = load_step_time(cache_dir(), self._key)
        self.calibrated = known is not None
        """Whether an earlier run on this machine measured the step times."""
        self.machine = Machine(capacity_of(self.model, limits), known or _first_guess(self.model))

    @property
    def answer_settings(self) -> dict[str, Any]:
        """What changes answers, for the journal."""
        return {"engine": "openvino", "model": self.model.name}

    def tokenizer(self) -> Tokenizer:
        """The model's chat template and tokenizer."""
        return Tokenizer.load(self.model.path)

    def engine(self) -> Engine:
        """The engine, loaded. Raises EngineError."""
        return load_engine("openvino", self.model, self.settings)

    def learn(self, calibration: Calibration) -> None:
        """Keep what a run measured for the next forecast on this machine."""
        if calibration.residual < KEEP_BELOW_RESIDUAL:
            save_step_time(cache_dir(), self._key, calibration.step_time)

    def close(self) -> None:
        """Nothing is held: the engine belongs to the run."""


def _first_guess(local: LocalModel) -> StepTime:
    """Step times of a plain CPU before anything was measured here."""
    try:
        return for_machine(device("CPU"), model(local.name), "sequential")
    except UsageError:
        base = for_machine(device("CPU"), model(_REFERENCE), "sequential")
    files = [local.path] if local.path.is_file() else list(local.path.glob("openvino_model.bin"))
    factor = max(1.0, sum(file.stat().st_size for file in files) / _REFERENCE_BYTES)
    return base._replace(
        gemm_s_per_token=base.gemm_s_per_token * factor,
        weights_s=base.weights_s * factor,
        prefill_attn_s=base.prefill_attn_s * factor,
        kv_read_s_per_token=base.kv_read_s_per_token * local.kv_bytes_per_token / 13_680,
    )
