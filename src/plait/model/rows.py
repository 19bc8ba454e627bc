"""The table of devices and models itself. Sources: ``docs/hardware.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

_T = 1e12
_MIB = 2.0**20


class Efficiency(NamedTuple):
    """How a device does against its data sheet: constants of one layer's kernels, fitted by benchmarks/steptime_fit.py.

    matrix products = max(weights / weight_read, gemm_base x weights + FLOPs / gemm) + layer_s
    elementwise     = (elementwise_hidden x hidden + elementwise_mlp x MLP width) values a token + elementwise_s
    decode attention = KV bytes / kv_read + attention_s
    prefill attention = prefill_moves x (bytes of queries, keys, values, outputs) + FLOPs / prefill_attention
                        + prefill_s

    where weights = seconds to read them at the full bandwidth.
    """

    gemm: float
    """Share of the peak FLOP/s that large matrix products reach."""
    weight_read: float
    """Share of the bandwidth that reading weights reaches."""
    gemm_base: float
    """Share of the weights' reading time that a compute-bound product still pays (waves, prologue)."""
    layer_s: float
    kv_read: float
    attention_s: float
    prefill_attention: float
    """Share of the peak FLOP/s that prefill attention reaches."""
    prefill_moves: float
    prefill_s: float
    elementwise_hidden: float
    elementwise_mlp: float
    elementwise_s: float


_A100 = Efficiency(0.751, 0.789, 0.705, 26.3e-6, 0.792, 6.9e-6, 0.524, 5.45, 22.1e-6, 12.3, 2.49, 11.2e-6)
_H100 = Efficiency(0.764, 0.937, 0.766, 27.7e-6, 0.792, 6.9e-6, 0.524, 5.45, 22.1e-6, 13.5, 1.60, 8.6e-6)
_A40 = Efficiency(0.801, 0.753, 0.649, 35.2e-6, 0.797, 21.6e-6, 0.328, 5.53, 42.9e-6, 11.0, 1.33, 0.0)
_A30 = Efficiency(0.709, 0.868, 0.756, 69.3e-6, 0.797, 21.6e-6, 0.328, 5.53, 42.9e-6, 37.6, 0.0, 38.4e-6)
_CPU = Efficiency(0.70, 0.80, 0.0, 20e-6, 0.70, 20e-6, 0.35, 2.0, 30e-6, 12.0, 2.0, 10e-6)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or CPU). Peak rates are the vendor's dense figures, without sparsity."""

    name: str
    flops: float
    """16-bit FLOP/s with 32-bit accumulation."""
    bandwidth_bytes_s: float
    memory_bytes: float
    """What the driver reports, before anything is loaded."""
    flops_8bit: float
    """8-bit operations/s; 0 where 8-bit weights run at the 16-bit rate."""
    efficiency: Efficiency
    link_bytes_s: float
    """Bandwidth of a ring all-reduce: 2 (tp − 1)/tp · message bytes / time."""
    link_latency_s: float
    """Fixed time of one all-reduce."""


_NVLINK3, _NVLINK4, _PCIE4 = (175e9, 57.5e-6), (330e9, 25e-6), (23.7e9, 57.6e-6)

DEVICES = {
    row.name: row
    for row in (
        Device("A100-80", 312 * _T, 2.039 * _T, 81920 * _MIB, 624 * _T, _A100, *_NVLINK3),
        Device("A100-40", 312 * _T, 1.555 * _T, 40960 * _MIB, 624 * _T, _A100, *_NVLINK3),
        Device("H100", 989.4 * _T, 3.35 * _T, 81559 * _MIB, 1978.9 * _T, _H100, *_NVLINK4),
        Device("H200", 989.4 * _T, 4.8 * _T, 143771 * _MIB, 1978.9 * _T, _H100, *_NVLINK4),
        Device("B200", 2250 * _T, 8.0 * _T, 183359 * _MIB, 4500 * _T, _H100, 660e9, 25e-6),
        Device("L40S", 362.05 * _T, 0.864 * _T, 46068 * _MIB, 733 * _T, _A40, *_PCIE4),
        Device("A40", 149.7 * _T, 0.696 * _T, 46068 * _MIB, 299.3 * _T, _A40, *_PCIE4),
        Device("A30", 165 * _T, 0.933 * _T, 24576 * _MIB, 330 * _T, _A30, *_PCIE4),
        Device("A10", 125 * _T, 0.600 * _T, 23028 * _MIB, 250 * _T, _A40, *_PCIE4),
        Device("RTX 4090", 165.2 * _T, 1.008 * _T, 24564 * _MIB, 330.3 * _T, _A40, *_PCIE4),
        Device("MI300X", 1307.4 * _T, 5.3 * _T, 196592 * _MIB, 2614.9 * _T, _H100, *_NVLINK4),
        Device("CPU", 0.35 * _T, 0.036 * _T, 16384 * _MIB, 0.0, _CPU, 10e9, 20e-6),
    )
}
DEVICES |= {"A100": DEVICES["A100-80"], "4090": DEVICES["RTX 4090"]}


def _dense(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    """An HF config of the Llama family: gated MLP, grouped-query attention."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **more,
    }


MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": _dense(32, 4096, 32, 32, 11008, 32000),
    "Llama-2-13B": _dense(40, 5120, 40, 40, 13824, 32000),
    "Llama-2-70B": _dense(80, 8192, 64, 8, 28672, 32000),
    "Llama-3.1-8B": _dense(32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _dense(80, 8192, 64, 8, 28672, 128256),
    "Llama-3-8B": _dense(32, 4096, 32, 8, 14336, 128256),
    "Llama-3-70B": _dense(80, 8192, 64, 8, 28672, 128256),
    "Qwen-2.5-7B": _dense(28, 3584, 28, 4, 18944, 152064),
    "Qwen-2.5-72B": _dense(80, 8192, 64, 8, 29568, 152064),
    "Qwen-3-8B": _dense(36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "Qwen-3-32B": _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "Qwen-3-30B-A3B": _dense(
        48, 2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "Mistral-7B": _dense(32, 4096, 32, 8, 14336, 32768),
    "Mixtral-8x7B": _dense(32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "DeepSeek-67B": _dense(95, 8192, 64, 8, 22016, 102400),
    "DeepSeek-V2-Lite": _dense(
        27,
        2048,
        16,
        16,
        10944,
        102400,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "DeepSeek-V3": _dense(
        61,
        7168,
        128,
        128,
        18432,
        129280,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    ),
    "SmolLM2-135M": _dense(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
}
