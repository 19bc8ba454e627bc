"""Expected future KV footprint of running rows: mean and variance at TAU_POINTS future instants.

A row with g generated tokens is alive tau steps from now with probability S(g + tau) / S(g), S being its class's
survival curve, and then holds private + g + tau tokens. Summing over rows gives the mean of the total; its variance
gives the headroom a job needs, instead of a tuned share of the cache. With known lengths S is a step without variance.
Nor can the footprint exceed the sum of all rows that may be alive: with few rows that is far less than mean and
headroom. Whole blocks are counted in both: what a row loses to them is spread evenly over a block."""

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
    most_of,
    rows_of,
    tally_of,
    tau_of,
    variance_of,
)
from plait.table import I64

BINS_AN_OCTAVE = 4
STALE_SHARE = 1 / 128
"""Growth of the rows, as a share of the KV cache, that a profile may miss."""
REFRESH_STEPS = 64
NEAR_STEPS, NEAR_DEVIATIONS, FAR_DEVIATIONS = 32.0, 3.0, 1.5
"""Standard deviations of the expected footprint that stay free: an overflow in the next steps means a preemption, at
every step anew; one that is far off can still be met by admitting less."""
UNLIMITED_STEPS = 1e18
"""Of a row whose end is not known."""
LEAST_CHANCE = 1e-4
"""A row whose chance to be alive is below that is taken to have ended."""


@njit
def generated(c: Records, row: int) -> int:
    """Tokens the row has generated and still owns."""
    r = rows_of(c)[row]
    if r.status == DECODE:
        return int(c.step - r.base)
    return int(r.kept)


@njit
def _age_bin(g: int) -> int:
    return min(AGE_BINS - 1, math.ceil(BINS_AN_OCTAVE * math.log2(g + 1.0) - 1e-9))


_YOUNG = np.array([_age_bin(g) for g in range(4096)], np.int8)
"""``age_bin`` of most ages, looked up."""


@njit
def age_bin(g: int) -> int:
    """First bin of at least that age in tokens: a row that has just outlived a typical length must not look younger."""
    return int(_YOUNG[g]) if g < len(_YOUNG) else _age_bin(g)


@njit
def overdue_alive(g: int, tau: float) -> float:
    """Chance that a row is alive ``tau`` steps from now that has outlived its known length: scale-free."""
    return (g + 1.0) / (g + tau + 1.0)


@njit
def rounding(c: Records) -> float:
    """Tokens that a row loses to whole blocks, on average."""
    return 0.5 * float(c.block - 1)


@njit
def spread(c: Records, p: float, load: float) -> float:
    """Variance of the footprint of a row that is alive with probability p and then holds ``load``: of its life, and of
    the part of a block that it loses to rounding."""
    return float(p * ((1.0 - p) * load * load + c.block * c.block / 12.0))


@njit
def add(c: Records, row: int, sign: float) -> None:
    """Add the row to the profile as it is now (sign 1), or take out exactly what was added (sign -1)."""
    r = rows_of(c)[row]
    if c.exact:
        c.profile_peak += int(sign) * _peak(c, row)
    if sign > 0.0:
        g = generated(c, row)
        r.profiled = g
        c.profile_rows += 1
    else:
        g = r.profiled
        r.profiled = -1
        c.profile_rows -= 1
    if c.profile_kept:
        _add(c, row, sign, g)


@njit
def _peak(c: Records, row: int) -> int:
    """KV tokens of the row at its end, if its length is known: at most, for whole blocks."""
    return int(rows_of(c)[row].private + expected_of(c)[row] + c.block - 1)


