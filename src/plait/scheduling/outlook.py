"""What is still to come: chances of survival by age, and the memory traffic that waiting and running rows will
cause."""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.scheduling.profile import BINS_AN_OCTAVE
from plait.scheduling.state import AGE_BINS
from plait.table import F64, I64

BEYOND_SEEN = 2.0
"""No answer is planned to be longer than this many times the longest one seen: curves say nothing out there."""


@njit
def chances(survival: F64, grid_tokens: I64, tau: F64, out: F64) -> None:
    """Fill ``out`` [C, AGE_BINS, T]: the chance that a row of class c and that age is alive tau steps later, from the
    classes' survival curves [C, G]. Beyond everything seen the tail is scale-free: (g + 1) / (g + tau + 1)."""
    for c in range(len(survival)):
        for b in range(AGE_BINS):
            age = 2.0 ** (b / BINS_AN_OCTAVE) - 1.0
            k = np.searchsorted(grid_tokens, age, side="right") - 1
            now = _at(survival[c], grid_tokens, age, k)
            for t in range(len(tau)):
                later = age + tau[t]
                while k + 1 < len(grid_tokens) and grid_tokens[k + 1] <= later:
                    k += 1
                if now > 1e-6:
                    out[c, b, t] = min(1.0, _at(survival[c], grid_tokens, later, k) / now)
                else:
                    out[c, b, t] = (age + 1.0) / (later + 1.0)


@njit
def _at(curve: F64, grid_tokens: I64, x: float, k: int) -> float:
    """Curve at x, which lies between grid points k and k + 1."""
    if k + 1 >= len(grid_tokens):
        return float(curve[-1])
    share = (x - grid_tokens[k]) / (grid_tokens[k + 1] - grid_tokens[k])
    return float(curve[k] + share * (curve[k + 1] - curve[k]))


def moments(survival: F64, grid_tokens: I64, longest: float) -> tuple[F64, F64]:
    """E[d] and E[d^2] of every class, float64 [C] each, for answers up to ``longest`` tokens."""
    edges = np.minimum(grid_tokens.astype(np.float64), max(1.0, longest))
    width, middle = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    height = (survival[:, 1:] + survival[:, :-1]) / 2
    return np.maximum((height * width).sum(axis=1), 1.0), np.maximum(2.0 * (height * width * middle).sum(axis=1), 1.0)
