"""What intervals tell about each other: the distribution of all lengths, and each length's own part of it.

Turnbull's estimator (1976), the likeliest distribution behind interval-censored data, by a few rounds of its EM, which
leaves it smooth. A length is then distributed like it, cut to the length's own interval.
"""

from __future__ import annotations

import numpy as np

from plait.table import F64, I64

GRID_RATIO = 1.06
ROUNDS = 15
QUANTILES = 16
"""Points, equally likely, that stand for the distribution of one length."""
LEAST = 1e-12
"""Probability that every place of the grid keeps, so that no interval is empty."""


def quantiles(lower: I64, upper: I64) -> F64:
    """Ascending, equally likely values of each length in [lower, upper], float64 [n, QUANTILES]."""
    places = np.unique(np.round(GRID_RATIO ** np.arange(np.log(upper.max()) / np.log(GRID_RATIO) + 1)))
    first = np.searchsorted(places, lower, side="right") - 1
    last = np.maximum(np.searchsorted(places, upper, side="right"), first + 1)
    below = _cumulative(_fitted(first, last, len(places)))
    level = (np.arange(QUANTILES) + 0.5) / QUANTILES
    wanted = below[first, None] + level * (below[last] - below[first])[:, None]
    found = places[np.clip(np.searchsorted(below, wanted) - 1, 0, len(places) - 1)]
    return np.clip(found, lower[:, None], upper[:, None])


def _fitted(first: I64, last: I64, size: int) -> F64:
    """Probability of each place of the grid, float64 [size]; length i lies at one of the places first[i]..last[i] - 1.

    A round shares each length out over its places by the probabilities so far; its places are a stretch, so that sums
    of differences do it in O(n + size)."""
    probability = np.full(size, 1.0 / size)
    for _ in range(ROUNDS):
        below = _cumulative(probability)
        share = 1.0 / (below[last] - below[first])
        here = np.cumsum(np.bincount(first, share, size + 1) - np.bincount(last, share, size + 1))[:size]
        probability = np.maximum(probability * here / len(first), LEAST)
    return probability


def _cumulative(probability: F64) -> F64:
    return np.concatenate([[0.0], np.cumsum(probability)])