@njit
def _add(c: Records, row: int, sign: float, g: int) -> None:
    """Add (sign 1) or take out (-1) the row at an age of g tokens."""
    r = rows_of(c)[row]
    mean, variance, most, tau = mean_of(c)[r.side], variance_of(c)[r.side], most_of(c), tau_of(c)
    size = r.private + g + rounding(c)
    watched = _watched(c, r.limit - g)
    if c.exact:
        left = expected_of(c)[row] - g
        if left > 0.0:
            watched = _until_end(c, left, watched)
            for k in range(watched):
                load = size + min(tau[k], left)
                mean[k] += sign * load
                variance[k] += sign * spread(c, 1.0, load)
                most[k] += sign * (load + rounding(c))
            return
        for k in range(watched):
            p = overdue_alive(g, tau[k])
            load = size + tau[k]
            mean[k] += sign * p * load
            variance[k] += sign * spread(c, p, load)
            most[k] += sign * (load + rounding(c))
        return
    chance, most_lost = alive_of(c)[r.cls, age_bin(g)], rounding(c)
    for k in range(watched):  # two loops without jumps: these run in vector registers
        load = size + tau[k]
        mean[k] += sign * chance[k] * load
        variance[k] += sign * spread(c, chance[k], load)
    for k in range(watched):
        most[k] += sign * (size + tau[k] + most_lost) if chance[k] >= LEAST_CHANCE else 0.0


@njit
def _watched(c: Records, left: int) -> int:
    """How many of the watched instants lie within ``left`` tokens; at least the first, now."""
    tau = tau_of(c)
    count = TAU_POINTS
    while count > 1 and tau[count - 1] >= left:
        count -= 1
    return count


@njit
def _until_end(c: Records, left: float, watched: int) -> int:
    """How many of the ``watched`` instants a row counts at that ends in ``left`` steps. Usage peaks at ends, which fall
    between instants: it still counts at the first one after its end, with what it held then."""
    tau = tau_of(c)
    count = 1
    while count < watched and tau[count - 1] < left:
        count += 1
    return count


@njit
def refresh(c: Records) -> None:
    """Recompute the profile from the running rows that are in it."""
    c.profile_step = c.step
    sum_up(c)


@njit
def sum_up(c: Records) -> None:
    """The profile as it was at ``profile_step``, of the rows that are in it now."""
    c.profile_kept = 1
    mean_of(c)[:, :] = 0.0
    variance_of(c)[:, :] = 0.0
    most_of(c)[:] = 0.0
    for side in (LEFT, RIGHT):
        if c.exact:
            _sum_known(c, side)
        else:
            _sum_expected(c, side)


@njit
def _generated_then(c: Records, row: int) -> int:
    """Tokens the row had at ``profile_step``, or when it was admitted after that."""
    r = rows_of(c)[row]
    if r.status == DECODE:
        return int(max(r.kept, c.profile_step - r.base))
    return int(r.kept)


@njit
def _counted(c: Records, side: int) -> I64:
    """Rows of a side that are in the profile, int64 [k]; their ``profiled`` becomes what they had at
    ``profile_step``."""
    rows, found, count = rows_of(c), np.empty(c.profile_rows, np.int64), 0
    row = c.tail_left if side == LEFT else c.tail_right
    while row >= 0:
        if rows[row].profiled >= 0:
            rows[row].profiled = _generated_then(c, row)
            found[count] = row
            count += 1
        row = rows[row].prev
    return found[:count]


@njit
def _sum_known(c: Records, side: int) -> None:
    """The rows of a side, lengths known: what ``_add`` would make of each, by the instant before their ends."""
    rows, tau, expected = rows_of(c), tau_of(c), expected_of(c)
    alive, held = np.zeros(TAU_POINTS + 1), np.zeros(TAU_POINTS + 1)  # rows, their tokens now, by last instant alive
    ended, last = np.zeros(TAU_POINTS + 1), np.zeros(TAU_POINTS + 1)  # by the instant after: rows, tokens at their ends
    for row in _counted(c, side):
        r = rows[row]
        g = r.profiled
        left, watched = expected[row] - g, float(r.limit - g)
        after = 0
        for k in range(TAU_POINTS):
            after += tau[k] < left
        if after == 0 or watched < left:
            _add(c, row, 1.0, g)
        else:
            alive[after - 1] += 1.0
            held[after - 1] += r.private + g
            if after < TAU_POINTS and tau[after] < watched:
                ended[after] += 1.0
                last[after] += r.private + g + left
    count, tokens = 0.0, 0.0
    for k in range(TAU_POINTS - 1, -1, -1):
        count += alive[k]
        tokens += held[k]
        there = count + ended[k]
        mean_of(c)[side, k] += tokens + count * tau[k] + last[k] + there * rounding(c)
        variance_of(c)[side, k] += there * spread(c, 1.0, 0.0)
        most_of(c)[k] += tokens + count * tau[k] + last[k] + there * 2.0 * rounding(c)


