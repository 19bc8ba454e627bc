"""BlendServe's dual scan (arXiv 2411.16102 section 5): rows sorted by density, served from both ends at once."""

from __future__ import annotations

import numpy as np

from plait.policy.base import Order, View
from plait.tree.arrange import densest_first

DENSEST = 1e6
"""Stands for the infinite density of rows without memory time."""


def dual_scan(view: View) -> Order:
    """The arrangement of ``plait.tree.arrange`` (sort, conditional split, merge), its densities as keys; the right
    cursor reads the same order backwards. Densities come from the engine's step-time constants, as Comp and Mem
    do."""
    st, table = view.step_time, view.table
    prompt, output = table.prompt_tokens.astype(np.float64), view.expected_output_tokens
    compute = st.gemm_s_per_token * (prompt + output) + st.prefill_attn_s * prompt * (prompt + 1) / 2
    memory = st.kv_read_s_per_token * (prompt * output + output**2 / 2)
    rows, density = densest_first(view.tree, table.prompt_tokens, compute, memory)
    return Order(rows, key=np.minimum(density, DENSEST), right=rows[::-1].copy(), kernel="dual-scan")
