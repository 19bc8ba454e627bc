"""What lies below each node: compute and memory time, prompt tokens shared, compute density (BlendServe section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait._numba import njit
from plait.table import F64, I32, I64
from plait.tree.prefix import PrefixTree


@dataclass(frozen=True, slots=True)
class Annotation:
    """Per node, m nodes; each sums over the rows below it."""

    rows: I64  # [m]
    compute_s: F64  # [m] T_comp without sharing
    memory_s: F64  # [m] T_mem
    prompt_tokens: I64  # [m]
    unique_tokens: I64  # [m] prompt tokens beyond what the node's parent holds, each shared segment counted once
    saved_tokens: I64  # [m] prompt tokens that need no computing if these rows run together, from nothing
    density: F64  # [m] rho(R) = (1 - s) T_comp / T_mem of these rows alone; inf where no memory time
    added_density: F64  # [m] the same with the parent's tokens already cached: what the node adds to a schedule there

    @property
    def sharing(self) -> F64:
        """Sharing ratio s of the rows below each node, float64 [m]."""
        return self.saved_tokens / np.maximum(self.prompt_tokens, 1)


def annotate(tree: PrefixTree, prompt_tokens: I64, compute_s: F64, memory_s: F64) -> Annotation:
    """Sum the rows' compute and memory seconds (each [n], without sharing) up the tree. One pass, O(n + m)."""
    return annotate_arrays(tree.parent, tree.prefix_tokens, tree.node_of, prompt_tokens, compute_s, memory_s)


def annotate_arrays(
    parent: I32, prefix_tokens: I64, node_of: I32, prompt_tokens: I64, compute_s: F64, memory_s: F64
) -> Annotation:
    """``annotate`` for a tree that is still being changed; only needs ``parent[v] < v``."""
    m = len(parent)
    rows = np.zeros(m, np.int64)
    tokens, unique = np.zeros(m, np.int64), np.zeros(m, np.int64)
    compute, memory = np.zeros(m), np.zeros(m)
    _sum_up(
        (parent, prefix_tokens, node_of), (prompt_tokens, compute_s, memory_s), (rows, tokens, unique, compute, memory)
    )
    above = np.where(parent >= 0, prefix_tokens[np.maximum(parent, 0)], 0)
    # a node that all rows have left holds nothing, not even the path to it
    saved = np.where(rows > 0, tokens - unique - above, 0)
    return Annotation(
        rows=rows,
        compute_s=compute,
        memory_s=memory,
        prompt_tokens=tokens,
        unique_tokens=unique,
        saved_tokens=saved,
        density=density(compute, memory, saved / np.maximum(tokens, 1)),
        added_density=density(compute, memory, 1.0 - unique / np.maximum(tokens, 1)),
    )


def density(compute_s: F64, memory_s: F64, sharing: F64) -> F64:
    """rho = (1 - s) T_comp / T_mem, elementwise; inf where there is no memory time."""
    out = np.full(len(compute_s), np.inf)
    np.divide((1.0 - sharing) * compute_s, memory_s, out=out, where=memory_s > 0)
    return out


@njit
def _sum_up(tree: tuple[I32, I64, I32], given: tuple[I64, F64, F64], out: tuple[I64, I64, I64, F64, F64]) -> None:
    """Fill (rows, prompt tokens, unique tokens, compute, memory) by node, given (prompt tokens, compute, memory)."""
    parent, prefix_tokens, node_of = tree
    prompt_tokens, compute_s, memory_s = given
    rows, tokens, unique, compute, memory = out
    for r in range(len(node_of)):
        v = node_of[r]
        rows[v] += 1
        tokens[v] += prompt_tokens[r]
        unique[v] += prompt_tokens[r] - prefix_tokens[v]
        compute[v] += compute_s[r]
        memory[v] += memory_s[r]
    for v in range(len(parent) - 1, 0, -1):
        p = parent[v]
        if rows[v] > 0:
            unique[v] += prefix_tokens[v] - prefix_tokens[p]
        rows[p] += rows[v]
        tokens[p] += tokens[v]
        unique[p] += unique[v]
        compute[p] += compute[v]
        memory[p] += memory[v]
