"""Expected future KV footprint of running rows: mean and variance at TAU_POINTS future instants.

A row with g generated tokens is alive tau steps from now with probability S(g + tau) / S(g), S being its class's
survival curve, and then holds private + g + tau tokens. Summing over rows gives the mean of the total; its variance
gives the headroom a job needs, instead of a tuned share of the cache. With known lengths S is a step and the variance
is 0. """

from __future__ import annotations

import math

import numpy as np

from plait._numba import njit
from plait.scheduling.kv import free_tokens, uncached
from plait.scheduling.state import (
    AGE_BINS,
    DECODE,
    LEFT,
    RIGHT,
    TAU_POINTS,
    Records,
    alive_of,
    expected_of,
    mean_of,
    rows_of,
    tau_of,
    variance_of,
)
from plait.table import F64, I64

BINS_AN_OCTAVE = 4


def chances(survival: F64, grid_tokens: I64, tau: F64) -> F64:
    """Chance that a row of class c and age g is alive tau steps later, float64 [C, AGE_BINS, T], from the classes'
    survival curves [C, G]. Beyond everything that was seen the tail is scale-free: (g + 1) / (g + tau + 1)."""
    age = 2.0 ** (np.arange(AGE_BINS) / BINS_AN_OCTAVE) - 1.0
    when = age[:, None] + tau[None, :]
    scale_free = (age[:, None] + 1.0) / (when + 1.0)
    table = np.empty((len(survival), AGE_BINS, TAU_POINTS))
    for c, curve in enumerate(survival):
        now = np.interp(age, grid_tokens, curve)[:, None]
        later = np.interp(when, grid_tokens, curve)
        table[c] = np.where(now > 1e-6, np.minimum(1.0, later / np.maximum(now, 1e-300)), scale_free)
    return table


@njit
def generated(c: Records, row: int) -> int:
    """Tokens the row has generated and still owns."""
    r = rows_of(c)[row]
    if r.status == DECODE:
        return int(c.step - r.base)
    return int(r.kept)


@njit
def age_bin(g: int) -> int:
    """Nearest bin of an age in tokens."""
    return min(AGE_BINS - 1, int(BINS_AN_OCTAVE * math.log2(g + 1.0) + 0.5))


@njit
def known_alive(expected: float, g: int, tau: float) -> float:
    """Chance of survival where lengths are known; a row that outlives its length gets the scale-free tail."""
    if g < expected:
        return 1.0 if g + tau < expected else 0.0
    return (g + 1.0) / (g + tau + 1.0)


@njit
def add(c: Records, row: int, sign: float) -> None:
    """Add the row to the profile as it is now (sign 1), or take out exactly what was added (sign -1)."""
    r = rows_of(c)[row]
    if sign > 0.0:
        g = generated(c, row)
        r.profiled = g
        c.profile_rows += 1
    else:
        g = r.profiled
        r.profiled = -1
        c.profile_rows -= 1
    mean, variance, tau = mean_of(c)[r.side], variance_of(c)[r.side], tau_of(c)
    expected = expected_of(c)[row]
    chance = alive_of(c)[r.cls, age_bin(g)]
    size = r.private + g + 0.5 * (c.block - 1)
    for k in range(TAU_POINTS):
        if k > 0 and g + tau[k] >= r.limit:
            break
        p = known_alive(expected, g, tau[k]) if c.exact else chance[k]
        if p < 1e-4:
            break
        load = size + tau[k]
        mean[k] += sign * p * load
        variance[k] += sign * p * (1.0 - p) * load * load


@njit
def refresh(c: Records) -> None:
    """Recompute the profile from the running rows that are in it."""
    c.profile_step = c.step
    mean_of(c)[:, :] = 0.0
    variance_of(c)[:, :] = 0.0
    rows = rows_of(c)
    for side in (LEFT, RIGHT):
        row = c.tail_left if side == LEFT else c.tail_right
        while row >= 0:
            if rows[row].profiled >= 0:
                c.profile_rows -= 1
                add(c, row, 1.0)
            row = rows[row].prev


@njit
def refresh_if_stale(c: Records) -> None:
    """Refresh at most every few steps per running row, so that the cost a step stays constant."""
    if c.step - c.profile_step >= max(16, c.profile_rows // 4):
        refresh(c)
        c.events += 1


@njit
def fits_now(c: Records, row: int) -> bool:
    """The row's prompt and first token find room in KV at once."""
    r = rows_of(c)[row]
    cold, pinned = uncached(c, row)
    tokens = r.private + r.kept + 1
    return bool(cold + pinned + (tokens + c.block - 1) // c.block * c.block <= free_tokens(c))


@njit
def fits_later(c: Records, row: int, left_at_least: float) -> bool:
    """The expected footprint stays under the capacity at every watched instant if the row starts now:
    referenced prefixes + right side + max(left side, ``left_at_least``) + spread x standard deviation <= capacity."""
    r = rows_of(c)[row]
    cold, pinned = uncached(c, row)
    room = c.capacity - (c.kv_nodes - c.kv_evictable + cold + pinned)
    mean, variance, tau = mean_of(c), variance_of(c), tau_of(c)
    g = int(r.kept)
    expected = expected_of(c)[row]
    chance = alive_of(c)[r.cls, age_bin(g)]
    size = r.private + g + 0.5 * (c.block - 1)
    for k in range(TAU_POINTS):
        if k > 0 and g + tau[k] >= r.limit:
            break
        p = known_alive(expected, g, tau[k]) if c.exact else chance[k]
        if p < 1e-4:
            break
        load = size + tau[k]
        total = mean[RIGHT, k] + max(mean[LEFT, k], left_at_least) + p * load
        spread = variance[LEFT, k] + variance[RIGHT, k] + p * (1.0 - p) * load * load
        if total + c.spread * math.sqrt(max(0.0, spread)) > room:
            return False
    return True


@njit
def reads_ahead(c: Records) -> float:
    """KV tokens that the running rows will still read, in expectation: the area under the profile."""
    mean, tau = mean_of(c), tau_of(c)
    area = 0.0
    for k in range(TAU_POINTS - 1):
        area += 0.5 * (tau[k + 1] - tau[k]) * (mean[LEFT, k] + mean[RIGHT, k] + mean[LEFT, k + 1] + mean[RIGHT, k + 1])
    return area
