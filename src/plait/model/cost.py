"""The planner's cost of requests: BlendServe's compute seconds, memory seconds and compute density (arXiv 2411.16102).

Every function is plain arithmetic on ``Cost``, so it takes numbers and NumPy arrays alike and gives the same values;
the constants are three floats, so compiled code takes a ``Cost`` as it is.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, overload

import numpy as np

from plait.errors import UsageError
from plait.model.rows import Device
from plait.model.specs import Model, kv_bytes_per_token, peak_flops
from plait.table import F64

N = TypeVar("N", float, F64)
"""A float or a float64 array."""


class Cost(NamedTuple):
    """Constants of the paper's equations for one model on one machine."""

    token_s: float
    """Compute seconds of one token's matrix products: 2 P / compute."""
    pair_s: float
    """Compute seconds of prefill attention for one (token, token) pair: 4 H L / compute."""
    kv_read_s: float
    """Seconds to read the KV of one token once: H_kv · L · 4 / bandwidth at 16 bits."""


def cost_of(device: Device, model: Model, tp: int = 1, compute: float = 0.0, bandwidth: float = 0.0) -> Cost:
    """Cost constants of ``tp`` devices. ``compute``, ``bandwidth``: FLOP/s and B/s of one device instead of its row's.
    Tensor parallelism scales both; a pipeline leaves density alone. Raises UsageError if tp < 1."""
    if tp < 1:
        raise UsageError(f"tp is {tp}; a whole number >= 1 is needed")
    compute = tp * (compute or peak_flops(device, model))
    bandwidth = min(tp, model.kv_shards) * (bandwidth or device.bandwidth_bytes_s)
    return Cost(
        token_s=2 * model.active_params / compute,
        pair_s=4 * model.attention_width * model.layers / compute,
        kv_read_s=kv_bytes_per_token(model) / bandwidth,
    )


def comp_s(cost: Cost, prompt_tokens: N, output_tokens: N) -> N:
    """Comp(r) = (2 (p + d) P + 4 p² H L) / compute, in seconds."""
    return cost.token_s * (prompt_tokens + output_tokens) + cost.pair_s * (prompt_tokens * prompt_tokens)


def prefill_comp_s(cost: Cost, cached_tokens: N, prompt_tokens: N) -> N:
    """Comp of the prompt tokens behind the first ``cached_tokens`` ones, which another request computes.

    Telescopes along a path of the prefix tree: the parts of a split prompt add up to the whole, so a shared segment
    from token a to token b costs ``prefill_comp_s(cost, a, b)`` once, however many requests use it.
    """
    pairs = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
    return cost.token_s * (prompt_tokens - cached_tokens) + cost.pair_s * pairs


def mem_s(cost: Cost, prompt_tokens: N, output_tokens: N) -> N:
    """Mem(r) = (p d + d²/2) · H_kv · L · 4 / bandwidth, in seconds. A prefix cache does not shorten it."""
    return cost.kv_read_s * (prompt_tokens * output_tokens + output_tokens * output_tokens / 2)


@overload
def density(comp: float, mem: float) -> float: ...
@overload
def density(comp: F64, mem: F64) -> F64: ...
def density(comp: float | F64, mem: float | F64) -> float | F64:
    """ρ = Comp / Mem, of a request or of sums over a set; inf where no memory time is spent."""
    if not isinstance(mem, np.ndarray):
        return comp / mem if mem > 0 else np.inf
    ratio: F64 = np.full(np.shape(mem), np.inf)
    return np.divide(comp, mem, out=ratio, where=mem > 0)


def set_density(cost: Cost, prompt_tokens: F64, output_tokens: F64, sharing: float = 0.0) -> float:
    """ρ(R) = (1 − s) · Σ Comp / Σ Mem of a set with prefix sharing ratio s."""
    comp, mem = comp_s(cost, prompt_tokens, output_tokens).sum(), mem_s(cost, prompt_tokens, output_tokens).sum()
    return density((1 - sharing) * float(comp), float(mem))


def memory_split(density_left: float, density_right: float, density_root: float) -> tuple[float, float]:
    """Shares of KV memory for the two cursors of the dual scan: M_L/M = (ρ_root − ρ_R) / (ρ_L − ρ_R), M_R/M the rest.

    Clipped to [0, 1]; one half each where both cursors are equally dense.
    """
    if density_left == density_right:
        return 0.5, 0.5
    left = (density_root - density_right) / (density_left - density_right)
    left = min(1.0, max(0.0, left))
    return left, 1.0 - left
