"""The real model and engine, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.data.tokenize import Tokenizer
from plait.engine.machine import EngineSettings
from plait.engine.models import LocalModel, find_model
from plait.engine.openvino import OpenVinoEngine


@pytest.fixture(scope="session")
def openvino_model() -> LocalModel:
    """The built-in model from the user cache; fetched the first time."""
    return find_model()


@pytest.fixture(scope="session")
def tokenizer(openvino_model: LocalModel) -> Tokenizer:
    """Of the built-in model."""
    return Tokenizer.load(openvino_model.path)


@pytest.fixture(scope="module")
def engine(openvino_model: LocalModel) -> Iterator[OpenVinoEngine]:
    """A small engine."""
    engine = OpenVinoEngine(openvino_model, EngineSettings(kv_tokens=4096))
    yield engine
    engine.close()
