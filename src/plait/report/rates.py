"""What two kinds of work cost, learned from a run while it goes."""

from __future__ import annotations

import math

PRIOR_WEIGHT = 1e-3


class TwoRates:
    """Seconds per unit of two kinds of work: non-negative least squares over pieces of time."""

    def __init__(self, cost: float) -> None:
        """``cost``: seconds of the second kind over those of the first, as long as the pieces do not show it."""
        self._cost = cost
        self._pp = self._po = self._oo = self._pt = self._ot = 0.0
        self._first = self._second = self._time_s = 0.0

    def add(self, first: float, second: float, took_s: float) -> None:
        """One piece: units of each kind, and seconds > 0. Squares are weighted by 1 / seconds: a long piece is as many
        short ones, and the many short steps of decoding must not be lost beside a few long ones of prefill."""
        self._pp += first * first / took_s
        self._po += first * second / took_s
        self._oo += second * second / took_s
        self._pt += first
        self._ot += second
        self._first += first
        self._second += second
        self._time_s += took_s

    @property
    def seen(self) -> bool:
        """Whether there was any piece."""
        return self._time_s > 0

    def seconds(self, first: float, second: float, passed_s: float | None = None) -> float:
        """Time for so many units, scaled so that the pieces so far take the time they took (or ``passed_s``, where
        there was time between them); nan before any."""
        a, b = self._rates()
        fitted_s = a * self._first + b * self._second
        if fitted_s <= 0:
            return math.nan
        return (a * first + b * second) * (self._time_s if passed_s is None else passed_s) / fitted_s

    def _rates(self) -> tuple[float, float]:
        """The weak prior (the given cost) decides where all pieces have the same mix."""
        if not self._pp or not self._oo:  # one kind of token so far: its rate gives the other's
            a = self._pt / self._pp if self._pp else self._ot / self._oo / self._cost if self._oo else 0.0
            return a, self._cost * a
        weight = PRIOR_WEIGHT * min(self._oo, self._pp / self._cost**2)
        pp, oo = self._pp + weight * self._cost**2, self._oo + weight
        po = self._po - weight * self._cost
        det = pp * oo - po * po
        a = (self._pt * oo - self._ot * po) / det
        b = (self._ot * pp - self._pt * po) / det
        if a < 0:
            return 0.0, self._ot / self._oo
        if b < 0:
            return self._pt / self._pp, 0.0
        return a, b
