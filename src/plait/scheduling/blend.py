"""Feedback blend: every step should hold as much compute as memory traffic, from rows that are where they are needed.

Left rows (compute-heavy) are admitted by prefill backlog: as much as the next steps should hold beside their KV reads.
Right rows (memory-heavy) are admitted by the expected future KV profile, beside the room that the flow of left rows
needs when the cache is full (Little's law). When memory keeps the left side out for so long that the compute lost
outweighs a recomputation, a right row is preempted: the ski-rental rule, at most twice the cost of knowing the future.
Where memory runs out it is the one that costs least to compute again.
"""

from __future__ import annotations

import math

from plait._numba import njit
from plait.scheduling import profile
from plait.scheduling.kv import free_tokens, growth
from plait.scheduling.moves import admit
from plait.scheduling.queues import gated, peek, settling
from plait.scheduling.state import DECODE, LEFT, RIGHT, UNLIMITED, Records, expected_of, rows_of
from plait.table import I64

RIGHT_DEVIATIONS = 2.0
"""Standard deviations of the far footprint that right rows leave free while many wait."""
LEAST_SPARE = 0.5
"""Share of the deviations that the last right rows leave free."""
MANY_READS = 2.0
"""Many right rows wait if they have this many times the reads to come of all that runs."""
LEFT_DEVIATIONS = 1.0
"""Standard deviations of the next steps' footprint that left rows leave free while right ones wait. Of the far one of
right rows they leave none: they end soon, and compute that is not there costs more than a short prompt computed
again."""
USUAL_FILL = 0.9
"""Share of the cache that is in use, on average, once it has filled up."""
STALE_FREE_SHARE = 1 / 8
"""Growth of the rows, as a share of the free part of the cache, that the profile may miss."""
UNLIMITED_S = 1e9
"""More than any step takes."""
BACKLOG_STEPS = 2.0
"""Steps' worth of prefill kept ready, so that a step is never short of it."""


@njit
def prefill_for(c: Records, busy_s: float) -> float:
    """Prefill tokens that bring the next step's compute, or network time if that is longer, to ``busy_s``."""
    token_s = c.gemm_s + c.prefill_attn_s * c.context_per_prefill_token
    return _allowed(c, busy_s, (busy_s - c.gemm_base_s - c.gemm_s * c.decoding) / token_s)


@njit
def _allowed(c: Records, busy_s: float, tokens: float) -> float:
    """Of so many prefill tokens, those that the network takes in ``busy_s`` and the step has room for."""
    if c.comm_s > 0.0:
        tokens = min(tokens, (busy_s - c.comm_base_s) / c.comm_s - c.decoding)
    return float(max(0.0, min(tokens, float(c.chunk - c.decoding))))


@njit
def queued_for(c: Records, busy_s: float) -> float:
    """``prefill_for`` by the rows that are in prefill, in their order, instead of by the usual context: which tokens
    the next step takes is known, and what each of them attends to."""
    rows, token_s, pair_s = rows_of(c), c.gemm_s, c.prefill_attn_s
    left_s = busy_s - c.gemm_base_s - c.gemm_s * c.decoding
    tokens, row = 0.0, c.first_prefill
    done = max(0, c.prefill_need - c.backlog)
    while row >= 0 and left_s > 0.0:
        r = rows[row]
        k = float(max(0, r.need - done))
        first_s = token_s + pair_s * (r.prompt + r.kept - k + 0.5)
        whole_s = k * (first_s + 0.5 * pair_s * k)
        if whole_s > left_s:
            k = 2.0 * left_s / (first_s + math.sqrt(first_s * first_s + 2.0 * pair_s * left_s))
            whole_s = left_s
        left_s -= whole_s
        tokens += k
        done = max(0, done - r.need)
        row = r.behind
    if left_s > 0.0:
        tokens += left_s / (token_s + pair_s * c.context_per_prefill_token)
    return _allowed(c, busy_s, tokens)


@njit
def _density_left(c: Records) -> float:
    """Compute over memory time of all that is still to be done. Of what runs only the reads count."""
    left = (c.size_left - c.head_left) / max(1, c.size_left)
    right = (c.size_right - c.head_right) / max(1, c.size_right)
    memory = left * c.left_memory + right * c.right_memory + c.running_memory
    return float((left * c.left_compute + right * c.right_compute) / max(memory, 1e-300))


