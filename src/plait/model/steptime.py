"""How long one engine step takes: sequential or overlapped, from a handful of constants.

Apart from ``plait.model.cost`` on purpose: the planner ranks requests with the paper's cost equations, the simulator and
the ETA use what a machine does.
"""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """Constants of one engine on one machine. A NamedTuple of floats, so compiled code takes it as it is.

        compute = max(gemm_s_per_token x (prefill + decode tokens), weights_s) + prefill_attn_s x (prefill token x context pairs)
        memory  = kv_read_s_per_token x (KV tokens read by decodes)
        overlapped: max(compute, memory) + interference x min(compute, memory) + overhead_s
        sequential: compute + memory + overhead_s
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
    interference: float = 0.15
    overlapped: float = 1.0
    """1.0 overlapped, 0.0 sequential."""
    comm_s_per_token: float = 0.0
    """All-reduce seconds per token (tensor parallelism); hidden under memory time by an overlapped engine."""
