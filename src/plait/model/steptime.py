"""How long one engine step takes: sequential or overlapped, from a handful of constants.

Apart from ``plait.model.cost`` on purpose: the planner ranks requests with the paper's cost equations, the simulator
and the ETA use what a machine does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait._numba import njit
from plait.errors import UsageError
from plait.model.rows import Device
from plait.model.specs import Model, device, kv_bytes_per_token, model
from plait.table import F64

INTERFERENCE = 0.15
"""Share of the hidden side's time that an overlapped step still loses (research.md §A; benchmarks/gpu_overlap.py)."""
STEP_OVERHEAD_S = 1.5e-3
"""Scheduling, sampling and launch time of a step that nothing hides (research.md §A)."""


class StepTime(NamedTuple):
    """Constants of one engine on one machine. A NamedTuple of floats, so compiled code takes it as it is.

    compute = max(gemm_s_per_token x (prefill + decode tokens), weights_s)
              + prefill_attn_s x (prefill token, context token) pairs
    memory  = kv_read_s_per_token x (KV tokens read by decodes)
    network = comm_s_per_token x (prefill + decode tokens)
    fixed   = overhead_s + decode_seq_s x decoding sequences
    sequential: compute + memory + network + fixed
    overlapped: longest of the three + interference x (sum of the other two) + fixed
    """

    gemm_s_per_token: float
    weights_s: float
    """Time to read the weights once: the floor of a step's GEMM time."""
    prefill_attn_s: float
    """Seconds for one prefill token to attend to one context token."""
    kv_read_s_per_token: float
    overhead_s: float
    decode_seq_s: float = 0.0
    """Extra seconds per decoding sequence and step (sampling, kernel launch per sequence on CPUs)."""
    interference: float = INTERFERENCE
    overlapped: float = 1.0
    """1.0 overlapped, 0.0 sequential."""
    comm_s_per_token: float = 0.0
    """All-reduce seconds per token (tensor parallelism); an overlapped engine hides it like memory time."""


@njit
def step_s(
    st: StepTime, prefill_tokens: float, prefill_context_pairs: float, decode_seqs: float, decode_kv_tokens: float
) -> float:
    """Seconds of one step: ``prefill_tokens`` new prompt tokens that attend to ``prefill_context_pairs`` (token,
    context token) pairs, and ``decode_seqs`` sequences that read ``decode_kv_tokens`` of KV together. Compiled: kernels call
    it. A step without work takes no time."""
    tokens = prefill_tokens + decode_seqs
    if tokens <= 0:
        return 0.0
    compute = max(st.gemm_s_per_token * tokens, st.weights_s) + st.prefill_attn_s * prefill_context_pairs
    memory = st.kv_read_s_per_token * decode_kv_tokens
    network = st.comm_s_per_token * tokens
    longest = max(compute, max(memory, network))
    hidden = compute + memory + network - longest
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    return longest + exposed * hidden + st.overhead_s + st.decode_seq_s * decode_seqs


def steps_s(
    st: StepTime, prefill_tokens: F64, prefill_context_pairs: F64, decode_seqs: F64, decode_kv_tokens: F64
) -> F64:
    """``step_s`` of many steps, float64 [k]; arguments are float64 [k] or numbers. Same values as the scalar form."""
    tokens = np.asarray(prefill_tokens + decode_seqs, np.float64)
    compute = np.maximum(st.gemm_s_per_token * tokens, st.weights_s) + st.prefill_attn_s * prefill_context_pairs
    memory = st.kv_read_s_per_token * decode_kv_tokens
    network = st.comm_s_per_token * tokens
    longest = np.maximum(compute, np.maximum(memory, network))
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    busy = longest + exposed * (compute + memory + network - longest)
    return np.where(tokens > 0, busy + st.overhead_s + st.decode_seq_s * decode_seqs, 0.0)


@njit
def chunk_pairs(context_tokens: float, chunk_tokens: float) -> float:
    """(token, context token) pairs of a causal chunk of a tokens behind c others: c · a + a (a + 1) / 2. Compiled."""
    return chunk_tokens * context_tokens + chunk_tokens * (chunk_tokens + 1) / 2


def for_machine(device: Device, model: Model, mode: str = "overlapped", tp: int = 1) -> StepTime:
    """Constants from the device's and the model's rows: peak rates times the efficiencies fitted to kernel profiles
    (``benchmarks/steptime_fit.py``). Raises UsageError for an unknown mode or tp < 1."""
    if mode not in ("overlapped", "sequential") or tp < 1:
        raise UsageError(f"engine mode '{mode}' with tp {tp}: modes are overlapped and sequential, tp is a count >= 1")
    eight_bit = model.weight_bytes == 1.0 and device.flops_8bit > 0
    peak = device.flops_8bit if eight_bit else device.flops
    compute = tp * peak * device.gemm_efficiency
    attention = tp * device.flops * device.gemm_efficiency
    bandwidth = device.bandwidth_bytes_s * device.read_efficiency
    return StepTime(
        gemm_s_per_token=2 * model.active_params / compute,
        weights_s=model.params * model.weight_bytes / (tp * bandwidth),
        prefill_attn_s=4 * model.attention_width * model.layers / attention,
        kv_read_s_per_token=kv_bytes_per_token(model) / (min(tp, model.kv_shards) * bandwidth),
        overhead_s=STEP_OVERHEAD_S + _all_reduces(model, tp) * device.link_latency_s,
        overlapped=1.0 if mode == "overlapped" else 0.0,
        comm_s_per_token=_all_reduces(model, tp) * all_reduce_bytes_s(device, model, tp),
    )


def _all_reduces(model: Model, tp: int) -> int:
    """All-reduces of a step: one behind attention, one behind the MLP of every layer."""
    return 2 * model.layers if tp > 1 else 0


def all_reduce_bytes_s(device: Device, model: Model, tp: int) -> float:
    """Seconds a token in one ring all-reduce of 16-bit hidden states: 2 (tp − 1)/tp · bytes / link bandwidth."""
    if tp == 1:
        return 0.0
    if device.link_bytes_s <= 0:
        raise UsageError(f"{device.name} has no link figure; tensor parallelism cannot be modelled on it")
    return 2 * (tp - 1) / tp * model.hidden * 2 / device.link_bytes_s


PAPER_KV_TOKENS = 457_763
"""KV tokens of ``paper_a100_8b``: 60 GB of 131 072 B."""


def paper_a100_8b(mode: str = "overlapped") -> StepTime:
    """The machine of BlendServe's evaluation as prototyped (research.md §A): Llama-3.1-8B on one A100-80 with
    312e12 x 0.85 FLOP/s and 2.0e12 x 0.9 B/s: weights floor 8.9 ms, 457 763 KV tokens of 131 072 B."""
    a100 = device("A100-80")
    st = for_machine(a100, model("Llama-3.1-8B"), mode)
    read = a100.bandwidth_bytes_s * a100.read_efficiency / (2.0e12 * 0.9)
    gemm = a100.gemm_efficiency / 0.85
    return st._replace(
        gemm_s_per_token=st.gemm_s_per_token * gemm,
        prefill_attn_s=st.prefill_attn_s * gemm,
        weights_s=st.weights_s * read,
        kv_read_s_per_token=st.kv_read_s_per_token * read,
    )