@njit
def wanted_s(c: Records, right_waits: bool) -> float:
    """Seconds that the next step should compute; UNLIMITED_S where nothing is gained by waiting.

    While right rows wait or run, left rows fill compute up to the memory time, or to the time to read the weights,
    where it is hidden. Not more: a later step takes as long for it. Not less: hidden compute costs the same whenever it
    is done, and a step that is short of it cannot be made up for. Once only left rows are there, what is left is spread
    over the steps that they will take."""
    memory_s = c.kv_read_s * c.decode_context
    if c.decoding + c.prefilling == 0:
        return UNLIMITED_S
    hidden_s = float(max(c.weights_s, memory_s))
    if right_waits or c.tail_right >= 0:
        return hidden_s
    if c.steps_left <= 0.0:
        return UNLIMITED_S
    waiting = (c.size_left - c.head_left) / max(1, c.size_left)
    return float(max(hidden_s, waiting * c.left_compute / c.steps_left))


@njit
def filling_s(c: Records, busy_s: float) -> float:
    """Seconds that a step may compute if right rows are in prefill, instead of ``busy_s``: as many as the reads of the
    free part of the cache will take once these rows have filled it, and beside the reads of today as much as the rest
    of the job has to compute beside its own, up to what a full cache would balance."""
    context_s = min(_density_left(c) * c.decode_context, float(c.capacity)) * c.kv_read_s
    return float(max(busy_s, c.kv_read_s * free_tokens(c), context_s))


@njit
def decide_blend(c: Records, out: I64) -> tuple[int, int, int]:
    """Fills ``out`` with rows to admit from the front and rows to preempt from the back; returns both counts and the
    prefill budget of the next step."""
    waiting_right = peek(c, RIGHT)
    refreshed = profile.refresh_if_stale(c, STALE_FREE_SHARE)
    if refreshed:
        c.running_memory = c.kv_read_s * profile.area(c)
    if waiting_right < 0 and c.tail_right < 0 and (refreshed or c.steps_left <= 0.0):
        profile.look_ahead(c)
    busy_s, full_s = wanted_s(c, waiting_right >= 0), c.kv_read_s * c.capacity
    usual_s = max(c.weights_s, c.kv_read_s * max(float(c.decode_context), USUAL_FILL * c.capacity))
    count = _admit_right(c, out, waiting_right, max(busy_s, full_s), usual_s)
    beside_right = waiting_right >= 0 or c.tail_right >= 0
    count, short = _admit_left(c, out, count, prefill_for(c, busy_s), beside_right)
    preempted = _make_room(c, out) or _relieve(c, out, short and beside_right)
    budget = queued_for(c, busy_s)
    if c.backlog_right > 0:
        budget = max(budget, min(prefill_for(c, filling_s(c, busy_s)), float(c.backlog_right)))
    return count, preempted, max(1, int(budget))


@njit
def _admit_right(c: Records, out: I64, row: int, most_s: float, usual_s: float) -> int:
    """Right rows while the profile has room for them beside the left rows that steps of ``usual_s`` take, and less
    than some steps of ``most_s`` of their prefill are ready; c.blocked remembers a head that did not fit."""
    if row < 0 or (c.blocked == c.events and c.prefilling + c.decoding > 0) or settling(c) or _has_too_many_right(c):
        return 0
    count = 0
    reserve, ready = 0.0, BACKLOG_STEPS * prefill_for(c, most_s) + 1.0
    if peek(c, LEFT) >= 0 and c.capacity < UNLIMITED:
        reserve = prefill_for(c, usual_s) * (c.left_area + BACKLOG_STEPS)
    while row >= 0 and count < len(out) // 4 and c.prefilling + c.decoding < c.max_seqs and c.backlog_right < ready:
        if gated(c, row) or not _right_fits(c, row, reserve):
            c.blocked = c.events
            break
        admit(c, row, RIGHT, True)
        out[count] = row
        count += 1
        row = peek(c, RIGHT)
    return count


