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
from plait.model.specs import Model, device, kv_bytes_per_token, kv_bytes_per_token_and_rank, model, peak_flops
from plait.table import F64

MODES = {"overlapped": 1.0, "sequential": 0.0}
"""Engine mode -> StepTime.overlapped."""

INTERFERENCE = 0.15
"""Share of the hidden side's time that an overlapped step still loses (research.md §A; benchmarks/gpu_overlap.py)."""
STEP_OVERHEAD_S = 1.5e-3
"""Scheduling, sampling and launch time of a step that nothing hides (research.md §A)."""

ASSUMED_DEVICE, ASSUMED_MODEL = "A100-80", "Llama-3.1-8B"
"""Whose proportions of compute and memory time are assumed of engines that nobody has measured."""


class StepTime(NamedTuple):
    """Constants of one engine on one machine. A NamedTuple of floats, so compiled code takes it as it is.

    compute = max(gemm_base_s + gemm_s_per_token x (prefill + decode tokens), weights_s)
              + prefill_attn_s x (prefill token, context token) pairs
    memory  = kv_read_s_per_token x (KV tokens read by decodes)
    network = comm_base_s + comm_s_per_token x (prefill + decode tokens)
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
    gemm_base_s: float = 0.0
    """What a step's matrix products take beside ``gemm_s_per_token`` once they are bound by compute."""
    comm_base_s: float = 0.0
    """Fixed time of a step's all-reduces."""


@njit
def step_s(
    st: StepTime, prefill_tokens: float, prefill_context_pairs: float, decode_seqs: float, decode_kv_tokens: float
) -> float:
    """Seconds of one step: ``prefill_tokens`` new prompt tokens that attend to ``prefill_context_pairs`` (token,
    context token) pairs, and ``decode_seqs`` sequences that read ``decode_kv_tokens`` of KV together. A step
    without work takes no time. Compiled: kernels call it."""
    tokens = prefill_tokens + decode_seqs
    if tokens <= 0:
        return 0.0
    compute = (
        max(st.gemm_base_s + st.gemm_s_per_token * tokens, st.weights_s) + st.prefill_attn_s * prefill_context_pairs
    )
    memory = st.kv_read_s_per_token * decode_kv_tokens
    network = st.comm_base_s + st.comm_s_per_token * tokens
    longest = max(compute, max(memory, network))
    hidden = compute + memory + network - longest
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    return longest + exposed * hidden + st.overhead_s + st.decode_seq_s * decode_seqs


def empty_step_s(st: StepTime) -> float:
    """Fixed time of a step, in seconds: what it takes however little is in it."""
    return max(st.weights_s, st.gemm_base_s) + st.overhead_s + st.comm_base_s


def steps_s(
    st: StepTime, prefill_tokens: F64, prefill_context_pairs: F64, decode_seqs: F64, decode_kv_tokens: F64
) -> F64:
    """``step_s`` of many steps, float64 [k]; arguments are float64 [k] or numbers. Same values as the scalar form."""
    tokens = np.asarray(prefill_tokens + decode_seqs, np.float64)
    compute = (
        np.maximum(st.gemm_base_s + st.gemm_s_per_token * tokens, st.weights_s)
        + st.prefill_attn_s * prefill_context_pairs
    )
    memory = st.kv_read_s_per_token * decode_kv_tokens
    network = st.comm_base_s + st.comm_s_per_token * tokens
    longest = np.maximum(compute, np.maximum(memory, network))
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    busy = longest + exposed * (compute + memory + network - longest)
    return np.where(tokens > 0, busy + st.overhead_s + st.decode_seq_s * decode_seqs, 0.0)


@njit
def chunk_pairs(context_tokens: float, chunk_tokens: float) -> float:
    """(token, context token) pairs of a causal chunk of a tokens behind c others: c · a + a (a + 1) / 2. Compiled."""
    return chunk_tokens * context_tokens + chunk_tokens * (chunk_tokens + 1) / 2


class LayerTime(NamedTuple):
    """Kernel times of one layer on one rank, in seconds."""

    weights_s: float
    """Matrix products of a few tokens: bound by reading the weights."""
    gemm_base_s: float
    gemm_token_s: float
    """Matrix products of many tokens: gemm_base_s + gemm_token_s x tokens."""
    elementwise_base_s: float
    elementwise_token_s: float
    """Norms, rotary embedding, activation, residuals."""
    attention_base_s: float
    kv_read_s: float
    """Decode attention: attention_base_s + kv_read_s x KV tokens."""
    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    """Prefill attention: prefill_base_s + prefill_token_s x tokens + prefill_pair_s x (token, context token) pairs."""
    all_reduce_s: float
    all_reduce_token_s: float
    """The two all-reduces of a layer together; 0 without tensor parallelism."""


