"""What overlapping costs: matrix products and decode attention of Llama-3.1-8B, each alone and both at once.

    python benchmarks/gpu_overlap.py [--device cuda|cpu] [--repeats 20] [--out out/gpu_overlap.json]

On a GPU the two run on two streams. ``both = longer + interference x shorter`` is fitted over a grid of token counts
and batches; the figure belongs in ``plait.model.steptime.INTERFERENCE``. Both results are compared with the ones
computed alone. On a CPU (small shapes, for testing this script) there are no streams: one runs after the other and the
interference comes out near 1. Needs PyTorch >= 2.5, which Plait itself does not.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.table import F64


@dataclass(frozen=True, slots=True)
class Shapes:
    """One layer and the grid it is measured on."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tokens: tuple[int, ...]
    """Tokens in the matrix products of a step."""
    decodes: tuple[tuple[int, int], ...]
    """(sequences, KV tokens each)"""


LLAMA_8B = Shapes(
    4096,
    32,
    8,
    128,
    14336,
    (128, 256, 512, 768, 1024, 2048),
    ((32, 1024), (128, 1024), (512, 1024), (64, 8192), (256, 4096)),
)
TINY = Shapes(64, 4, 2, 16, 128, (8, 32), ((2, 16), (4, 64)))


def fit_interference(gemm_s: F64, attention_s: F64, both_s: F64) -> tuple[float, float]:
    """i of both = longer + i x shorter by least squares on relative errors, and the median relative error."""
    longer, shorter = np.maximum(gemm_s, attention_s), np.minimum(gemm_s, attention_s)
    weight = 1 / both_s**2
    interference = float(np.sum(weight * (both_s - longer) * shorter) / np.sum(weight * shorter**2))
    predicted = longer + interference * shorter
    return interference, float(np.median(np.abs(predicted / both_s - 1)))


class Layer:
    """Weights and KV on a device, and the two kernels of a layer."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        import torch

        self.torch, self.shapes, self.device = torch, shapes, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        if device == "cpu":
            torch.set_num_threads(1)  # tiny kernels: waking threads would be all there is to measure
        self.generator = torch.Generator(device=device).manual_seed(0)
        s = shapes
        sizes = [
            (s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim),
            (s.heads * s.head_dim, s.hidden),
            (s.hidden, 2 * s.ffn),
            (s.ffn, s.hidden),
        ]
        self.weights = [self.random(rows, columns) for rows, columns in sizes]

    def random(self, *size: int) -> Any:
        """Normal values, scaled so that products stay in range."""
        values = self.torch.randn(*size, generator=self.generator, device=self.device, dtype=self.dtype)
        return values / size[-1] ** 0.5

    def gemm(self, tokens: int) -> Callable[[], Any]:
        """The four matrix products of a layer; returns their last outputs."""
        inputs = [self.random(tokens, weight.shape[0]) for weight in self.weights]
        return lambda: [x @ weight for x, weight in zip(inputs, self.weights, strict=True)]

    def attention(self, sequences: int, context: int) -> Callable[[], Any]:
        """Decode attention: one query a sequence over its whole KV."""
        s = self.shapes
        query = self.random(sequences, s.heads, 1, s.head_dim)
        key, value = (self.random(sequences, s.kv_heads, context, s.head_dim) for _ in range(2))
        return lambda: [self.attend(query, key, value)]

    def attend(self, query: Any, key: Any, value: Any) -> Any:
        """Grouped attention: query [b, heads, 1, head_dim], key and value [b, kv_heads, context, head_dim]."""
        return self.torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def timed(device: str, torch: Any, work: list[Callable[[], Any]], repeats: int) -> tuple[float, list[Any]]:
    """Least seconds of three rounds for ``repeats`` calls of each function, and the last outputs. On a GPU each
    function has its own stream, and a round ends when all streams have."""
    streams = [torch.cuda.Stream() for _ in work] if device == "cuda" else []
    least, outputs = float("inf"), [function() for function in work]
    for _ in range(3):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        if device == "cuda":
            for _ in range(repeats):
                for i, (stream, function) in enumerate(zip(streams, work, strict=True)):
                    with torch.cuda.stream(stream):
                        outputs[i] = function()
            torch.cuda.synchronize()
        else:
            outputs = [[function() for _ in range(repeats)][-1] for function in work]
        least = min(least, time.perf_counter() - began)
    return least / repeats, outputs


def measure(shapes: Shapes, device: str, repeats: int) -> list[dict[str, float]]:
    """One record a point of the grid. Raises ValueError if overlapping changes a result."""
    layer = Layer(shapes, device)
    torch = layer.torch
    records = []
    with torch.inference_mode():
        for sequences, context in shapes.decodes:
            attention = layer.attention(sequences, context)
            attention_s, (attended,) = timed(device, torch, [attention], repeats)
            for tokens in shapes.tokens:
                gemm = layer.gemm(tokens)
                gemm_s, (products,) = timed(device, torch, [gemm], repeats)
                both_s, (products_too, attended_too) = timed(device, torch, [gemm, attention], repeats)
                pairs = zip(products + attended, products_too + attended_too, strict=True)
                if not all(torch.allclose(alone, beside, rtol=1e-2, atol=1e-3) for alone, beside in pairs):
                    raise ValueError(
                        f"{tokens} tokens beside {sequences} x {context} KV: overlapping changed the result"
                    )
                records.append(
                    {
                        "tokens": tokens,
                        "sequences": sequences,
                        "context": context,
                        "gemm_s": gemm_s,
                        "attention_s": attention_s,
                        "both_s": both_s,
                    }
                )
    return records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_overlap.json"))
    options = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed: pip install 'torch>=2.5'", file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    shapes = LLAMA_8B if device == "cuda" else TINY
    records = measure(shapes, device, options.repeats)
    columns = [np.array([record[key] for record in records]) for key in ("gemm_s", "attention_s", "both_s")]
    interference, error = fit_interference(*columns)
    for record in records:
        times = ", ".join(f"{key[:-2]} {record[key] * 1e6:.0f} us" for key in ("gemm_s", "attention_s", "both_s"))
        print(f"{record['tokens']} tokens, {record['sequences']} x {record['context']} KV: {times}")
    print(f"{card}: interference {interference:.3f}, median error of the fit {error:.1%}")
    found = {"card": card, "torch": torch.__version__, "interference": interference, "median_error": error}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**found, "shapes": asdict(shapes), "records": records}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
