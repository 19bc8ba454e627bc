"""What several kinds of work cost, learned from a run while it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from plait.table import F64

GUESS_SHARE = 1e-4
"""The guess counts like this share of the time so far, beside ``guess_s``."""
GUESS_S = 0.5
RECENT_S = 60.0
"""A machine that gets slower or faster is followed in about this time."""
ROUNDS = 200


class Rates:
    """Seconds per unit of k kinds of work: non-negative least squares over pieces of time."""

    def __init__(
        self, guess: Sequence[float], guess_s: float = GUESS_S, follows: Sequence[float] | None = None
    ) -> None:
        """``guess``: seconds per unit of each kind, for the pieces that do not tell kinds apart; it counts like
        ``guess_s`` seconds of pieces. On a machine f times as slow as guessed a kind costs f ** ``follows`` times its
        guess (1: all kinds keep their proportions)."""
        self._guess_s = guess_s
        self._guess = np.array(guess, np.float64)
        self._follows = np.ones(len(self._guess)) if follows is None else np.array(follows, np.float64)
        k = len(self._guess)
        self._products, self._units, self._recent = np.zeros((k, k)), np.zeros(k), np.zeros(k)
        self._time_s = self._recent_s = 0.0

    def add(self, units: Sequence[float] | F64, took_s: float) -> None:
        """One piece: units of each kind, and seconds > 0. Squares are weighted by 1 / seconds: a long piece is as many
        short ones, and the many short steps of decoding must not be lost beside a few long ones of prefill."""
        work = np.asarray(units, np.float64)
        self._products += np.outer(work, work) / took_s
        self._units += work
        self._time_s += took_s
        keep = math.exp(-took_s / RECENT_S)
        self._recent = keep * self._recent + work
        self._recent_s = keep * self._recent_s + took_s

    def seconds(self, units: Sequence[float] | F64) -> float:
        """Time for so many units at the speed of the latest pieces; nan before any."""
        rates = self._fit()
        recent_s = float(rates @ self._recent)
        if recent_s <= 0:
            return math.nan
        return float(rates @ np.asarray(units, np.float64)) * self._recent_s / recent_s

    def _fit(self) -> F64:
        """Seconds per unit. Solved for the factors by which the guess, scaled to the time so far, is wrong."""
        if float(self._guess @ self._units) <= 0:
            return np.zeros(len(self._guess))
        scaled = self._scaled_guess()
        weight = self._guess_s + GUESS_SHARE * self._time_s
        matrix = self._products * np.outer(scaled, scaled) + weight * np.eye(len(scaled))
        right = self._units * scaled + weight
        factor = np.ones(len(scaled))
        for _ in range(ROUNDS):
            before = factor.copy()
            for j in range(len(factor)):
                factor[j] = max(0.0, factor[j] + (right[j] - float(matrix[j] @ factor)) / matrix[j, j])
            if np.abs(factor - before).max() < 1e-6:
                break
        rates: F64 = scaled * factor
        return rates

    def _scaled_guess(self) -> F64:
        """The guess for a machine on which it explains the time so far. Newton's method, convex in log f."""
        log_f = 0.0
        for _ in range(ROUNDS):
            guess = self._guess * np.exp(log_f * self._follows)
            guessed_s = float(guess @ self._units)
            step = math.log(self._time_s / guessed_s) * guessed_s / float((guess * self._follows) @ self._units)
            log_f += step
            if abs(step) < 1e-6:
                break
        scaled: F64 = self._guess * np.exp(log_f * self._follows)
        return scaled
