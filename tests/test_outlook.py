"""Chances of survival, read off the survival curves."""

from __future__ import annotations

import numpy as np
import pytest

from plait.lengths.survival import grid
from plait.scheduling.outlook import chances
from plait.scheduling.state import AGE_BINS


def filled(survival: np.ndarray, tau: np.ndarray) -> np.ndarray:
    out = np.zeros((len(survival), AGE_BINS, len(tau)))
    chances(survival, grid(), tau, out)
    return out


def test_the_chance_is_the_survival_curve_later_over_the_curve_now() -> None:
    at = grid()
    rng = np.random.default_rng(0)
    survival = np.sort(rng.random((3, len(at))), axis=1)[:, ::-1].copy()
    tau = np.array([0.0, 1.0, 7.5, 300.0, 5e6])
    found = filled(survival, tau)
    for c in range(3):
        for b in range(0, AGE_BINS, 7):
            age = 2.0 ** (b / 4) - 1
            expected = np.interp(age + tau, at, survival[c]) / np.interp(age, at, survival[c])
            assert found[c, b] == pytest.approx(expected, rel=1e-12)


def test_beyond_everything_seen_the_tail_is_scale_free() -> None:
    survival = (grid() < 10).astype(float)[None, :]
    found = filled(survival, np.array([0.0, 99.0]))
    age = 2.0 ** (40 / 4) - 1
    assert found[0, 40] == pytest.approx([1.0, (age + 1) / (age + 100)])