@njit
def _has_too_many_right(c: Records) -> bool:
    """Memory keeps left rows out, or has had a right row thrown out and none has finished since: the expected footprint
    is too low, and another right row, such as the one thrown out, would be thrown out again."""
    return bool(c.tail_right >= 0 and (c.right_settles or c.starved_tokens > 0))


@njit
def _right_fits(c: Records, row: int, reserve: float) -> bool:
    """Now, and in expectation later beside ``reserve`` KV tokens of left rows; a row alone needs only the former."""
    if not profile.fits_now(c, row) or c.prefilling + c.decoding == 0:
        return profile.fits_now(c, row)
    share = spare(c)
    far = share * RIGHT_DEVIATIONS
    return profile.fits_later(c, row, reserve, share * profile.NEAR_DEVIATIONS, far, far, True)


@njit
def spare(c: Records) -> float:
    """Share of the deviations that right rows leave free. While many wait, a cache that is not full costs little, since
    others fill it later, and a preemption much. The last ones decide when the job ends: a long answer that waits for
    room runs in nearly empty steps later."""
    waiting = (c.size_right - c.head_right) / max(1, c.size_right) * c.right_memory
    many = min(1.0, waiting / max(MANY_READS * c.running_memory, 1e-300))
    return float(LEAST_SPARE + (1.0 - LEAST_SPARE) * many)


@njit
def _admit_left(c: Records, out: I64, count: int, wanted: float, right_waits: bool) -> tuple[int, bool]:
    """Left rows while fewer than two steps' worth of prefill is ready. Returns the count and whether memory stopped
    it."""
    ready = BACKLOG_STEPS * wanted
    near, beside = (LEFT_DEVIATIONS, 0.0) if right_waits else (profile.NEAR_DEVIATIONS, profile.FAR_DEVIATIONS)
    while count < len(out) // 2 and c.prefilling + c.decoding < c.max_seqs and c.backlog - c.backlog_right < ready:
        row = peek(c, LEFT)
        if row < 0:
            return count, False
        alone = c.prefilling + c.decoding == 0
        if (settling(c) and c.tail_left >= 0) or gated(c, row) or not profile.fits_now(c, row):
            return count, True
        if not (alone or profile.fits_later(c, row, 0.0, near, profile.FAR_DEVIATIONS, beside, True)):
            return count, True
        admit(c, row, LEFT, True)
        out[count] = row
        count += 1
    return count, False


@njit
def _make_room(c: Records, out: I64) -> int:
    """Where the next step's tokens do not fit, preempt the right row that costs least to compute again, of those whose
    tokens are enough. The engine would throw out the one that it started last: often a row that was thrown out before
    and has just computed again all it had."""
    lacking = growth(c) - free_tokens(c)
    if not c.preempts or lacking <= 0 or c.prefilling + c.decoding < 2:  # an engine is never left idle
        return 0
    rows = rows_of(c)
    victim, least = -1, 0
    row = c.tail_right
    while row >= 0:
        again = rows[row].private + profile.generated(c, row)
        if rows[row].status == DECODE and again >= lacking and (victim < 0 or again < least):
            victim, least = row, again
        row = rows[row].prev
    if victim < 0:
        return 0
    out[len(out) - 1] = victim
    return 1


@njit
def _relieve(c: Records, out: I64, short: bool) -> int:
    """Count the prefill that would have been hidden under this step's KV reads and that memory kept out; preempt a
    right row once that outweighs computing its tokens again: of those, the one that would stay longest."""
    if not short or c.prefilling + c.decoding < 2:  # an engine is never left idle
        c.starved_tokens = 0
        return 0
    lacking = int(prefill_for(c, max(c.weights_s, c.kv_read_s * c.decode_context))) - c.backlog
    if lacking <= 0:
        return 0
    c.starved_tokens += lacking
    rows = rows_of(c)
    victim, longest = -1, 0.0
    row = c.tail_right
    while row >= 0:
        generated = profile.generated(c, row)
        stays = expected_of(c)[row] - generated
        again = rows[row].private + generated
        if rows[row].status == DECODE and again < c.starved_tokens and (victim < 0 or stays > longest):
            victim, longest = row, stays
        row = rows[row].prev
    if victim < 0:
        return 0
    c.starved_tokens = 0
    out[len(out) - 1] = victim
    return 1
