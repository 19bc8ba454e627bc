"""Length estimates sharpened by prefix group: a job may have far more groups than length classes."""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.table import F64, I64


class UnitMeans:
    """Running means of the answers of each unit, shrunk to what the row's class says (Buhlmann credibility): an
    answer of the unit counts against the class as the variance between units against that inside."""

    def __init__(self, unit: I64) -> None:
        """``unit``: int64 [n]; none where nothing is estimated."""
        units = int(unit.max(initial=-1)) + 1
        self._unit = unit
        self._idle = units == len(unit)
        self._count, self._total, self._square = np.zeros(units), np.zeros(units), np.zeros(units)

    def observe(self, rows: I64, output_tokens: I64) -> None:
        """Outputs of finished rows."""
        if not self._idle:
            _count(self._unit, rows, output_tokens, (self._count, self._total, self._square))

    def refine(self, expected: F64) -> F64:
        """Expected output of each row given its unit's answers, float64 [n]."""
        seen = self._count > 0
        if self._idle or not seen.any():
            return expected
        n, total = self._count[seen], self._total[seen]
        inside = float((self._square[seen] - total**2 / n).sum()) / max(1.0, float((n - 1).sum()))
        grand = total.sum() / n.sum()
        between = (float((n * (total / n - grand) ** 2).sum()) - (len(n) - 1) * inside) / max(
            1.0, float(n.sum() - (n**2).sum() / n.sum())
        )
        if between <= 0.0:
            return expected
        weight = max(inside / between, 1e-3)
        return _credible(self._unit, self._total, self._count, weight, expected)


@njit
def _count(unit: I64, rows: I64, output_tokens: I64, sums: tuple[F64, F64, F64]) -> None:
    """Add answers to (number, tokens, their squares) of the rows' units."""
    count, total, square = sums
    for i in range(len(rows)):
        u, tokens = unit[rows[i]], float(output_tokens[i])
        count[u] += 1.0
        total[u] += tokens
        square[u] += tokens * tokens


@njit
def _credible(unit: I64, total: F64, count: F64, weight: float, expected: F64) -> F64:
    """Mean of each row's unit and of ``weight`` answers as expected, float64 [n]."""
    out = np.empty(len(unit))
    for row in range(len(unit)):
        u = unit[row]
        out[row] = (total[u] + weight * expected[row]) / (count[u] + weight)
    return out
