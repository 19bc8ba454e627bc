"""vLLM in a process of ours as a place to run a job."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from plait.engine.isolating import Isolating
from plait.engine.models import cache_dir
from plait.engine.vllm import VllmEngine, check_model, command_line
from plait.events import Engine
from plait.model.calibrate import Calibrator
from plait.model.steptime import assumed
from plait.plan import Machine
from plait.run.history import History
from plait.run.prepare import Tokenizer

SIZES = frozenset(
    (
        *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "num_gpu_blocks_override", "block_size"),
        *("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "scheduler_cls", "scheduling_policy"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enforce_eager", "stream_interval"),
        *("swap_space", "cpu_offload_gb", "disable_log_stats", "additional_config", "kv_cache_memory_bytes"),
    )
)
"""Engine arguments that change speed and room, not what a model says."""


class Vllm:
    """Loaded when first asked what it holds, which only vLLM itself can tell: after the input was read and found good.
    Raises UsageError for what could not be loaded anyway, EngineError where loading fails."""

    passthrough = True
    retries = True
    calibrated = False
    served: frozenset[str] = frozenset()
    secrets: tuple[str, ...] = ()

    def __init__(self, model_name: str | None, arguments: dict[str, Any], say: Callable[[str], None]) -> None:
        check_model(model_name)
        self.name = str(model_name)
        self.history: History | None = History(cache_dir(), self.name)
        self._arguments, self._say = arguments, say
        self._opened: VllmEngine | None = None

    @property
    def answer_settings(self) -> dict[str, Any]:
        """What changes answers, for the journal."""
        changing = {key: value for key, value in self._arguments.items() if key not in SIZES}
        return {"engine": "vllm", "model": self.name, **({"engine_args": changing} if changing else {})}

    @cached_property
    def machine(self) -> Machine:
        """What vLLM found room for; its step times are not seen, so a common device's proportions stand in."""
        return Machine(self._engine().capacity, assumed())

    def tokenizer(self) -> Tokenizer:
        """vLLM's own."""
        return self._engine()

    def engine(self) -> Engine:
        """The engine, loaded. Raises UsageError, EngineError."""
        return Isolating(self._engine(), self._load, self._say)

    def learn(self, seen: Calibrator) -> None:
        """vLLM shows no steps."""

    def close(self) -> None:
        """End vLLM."""
        if self._opened is not None:
            self._opened.close()

    def _engine(self) -> VllmEngine:
        return self._opened or self._load()

    def _load(self) -> VllmEngine:
        self._say(f"loading {self.name} in vLLM")
        self._opened = VllmEngine(self.name, command_line(self._arguments))
        return self._opened
