"""Feedback blend: every step should hold as much compute as memory traffic, from rows that are where they are needed.

Left rows (compute-heavy) are admitted by prefill backlog: as much as the next steps should hold beside their KV reads.
Right rows (memory-heavy) are admitted by the expected future KV profile, beside the room that the flow of left rows
needs when the cache is full (Little's law). When memory keeps the left side out for so long that the compute lost
outweighs a recomputation, a right row is preempted: the ski-rental rule, at most twice the cost of knowing the future.
"""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling import profile
from plait.scheduling.moves import admit
from plait.scheduling.queues import gated, peek, settling
from plait.scheduling.state import DECODE, LEFT, RIGHT, UNLIMITED, Records, expected_of, rows_of
from plait.table import I64

RIGHT_DEVIATIONS = 2.0
"""Standard deviations of the far footprint that right rows leave free. Left rows leave none beside them: they end soon,
and compute that is not there costs more than a short prompt computed again."""
USUAL_FILL = 0.9
"""Share of the cache that is in use, on average, once it has filled up."""
LONGER = 5.0
"""How many times as long as the estimates say the last rows may run: a sample misses the longest answers, and compute
that is done too early leaves their steps with nothing to hide, which costs more than compute that is done late."""
BACKLOG_STEPS = 2.0
"""Steps' worth of prefill kept ready, so that a step is never short of it."""


@njit
def prefill_for(c: Records, busy_s: float) -> float:
    """Prefill tokens that bring the next step's compute, or network time if that is longer, to ``busy_s``."""
    token_s = c.gemm_s + c.prefill_attn_s * c.context_per_prefill_token
    tokens = (busy_s - c.gemm_base_s - c.gemm_s * c.decoding) / token_s
    if c.comm_s > 0.0:
        tokens = min(tokens, (busy_s - c.comm_base_s) / c.comm_s - c.decoding)
    return float(max(0.0, min(tokens, float(c.chunk - c.decoding))))


@njit
def targets(c: Records, right_waits: bool) -> tuple[float, float, float]:
    """(prefill tokens a step may take, prefill tokens wanted from the left, the same with a full cache) of the next
    step.

    While right rows wait, left rows fill compute up to the memory time, or to the time to read the weights, where it is
    hidden. Not more: a later step takes as long for it. Not less: hidden compute costs the same whenever it is done,
    and a step that is short of it cannot be made up for. Once none waits, what is left is spread
    over the steps that the running rows will take. Right rows may use what a full cache would balance: prefilling them
    is what fills it.
    """
    memory_s, full_s = c.kv_read_s * c.decode_context, c.kv_read_s * c.capacity
    if right_waits:
        wanted_s = max(c.weights_s, memory_s)
        flow = prefill_for(c, max(wanted_s, USUAL_FILL * full_s))
        return prefill_for(c, max(wanted_s, full_s)), prefill_for(c, wanted_s), flow
    if c.steps_left <= 0.0:
        return float(c.chunk - c.decoding), float(c.chunk - c.decoding), 0.0
    left = (c.size_left - c.head_left) / max(1, c.size_left)
    wanted_s = max(max(c.weights_s, memory_s), left * c.left_compute / (LONGER * c.steps_left))
    return prefill_for(c, max(wanted_s, full_s)), prefill_for(c, wanted_s), 0.0


@njit
def decide_blend(c: Records, out: I64) -> tuple[int, int, int]:
    """Fills ``out`` with rows to admit from the front and rows to preempt from the back; returns both counts and the
    prefill budget of the next step."""
    waiting_right = peek(c, RIGHT)
    refreshed = profile.refresh_if_stale(c)
    if waiting_right < 0 and (refreshed or c.steps_left <= 0.0):
        profile.look_ahead(c)
    most, wanted, flow = targets(c, waiting_right >= 0)
    if c.decoding + c.prefilling == 0:
        most = wanted = float(c.chunk)
    count = _admit_right(c, out, waiting_right, most, flow)
    count, short = _admit_left(c, out, count, wanted)
    preempted = _relieve(c, out, short and waiting_right >= 0)
    budget = min(most, wanted + c.backlog_right)
    return count, preempted, max(1, int(budget))


@njit
def _admit_right(c: Records, out: I64, row: int, most: float, flow: float) -> int:
    """Right rows while the profile has room for them; c.blocked remembers a head that did not fit."""
    if row < 0 or (c.blocked == c.events and c.prefilling + c.decoding > 0) or settling(c) or _has_too_many_right(c):
        return 0
    count = 0
    reserve = 0.0
    if peek(c, LEFT) >= 0 and c.capacity < UNLIMITED:
        reserve = flow * (c.left_area + BACKLOG_STEPS)
    while (
        row >= 0
        and count < len(out) // 4
        and c.prefilling + c.decoding < c.max_seqs
        and c.backlog_right < BACKLOG_STEPS * most + 1.0
    ):
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
    return profile.fits_later(c, row, reserve, profile.NEAR_DEVIATIONS, RIGHT_DEVIATIONS, True)


@njit
def _admit_left(c: Records, out: I64, count: int, wanted: float) -> tuple[int, bool]:
    """Left rows while fewer than two steps' worth of prefill is ready. Returns the count and whether memory stopped
    it."""
    ready = BACKLOG_STEPS * wanted
    near, far = (0.0, 0.0) if c.tail_right >= 0 else (profile.NEAR_DEVIATIONS, profile.FAR_DEVIATIONS)
    while count < len(out) // 2 and c.prefilling + c.decoding < c.max_seqs and c.backlog - c.backlog_right < ready:
        row = peek(c, LEFT)
        if row < 0:
            return count, False
        alone = c.prefilling + c.decoding == 0
        if settling(c) or gated(c, row) or not profile.fits_now(c, row):
            return count, True
        if not (alone or profile.fits_later(c, row, 0.0, near, far, True)):
            return count, True
        admit(c, row, LEFT, True)
        out[count] = row
        count += 1
    return count, False


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
