"""Feedback blend: every step should hold as much compute as memory traffic, from rows that are where they are needed.

Left rows (compute-heavy) are admitted by prefill backlog: as much as the next steps can hide under their KV reads.
Right rows (memory-heavy) are admitted by the expected future KV profile, beside the room that the flow of left rows
needs (Little's law). When memory keeps the left side out for so long that the compute lost outweighs a recomputation,
the youngest right row is preempted: the ski-rental rule, at most twice the cost of knowing the future."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling import profile
from plait.scheduling.moves import admit
from plait.scheduling.queues import gated, peek, settling
from plait.scheduling.state import DECODE, LEFT, RIGHT, Records, rows_of
from plait.table import I64

LEFT_CAUTION = 0.0
"""Share of the usual headroom that left rows leave while right rows run: they end soon, and compute that is not there
costs more than a short prompt computed again."""
BACKLOG_STEPS = 2.0
"""Steps' worth of prefill kept ready, so that a step is never short of it."""


@njit
def prefill_for(c: Records, compute_s: float) -> float:
    """Prefill tokens that bring the next step's compute to ``compute_s``."""
    token_s = c.gemm_s + c.prefill_attn_s * c.context_per_prefill_token
    return float(max(0.0, min((compute_s - c.gemm_s * c.decoding) / token_s, float(c.chunk - c.decoding))))


@njit
def targets(c: Records, right_waits: bool) -> tuple[float, float]:
    """(prefill tokens a step may take, prefill tokens wanted from the left) of the next step.

    While there is memory work, left rows fill compute up to the memory time or the time to read the weights, where it
    is hidden. Never more: compute needs no company, a later step takes as long for it, and steps without any still
    read the weights. Never less: hidden compute costs the same whenever it is done. Right rows may use what a full
    cache would balance: prefilling them is what fills it.
    """
    hidden_s = max(c.weights_s, c.kv_read_s * c.decode_context)
    if not right_waits and c.tail_right < 0:
        return float(c.chunk - c.decoding), float(c.chunk - c.decoding)
    most_s = max(hidden_s, c.kv_read_s * c.capacity)
    return prefill_for(c, most_s), prefill_for(c, hidden_s)


@njit
def decide_blend(c: Records, out: I64) -> tuple[int, int, int]:
    """Fills ``out`` with rows to admit from the front and rows to preempt from the back; returns both counts and the
    prefill budget of the next step."""
    profile.refresh_if_stale(c)
    waiting_right = peek(c, RIGHT)
    most, wanted = targets(c, waiting_right >= 0)
    if c.decoding + c.prefilling == 0:
        most = wanted = float(c.chunk)
    count = _admit_right(c, out, waiting_right, most, wanted)
    count, short = _admit_left(c, out, count, wanted)
    preempted = _relieve(c, out, short and waiting_right >= 0)
    budget = min(most, wanted + c.backlog_right)
    return count, preempted, max(1, int(budget))


@njit
def _admit_right(c: Records, out: I64, row: int, most: float, wanted: float) -> int:
    """Right rows while the profile has room for them; c.blocked remembers a head that did not fit."""
    if row < 0 or (c.blocked == c.events and c.prefilling + c.decoding > 0) or settling(c):
        return 0
    count = 0
    flow = wanted * (c.left_area + BACKLOG_STEPS) if peek(c, LEFT) >= 0 else 0.0
    while (
        row >= 0
        and count < len(out) // 4
        and c.prefilling + c.decoding < c.max_seqs
        and c.backlog_right < BACKLOG_STEPS * most + 1.0
    ):
        alone = c.prefilling + c.decoding == 0
        if gated(c, row) or not profile.fits_now(c, row) or not (alone or profile.fits_later(c, row, flow)):
            c.blocked = c.events
            break
        admit(c, row, RIGHT, True)
        out[count] = row
        count += 1
        row = peek(c, RIGHT)
    return count


@njit
def _admit_left(c: Records, out: I64, count: int, wanted: float) -> tuple[int, bool]:
    """Left rows while fewer than two steps' worth of prefill is ready. Returns the count and whether memory stopped
    it."""
    ready = BACKLOG_STEPS * wanted
    caution = LEFT_CAUTION if c.tail_right >= 0 else 1.0
    while count < len(out) // 2 and c.prefilling + c.decoding < c.max_seqs and c.backlog - c.backlog_right < ready:
        row = peek(c, LEFT)
        if row < 0:
            return count, False
        alone = c.prefilling + c.decoding == 0
        if settling(c) or gated(c, row) or not profile.fits_now(c, row):
            return count, True
        if not (alone or profile.fits_later(c, row, 0.0, caution)):
            return count, True
        admit(c, row, LEFT, True)
        out[count] = row
        count += 1
    return count, False


@njit
def _relieve(c: Records, out: I64, short: bool) -> int:
    """Count the prefill that would have been hidden under this step's KV reads and that memory kept out; preempt the
    cheapest right row once that outweighs computing its tokens again."""
    if not short or c.prefilling + c.decoding < 2:  # an engine is never left idle
        c.starved_tokens = 0
        return 0
    lacking = int(prefill_for(c, max(c.weights_s, c.kv_read_s * c.decode_context))) - c.backlog
    if lacking <= 0:
        return 0
    c.starved_tokens += lacking
    rows = rows_of(c)
    victim, cost = -1, c.starved_tokens
    row = c.tail_right
    while row >= 0:
        again = rows[row].private + profile.generated(c, row)
        if rows[row].status == DECODE and again < cost:
            victim, cost = row, again
        row = rows[row].prev
    if victim < 0:
        return 0
    c.starved_tokens = 0
    out[len(out) - 1] = victim
    return 1
