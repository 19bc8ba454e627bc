"""The embedded engine as a place to run a job: model files, capacity, step times, tokenizer, and the engine itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.data.problems import Fault
from plait.data.tokenize import Tokenizer as NativeTokenizer
from plait.engine import load_engine
from plait.engine.isolating import Isolating
from plait.engine.machine import EngineSettings, has_amx, resolve
from plait.engine.models import LocalModel, cache_dir, find_model
from plait.engine.openvino import capacity_of
from plait.engine.sampling import unsupported
from plait.events import Engine
from plait.model.calibrate import Calibrator
from plait.model.steptime import StepTime
from plait.plan import Machine
from plait.run.calibration import STEPS_A_RUN, calibration_key, guess_step_time, learn_step_time, load_step_time
from plait.run.history import History
from plait.run.prepare import Tokenizer
from plait.table import I32

_REFERENCE_BYTES, _REFERENCE_KV_BYTES = 98_362_432, 13_680
"""The built-in model's file, and its KV cache a token: another model is taken to be slower in proportion."""


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
        self.settings, self._say = settings, say
        limits = resolve(settings, self.model)
        self._key = calibration_key("openvino", self.model.name, limits.threads)
        known = load_step_time(cache_dir(), self._key)
        self._guess = _first_guess(self.model, limits.threads)
        self.calibrated = known is not None
        """Whether an earlier run on this machine measured the step times."""
        self.history = History(cache_dir(), self.model.name)
        self.machine = Machine(capacity_of(self.model, limits), known or self._guess)

    @property
    def answer_settings(self) -> dict[str, Any]:
        """What changes answers, for the journal."""
        return {"engine": "openvino", "model": self.model.name}

    def tokenizer(self) -> Tokenizer:
        """The model's chat template and tokenizer; requests for what the engine cannot do are found here too."""
        return _Checked(NativeTokenizer.load(self.model.path))

    def engine(self) -> Engine:
        """The engine, loaded. Raises EngineError."""
        return Isolating(self._load(), self._load, self._say)

    def _load(self) -> Engine:
        return load_engine("openvino", self.model, self.settings)

    def learn(self, seen: Calibrator) -> None:
        """Keep what a run measured for the next forecast on this machine."""
        learn_step_time(cache_dir(), self._key, seen.sample(STEPS_A_RUN), self._guess)

    def close(self) -> None:
        """Nothing is held: the engine belongs to the run."""


class _Checked:
    """A tokenizer that refuses parameters which the engine would refuse, before it is loaded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_many(self, requests: list[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """Token ids of each (url, body), or what is wrong with it."""
        faults = [unsupported(url, body) for url, body in requests]
        good = [request for request, fault in zip(requests, faults, strict=True) if fault is None]
        ids = iter(self._tokenizer.encode_many(good))
        return [next(ids) if fault is None else fault for fault in faults]


def _first_guess(local: LocalModel, threads: int) -> StepTime:
    """Step times of this model and processor before anything was measured here."""
    files = [local.path] if local.path.is_file() else list(local.path.glob("openvino_model.bin"))
    factor = max(1.0, sum(file.stat().st_size for file in files) / _REFERENCE_BYTES)
    alike = guess_step_time(threads, has_amx())
    return alike._replace(
        gemm_s_per_token=alike.gemm_s_per_token * factor,
        gemm_base_s=alike.gemm_base_s * factor,
        kv_read_s_per_token=alike.kv_read_s_per_token * local.kv_bytes_per_token / _REFERENCE_KV_BYTES,
    )