def layer_time(device: Device, model: Model, tp: int = 1) -> LayerTime:
    """What the device's fitted efficiencies say about one layer of the model split over ``tp`` ranks."""
    good, bandwidth = device.efficiency, device.bandwidth_bytes_s
    layer_weights = (model.params - model.embedding_params) / model.layers * model.weight_bytes / tp
    values = good.elementwise_hidden * model.hidden + good.elementwise_mlp * model.layer_params / model.hidden / tp
    message_s_per_token = 2 * (tp - 1) / tp * model.hidden * 2 / device.link_bytes_s
    return LayerTime(
        weights_s=layer_weights / bandwidth / good.weight_read + good.layer_s,
        gemm_base_s=good.gemm_base * layer_weights / bandwidth + good.layer_s,
        gemm_token_s=2 * model.layer_params / tp / (peak_flops(device, model) * good.gemm),
        elementwise_base_s=good.elementwise_s,
        elementwise_token_s=2 * values / bandwidth,
        attention_base_s=good.attention_s,
        kv_read_s=kv_bytes_per_token_and_rank(model, tp) / model.layers / (bandwidth * good.kv_read),
        prefill_base_s=good.prefill_s,
        prefill_token_s=good.prefill_moves * (2 * model.attention_width + model.kv_values) / tp * 2 / bandwidth,
        prefill_pair_s=4 * model.attention_width / tp / (device.flops * good.prefill_attention),
        all_reduce_s=2 * device.link_latency_s if tp > 1 else 0.0,
        all_reduce_token_s=2 * message_s_per_token,
    )


def for_machine(device: Device, model: Model, mode: str = "overlapped", tp: int = 1) -> StepTime:
    """Constants from the device's and the model's rows, with the efficiencies fitted to kernel profiles.

    The fixed time of decode attention counts as overhead, as does the LM head of sampled tokens.
    Raises UsageError for an unknown mode or tp < 1.
    """
    overlapped, layers, layer = _overlapped(mode), model.layers, layer_time(device, model, _checked(tp))
    elementwise_s = layers * layer.elementwise_base_s
    head_s = model.head_params * model.weight_bytes / tp / (device.bandwidth_bytes_s * device.efficiency.weight_read)
    return StepTime(
        gemm_s_per_token=layers * (layer.gemm_token_s + layer.elementwise_token_s + layer.prefill_token_s),
        weights_s=layers * layer.weights_s + elementwise_s + head_s,
        prefill_attn_s=layers * layer.prefill_pair_s,
        kv_read_s_per_token=layers * layer.kv_read_s,
        overhead_s=STEP_OVERHEAD_S + layers * layer.attention_base_s,
        decode_seq_s=2 * model.head_params / tp / (peak_flops(device, model) * device.efficiency.gemm),
        overlapped=overlapped,
        comm_s_per_token=layers * layer.all_reduce_token_s,
        gemm_base_s=layers * (layer.gemm_base_s + layer.prefill_base_s) + elementwise_s,
        comm_base_s=layers * layer.all_reduce_s,
    )


def assumed() -> StepTime:
    """Constants of an engine that nobody has measured."""
    return for_machine(device(ASSUMED_DEVICE), model(ASSUMED_MODEL), "sequential")


def _overlapped(mode: str) -> float:
    if mode not in MODES:
        raise UsageError(f"unknown engine mode '{mode}'; known: {', '.join(MODES)}")
    return MODES[mode]


def _checked(tp: int) -> int:
    if tp < 1:
        raise UsageError(f"tp is {tp}; a whole number >= 1 is needed")
    return tp


PAPER_KV_TOKENS = 457_763
"""KV tokens of ``paper_a100_8b``: 60 GB of 131 072 B."""


def paper_a100_8b(mode: str = "overlapped") -> StepTime:
    """The machine of BlendServe's evaluation as prototyped (research.md §A): Llama-3.1-8B on one A100-80 with
    312e12 x 0.85 FLOP/s and 2.0e12 x 0.9 B/s: weights floor 8.9 ms, 457 763 KV tokens of 131 072 B, 1.5 ms overhead."""
    llama = model("Llama-3.1-8B")
    flops, bandwidth = 312e12 * 0.85, 2.0e12 * 0.9
    return StepTime(
        gemm_s_per_token=2 * llama.params / flops,
        weights_s=2 * llama.params / bandwidth,
        prefill_attn_s=4 * llama.attention_width * llama.layers / flops,
        kv_read_s_per_token=kv_bytes_per_token(llama) / bandwidth,
        overhead_s=STEP_OVERHEAD_S,
        overlapped=_overlapped(mode),
    )
