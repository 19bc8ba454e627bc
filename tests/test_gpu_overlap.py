"""The overlap benchmark: its fit, and (where PyTorch is at hand) its kernels on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks/gpu_overlap.py"
    spec = importlib.util.spec_from_file_location("gpu_overlap", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("interference", [0.0, 0.15, 0.6, 1.0])
def test_the_fit_finds_the_interference_that_made_the_times(script: ModuleType, interference: float) -> None:
    rng = np.random.default_rng(0)
    gemm, attention = rng.uniform(1e-4, 1e-2, (2, 200))
    both = np.maximum(gemm, attention) + interference * np.minimum(gemm, attention)
    found, error = script.fit_interference(gemm, attention, both * rng.lognormal(0, 0.01, 200))
    assert found == pytest.approx(interference, abs=0.02)
    assert error < 0.02


def test_kernels_on_the_cpu_give_the_same_results_beside_each_other(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert script.main(["--device", "cpu", "--repeats", "2", "--out", str(tmp_path / "o.json")]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert len(found["records"]) == 4
    assert all(record["both_s"] > 0 for record in found["records"])


def test_grouped_decode_attention_is_softmax_of_scores_times_values(script: ModuleType) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer = script.Layer(script.TINY, "cpu")
    query, key, value = layer.random(3, 4, 1, 16), layer.random(3, 2, 20, 16), layer.random(3, 2, 20, 16)
    every_head = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    scores = query @ every_head[0].transpose(-1, -2) / 16**0.5
    assert torch.allclose(layer.attend(query, key, value), scores.softmax(-1) @ every_head[1], atol=1e-5)
