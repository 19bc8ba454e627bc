"""Engines by name. Nothing heavy is imported until one is loaded."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from plait.errors import UsageError
from plait.events import Engine

ENGINES: dict[str, tuple[str, str, str]] = {
    "openvino": ("plait.engine.openvino:OpenVinoEngine", "openvino_genai", "pip install plait"),
    "http": ("plait.engine.http:HttpPool", "aiohttp", "pip install plait"),
    "vllm": ("plait.engine.vllm:VllmEngine", "vllm", "pip install 'plait[vllm]'"),
}
"""Name -> (module:class, a module it needs, how to install that)."""


def load_engine(name: str, *args: Any, **kwargs: Any) -> Engine:
    """Construct the engine. Raises UsageError for an unknown name or one that is not installed; else as the engine's
    own class does."""
    if name not in ENGINES:
        raise UsageError(f"unknown engine '{name}'; known: {', '.join(ENGINES)}")
    place, needed, install = ENGINES[name]
    if importlib.util.find_spec(needed) is None:
        raise UsageError(f"engine '{name}' needs {needed}, which is not installed here: {install}")
    module, attribute = place.split(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)(*args, **kwargs)
    return engine
