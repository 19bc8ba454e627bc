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
    classes' survival curves [C, G]. Beyond everything seen the tail is scale-free: (g + 1) / (g + tau + 1).

    Where on the grid the ages and the later instants lie is the same for all classes and found once."""
    points = len(tau)
    k, share = np.empty((AGE_BINS, points + 1), np.int64), np.empty((AGE_BINS, points + 1))
    tail = np.empty((AGE_BINS, points))
    for b in range(AGE_BINS):
        age = 2.0 ** (b / BINS_AN_OCTAVE) - 1.0
        for t in range(points):
            k[b, t], share[b, t] = _place(grid_tokens, age + tau[t])
            tail[b, t] = (age + 1.0) / (age + tau[t] + 1.0)
        k[b, points], share[b, points] = _place(grid_tokens, age)
    for c in range(len(survival)):
        curve = survival[c]
        for b in range(AGE_BINS):
            j = k[b, points]
            now = curve[j] + share[b, points] * (curve[j + 1] - curve[j])
            if now > 1e-6:
                for t in range(points):
                    j = k[b, t]
                    out[c, b, t] = min(1.0, (curve[j] + share[b, t] * (curve[j + 1] - curve[j])) / now)
            else:
                out[c, b] = tail[b]


@njit
def _place(grid_tokens: I64, x: float) -> tuple[int, float]:
    """(j, share): x lies between grid points j and j + 1, that share of the way; the last point stands for all beyond
    it."""
    j = int(np.searchsorted(grid_tokens, x, side="right")) - 1
    if j + 1 >= len(grid_tokens):
        return len(grid_tokens) - 2, 1.0
    return j, (x - grid_tokens[j]) / (grid_tokens[j + 1] - grid_tokens[j])


def moments(survival: F64, grid_tokens: I64, longest: float) -> tuple[F64, F64]:
    """E[d] and E[d^2] of every class, float64 [C] each, for answers up to ``longest`` tokens."""
    edges = np.minimum(grid_tokens.astype(np.float64), max(1.0, longest))
    width, middle = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    height = (survival[:, 1:] + survival[:, :-1]) / 2
    return np.maximum((height * width).sum(axis=1), 1.0), np.maximum(2.0 * (height * width * middle).sum(axis=1), 1.0)
