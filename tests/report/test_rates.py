"""Rates of several kinds of work, from pieces whose cost is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.report.rates import Rates

positive = st.floats(0.01, 100.0)
units = st.just(0.0) | positive


@given(st.lists(positive, min_size=3, max_size=3), st.integers(0, 5))
def test_pieces_of_different_mix_show_each_rate(true: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = Rates((1.0, 1.0, 1.0))
    pieces = rng.uniform(0.0, 1.0, (400, 3))
    for units in pieces:
        rates.add(units, float(units @ np.array(true)))
    asked = rng.uniform(0.0, 1.0, 3)
    assert rates.seconds(asked) == pytest.approx(float(asked @ np.array(true)), rel=0.15)


def test_what_the_pieces_do_not_tell_apart_keeps_the_proportions_of_the_guess() -> None:
    rates = Rates((1.0, 4.0))
    for _ in range(10):
        rates.add((2.0, 1.0), 3.0)
    assert rates.seconds((1.0, 0.0)) == pytest.approx(0.5) and rates.seconds((0.0, 1.0)) == pytest.approx(2.0)
    alone = Rates((1.0, 4.0))
    alone.add((10.0, 0.0), 5.0)
    assert alone.seconds((0.0, 1.0)) == pytest.approx(2.0, rel=0.05)


def test_a_machine_slow_at_one_kind_is_not_taken_to_be_as_slow_at_another() -> None:
    rates = Rates((1.0, 1.0), follows=(0.5, 1.0))
    for _ in range(100):
        rates.add((1.0, 99.0), 1.0 * 4 + 99.0 * 16)
    assert rates.seconds((1.0, 0.0)) == pytest.approx(4.0, rel=0.01)
    assert rates.seconds((0.0, 1.0)) == pytest.approx(16.0, rel=0.01)


def test_a_machine_that_gets_slower_is_followed() -> None:
    rates = Rates((1.0, 1.0))
    for k in range(600):
        rates.add((1.0 + k % 2, 1.0), (2.0 + k % 2) * (1.0 if k < 200 else 2.0))
    assert rates.seconds((1.0, 1.0)) == pytest.approx(4.0, rel=0.05)


def test_nothing_is_said_before_the_first_piece() -> None:
    rates = Rates((1.0, 1.0))
    assert math.isnan(rates.seconds((1.0, 1.0)))


@given(st.lists(st.tuples(units, units, positive), min_size=1, max_size=30))
def test_no_rate_is_ever_negative(pieces: list[tuple[float, float, float]]) -> None:
    rates = Rates((1.0, 4.0))
    for first, second, took_s in pieces:
        rates.add((first, second), took_s)
    if sum(first + second for first, second, _ in pieces) > 0:
        assert rates.seconds((1.0, 0.0)) >= 0 and rates.seconds((0.0, 1.0)) >= 0
