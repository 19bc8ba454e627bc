"""Expected future KV footprint of running rows: mean and variance at TAU_POINTS future instants.

A row with g generated tokens is alive tau steps from now with probability S(g + tau) / S(g), S being its class's
survival curve, and then holds private + g + tau tokens. Summing over rows gives the mean of the total; its variance
gives the headroom a job needs, instead of a tuned share of the cache. With known lengths S is a step and the variance
is 0."""

from __future__ import annotations

import math

from plait._numba import njit
from plait.scheduling.kv import free_tokens, uncached
from plait.scheduling.state import DECODE, LEFT, RIGHT, State


@njit
def generated(s: State, row: int) -> int:
    """Tokens the row has generated and still owns."""
    r = s.rows[row]
    if r.status == DECODE:
        return int(s.scalars[0].step - r.base)
    return int(r.kept)


@njit
def _curve(s: State, cls: int, x: float, hint: int) -> tuple[float, int]:
    """S_cls(x) by linear interpolation, and where it was found (searches upwards from ``hint``)."""
    grid = s.grid
    last = len(grid) - 1
    k = hint
    while k < last and grid[k + 1] <= x:
        k += 1
    if k >= last:
        return s.survival[cls, last], last
    share = (x - grid[k]) / (grid[k + 1] - grid[k])
    if share <= 0.0:
        return s.survival[cls, k], k
    return s.survival[cls, k] + share * (s.survival[cls, k + 1] - s.survival[cls, k]), k


@njit
def _start_of(s: State, x: float) -> int:
    """Largest k with grid[k] <= x (0 if none)."""
    low, high = 0, len(s.grid)
    while high - low > 1:
        middle = (low + high) // 2
        if s.grid[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@njit
def alive(s: State, row: int, g: int, tau: float, at_g: float, hint: int) -> tuple[float, int]:
    """Chance that the row still runs ``tau`` steps after it had g tokens; ``at_g`` is its curve at g."""
    r = s.rows[row]
    x = g + tau
    if tau > 0.0 and x >= r.limit:
        return 0.0, hint
    if s.scalars[0].exact:
        return (1.0 if tau == 0.0 or x < s.expected[row] else 0.0), hint
    here, hint = _curve(s, r.cls, x, hint)
    if at_g > 1e-6:
        return min(1.0, here / at_g), hint
    return (g + 1.0) / (x + 1.0), hint  # longer than anything seen: scale-free tail


@njit
def add(s: State, row: int, sign: float) -> None:
    """Add the row to the profile as it is now (sign 1), or take out exactly what was added (sign -1)."""
    c = s.scalars[0]
    r = s.rows[row]
    if sign > 0.0:
        g = generated(s, row)
        r.profiled = g
        c.profile_rows += 1
    else:
        g = r.profiled
        r.profiled = -1
        c.profile_rows -= 1
    hint = 0
    at_g = 1.0
    if not c.exact:
        hint = _start_of(s, float(g))
        at_g, hint = _curve(s, r.cls, float(g), hint)
    size = r.private + g + 0.5 * (c.block - 1)
    for k in range(len(s.tau)):
        p, hint = alive(s, row, g, s.tau[k], at_g, hint)
        if p < 1e-4:
            break
        load = size + s.tau[k]
        s.mean[k] += sign * p * load
        s.variance[k] += sign * p * (1.0 - p) * load * load


@njit
def refresh(s: State) -> None:
    """Recompute the profile from the running rows that are in it."""
    c = s.scalars[0]
    c.profile_step = c.step
    s.mean[:] = 0.0
    s.variance[:] = 0.0
    for side in (LEFT, RIGHT):
        row = c.tail_left if side == LEFT else c.tail_right
        while row >= 0:
            if s.rows[row].profiled >= 0:
                c.profile_rows -= 1
                add(s, row, 1.0)
            row = s.rows[row].prev


@njit
def refresh_if_stale(s: State) -> None:
    """Refresh at most every few steps per running row, so that the cost a step stays constant."""
    c = s.scalars[0]
    if c.step - c.profile_step >= max(16, c.profile_rows // 4):
        refresh(s)
        c.events += 1


@njit
def fits_now(s: State, row: int) -> bool:
    """The row's prompt and first token find room in KV at once."""
    c = s.scalars[0]
    r = s.rows[row]
    cold, pinned = uncached(s, row)
    tokens = r.private + r.kept + 1
    return bool(cold + pinned + (tokens + c.block - 1) // c.block * c.block <= free_tokens(c))


@njit
def fits_later(s: State, row: int, reserve: float) -> bool:
    """The expected footprint stays under the capacity at every watched instant if the row starts now: referenced
    prefixes + mean + spread x standard deviation + reserve <= capacity."""
    c = s.scalars[0]
    r = s.rows[row]
    cold, pinned = uncached(s, row)
    room = c.capacity - (c.kv_nodes - c.kv_evictable + cold + pinned) - reserve
    g = int(r.kept)
    hint = 0
    at_g = 1.0
    if not c.exact:
        hint = _start_of(s, float(g))
        at_g, hint = _curve(s, r.cls, float(g), hint)
    size = r.private + g + 0.5 * (c.block - 1)
    for k in range(len(s.tau)):
        p, hint = alive(s, row, g, s.tau[k], at_g, hint)
        if p < 1e-4:
            break
        load = size + s.tau[k]
        deviation = c.spread * math.sqrt(max(0.0, s.variance[k] + p * (1.0 - p) * load * load))
        if s.mean[k] + p * load + deviation > room:
            return False
    return True
