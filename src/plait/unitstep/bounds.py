"""Lower bounds on TEL, the sum of completion steps, in the unit-step model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.table import F64, I64
from plait.unitstep.kernel import area, running_at_once

LP_ROWS = 2_500
"""Up to this many requests the LP bound takes a few seconds at most, and can exceed the mean-busy-time one."""
WAVES_ROWS = 12_000
WAVES = 40
"""Up to WAVES_ROWS it takes some ten seconds, and exceeds the other where few times as many wait as run at once."""


class Bound(NamedTuple):
    """A lower bound on TEL and how it was found."""

    tel: float
    kind: str


def centroid(prompt_tokens: I64, output_tokens: I64) -> F64:
    """Mean step, counted from the start, at which a request holds its memory: Σ j (s + j) / Σ (s + j), float64 [n]."""
    s, o = prompt_tokens.astype(np.float64), output_tokens.astype(np.float64)
    moment = s * o * (o + 1) / 2 + o * (o + 1) * (2 * o + 1) / 6
    return moment / area(prompt_tokens, output_tokens)


def mean_busy_time(prompt_tokens: I64, output_tokens: I64, kv_tokens: int) -> float:
    """Bound by mean busy times, O(n log n); research.md §B.

    A completion is the mean busy step + (o - centroid). Mean busy steps sum to at least their sum when memory is
    divisible and served by ascending area; work inside a step counts at its end, half a step a request on average.
    No request completes before its own output length either.
    """
    areas = np.sort(area(prompt_tokens, output_tokens))
    busy = float(np.sum(np.cumsum(areas) - areas / 2)) / kv_tokens + len(areas) / 2
    after = float(np.sum(output_tokens - centroid(prompt_tokens, output_tokens)))
    return max(busy + after, float(np.sum(output_tokens)))


def best_bound(prompt_tokens: I64, output_tokens: I64, kv_tokens: int, target: float) -> Bound:
    """The larger of the mean-busy-time bound and, where it can be more, the Lagrangian LP bound.

    ``target`` is the TEL of some schedule, the better the better (lp.lagrangian_bound).
    """
    from plait.unitstep.lp import lagrangian_bound  # needs this module's estimates

    busy = Bound(mean_busy_time(prompt_tokens, output_tokens, kv_tokens), "mean busy time")
    n = len(prompt_tokens)
    few_waves = n <= WAVES_ROWS and n <= WAVES * running_at_once(prompt_tokens, output_tokens, kv_tokens)
    if n > LP_ROWS and not few_waves:
        return busy
    return max(busy, Bound(lagrangian_bound(prompt_tokens, output_tokens, kv_tokens, target), "Lagrangian LP"))