@njit
def _sum_expected(c: Records, side: int) -> None:
    """The rows of a side, lengths estimated: rows of one class and age bin have the same chances, so that number, sum
    and sum of squares of their sizes stand for what ``_add`` would make of each."""
    rows, tau, tally = rows_of(c), tau_of(c), tally_of(c)
    mean, variance, most = mean_of(c)[side], variance_of(c)[side], most_of(c)
    counted = _counted(c, side)
    classes, bins, met = np.empty(len(counted), np.int32), np.empty(len(counted), np.int32), 0
    for row in counted:
        r = rows[row]
        g = r.profiled
        if r.limit - g <= tau[TAU_POINTS - 1]:
            _add(c, row, 1.0, g)
        else:
            b = age_bin(g)
            if tally[r.cls, b, 0] == 0.0:
                classes[met], bins[met] = r.cls, b
                met += 1
            size = r.private + g + rounding(c)
            tally[r.cls, b, 0] += 1.0
            tally[r.cls, b, 1] += size
            tally[r.cls, b, 2] += size * size
    for i in range(met):
        chance, sums = alive_of(c)[classes[i], bins[i]], tally[classes[i], bins[i]]
        count, size, square = sums[0], sums[1], sums[2]
        part = count * c.block * c.block / 12.0
        for k in range(TAU_POINTS):
            p = chance[k]
            mean[k] += p * (size + count * tau[k])
            variance[k] += p * ((1.0 - p) * (square + tau[k] * (2.0 * size + count * tau[k])) + part)
        for k in range(TAU_POINTS):
            most[k] += size + count * (tau[k] + rounding(c)) if chance[k] >= LEAST_CHANCE else 0.0
        sums[:] = 0.0


@njit
def running_rows(c: Records, out: I64) -> int:
    """Fill ``out`` with the decoding rows; how many there are."""
    rows, count = rows_of(c), 0
    for side in (LEFT, RIGHT):
        row = c.tail_left if side == LEFT else c.tail_right
        while row >= 0:
            if rows[row].status == DECODE:
                out[count] = row
                count += 1
            row = rows[row].prev
    return count


@njit
def is_stale(c: Records, free_share: float) -> bool:
    """The rows may have grown by STALE_SHARE of the capacity and ``free_share`` of what is free of it since the last
    refresh, or REFRESH_STEPS passed."""
    steps = c.step - c.profile_step
    missed = STALE_SHARE * c.capacity + free_share * max(0, free_tokens(c))
    return bool(steps >= REFRESH_STEPS or steps * c.profile_rows >= missed)


@njit
def lapse_if_stale(c: Records) -> None:
    """As ``refresh_if_stale``, but summed up when it is asked, which it often is not before it is stale again."""
    if is_stale(c, 0.0):
        c.profile_step, c.profile_kept = c.step, 0
        c.events += 1


@njit
def refresh_if_stale(c: Records, free_share: float = 0.0) -> bool:
    """Refresh when it is stale or has lapsed. Whether it was."""
    if not c.profile_kept or is_stale(c, free_share):
        refresh(c)
        c.events += 1
        return True
    return False


@njit
def fits_now(c: Records, row: int) -> bool:
    """The row's prompt and first token find room in KV at once."""
    r = rows_of(c)[row]
    cold, pinned = uncached(c, row)
    tokens = r.private + r.kept + 1
    return bool(cold + pinned + (tokens + c.block - 1) // c.block * c.block <= free_tokens(c))


@njit
def fits_at_ends(c: Records, row: int) -> bool:
    """Lengths are known, and the row fits even if all rows were at their ends at once: no profile says otherwise."""
    if not c.exact:
        return False
    cold, pinned = uncached(c, row)
    return bool(c.profile_peak + _peak(c, row) <= c.capacity - (c.kv_nodes - c.kv_evictable + cold + pinned))


@njit
def fits_later(
    c: Records,
    row: int,
    left_at_least: float,
    near: float = NEAR_DEVIATIONS,
    far: float = FAR_DEVIATIONS,
    far_right: float = FAR_DEVIATIONS,
    strict: bool = False,
) -> bool:
    """The expected footprint stays under the capacity if the row starts now, at every watched instant: referenced
    prefixes + right side + max(left side, ``left_at_least``) + ``near`` or ``far`` standard deviations (``far_right``
    of the right side) <= capacity; or, unless ``strict``, would with every row alive. ``strict`` also counts what the
    rows may have grown by since the profile was refreshed: for a full cache of many rows that is more than the spread
    of the next steps."""
    r = rows_of(c)[row]
    cold, pinned = uncached(c, row)
    room = c.capacity - (c.kv_nodes - c.kv_evictable + cold + pinned)
    mean, variance, most, tau = mean_of(c), variance_of(c), most_of(c), tau_of(c)
    g = int(r.kept)
    expected = expected_of(c)[row]
    chance = alive_of(c)[r.cls, age_bin(g)]
    size = r.private + g + rounding(c)
    left = UNLIMITED_STEPS if not c.exact or expected <= g else expected - g
    missed = float((c.step - c.profile_step) * c.profile_rows) if strict else 0.0
    for k in range(_until_end(c, left, _watched(c, r.limit - g))):
        p = 1.0 if left < UNLIMITED_STEPS else chance[k] if not c.exact else overdue_alive(g, tau[k])
        if p < LEAST_CHANCE:
            break
        load = size + min(tau[k], left)
        total = mean[RIGHT, k] + max(mean[LEFT, k], left_at_least) + p * load
        own, beside = (near, near) if tau[k] <= NEAR_STEPS else (far, far_right)
        if tau[k] <= NEAR_STEPS:
            total += missed
        squares = own * own * (variance[LEFT, k] + spread(c, p, load)) + beside * beside * variance[RIGHT, k]
        spare = room - total
        tight = spare < 0.0 or squares > spare * spare
        if tight and (strict or most[k] + load + rounding(c) + max(0.0, left_at_least - mean[LEFT, k]) > room):
            return False
    return True


@njit
def area(c: Records) -> float:
    """KV tokens x steps that the running rows are expected to hold."""
    mean, tau = mean_of(c), tau_of(c)
    total = 0.0
    for k in range(1, TAU_POINTS):
        held = mean[LEFT, k - 1] + mean[RIGHT, k - 1] + mean[LEFT, k] + mean[RIGHT, k]
        total += 0.5 * held * (tau[k] - tau[k - 1])
    return total


@njit
def look_ahead(c: Records) -> None:
    """Set ``steps_left`` from the running rows.

    If n steps more are planned and the last row takes L, they cost n overheads and max(0, L - n) steps that hide
    nothing, each an overhead and a reading of the weights: best where P(L > n) = overhead / (overhead + weights)."""
    rows, tau = rows_of(c), tau_of(c)
    worth = c.overhead_s / max(c.overhead_s + c.weights_s, 1e-300)
    none = np.ones(TAU_POINTS)
    for side in (LEFT, RIGHT):
        row = c.tail_left if side == LEFT else c.tail_right
        while row >= 0:
            r = rows[row]
            g = generated(c, row)
            chance = alive_of(c)[r.cls, age_bin(g)]
            for k in range(1, TAU_POINTS):
                if g + tau[k] >= r.limit:
                    break
                p = chance[k]
                if c.exact:
                    left = expected_of(c)[row] - g
                    p = overdue_alive(g, tau[k]) if left <= 0.0 else 1.0 if tau[k] < left else 0.0
                if p < LEAST_CHANCE:
                    break
                none[k] *= 1.0 - p
            row = r.prev
    steps = 0.0
    running = 1.0 if c.tail_right >= 0 or c.tail_left >= 0 else 0.0
    for k in range(1, TAU_POINTS):
        above, below = 1.0 - none[k - 1] if k > 1 else running, 1.0 - none[k]
        if below > worth:
            steps = tau[k]
        else:
            if above > worth:
                part = (above - worth) / max(above - below, 1e-12)
                steps = tau[k - 1] + part * (tau[k] - tau[k - 1])
            break
    c.steps_left = steps
