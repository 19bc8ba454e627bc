"""Admission from one ordered queue: a head that must fit, and how it may be passed.

A row that shares a prefix still being prefilled waits where the engine looks prefixes up at submission ("prime one,
then the rest"); rows behind it may pass while there is not yet a step's worth of prefill under way."""

from __future__ import annotations

from plait._numba import njit, prefetch
from plait.scheduling import profile
from plait.scheduling.moves import admit
from plait.scheduling.state import (
    COMPUTING,
    LEFT,
    LINE_BYTES,
    UNLIMITED,
    WAITING,
    Records,
    back_of,
    key_of,
    nodes_of,
    queue_of,
    rows_of,
    tier_of,
)
from plait.table import I64

GATE_WINDOW = 4096
"""Waiting rows looked at behind gated ones."""
FETCH_AHEAD = 8
"""Places behind the head of a queue at which a row's records are fetched: memory answers before its turn comes."""


@njit
def gated(c: Records, row: int) -> bool:
    """A node of the row is being prefilled by another one, and the engine would not share it."""
    if not c.gate:
        return False
    nodes = nodes_of(c)
    v = rows_of(c)[row].node
    while v > 0:
        if nodes[v].state == COMPUTING and nodes[v].segment > 0:
            return True
        v = nodes[v].parent
    return False


@njit
def skip_taken(c: Records, side: int) -> None:
    """Move the queue's head to its first waiting row."""
    head = c.head_left if side == LEFT else c.head_right
    size = c.size_left if side == LEFT else c.size_right
    while head < size and rows_of(c)[queue_of(c)[side, head]].status != WAITING:
        head += 1
    if side == LEFT:
        c.head_left = head
    else:
        c.head_right = head
    if head + FETCH_AHEAD < size:
        row = queue_of(c)[side, head + FETCH_AHEAD]
        prefetch(c.at_rows + LINE_BYTES * row)
        prefetch(c.at_expected + 8 * row)
        prefetch(c.at_key + 8 * row)


@njit
def peek(c: Records, side: int) -> int:
    """First waiting row of a side, requeued rows first; -1 if none."""
    if side == LEFT:
        while c.back_left > 0 and rows_of(c)[back_of(c)[0, c.back_left - 1]].status != WAITING:
            c.back_left -= 1
        if c.back_left > 0:
            return int(back_of(c)[0, c.back_left - 1])
        skip_taken(c, LEFT)
        return int(queue_of(c)[0, c.head_left]) if c.head_left < c.size_left else -1
    while c.back_right > 0 and rows_of(c)[back_of(c)[1, c.back_right - 1]].status != WAITING:
        c.back_right -= 1
    if c.back_right > 0:
        return int(back_of(c)[1, c.back_right - 1])
    skip_taken(c, 1)
    return int(queue_of(c)[1, c.head_right]) if c.head_right < c.size_right else -1


@njit
def fits(c: Records, row: int) -> bool:
    """Now, and in expectation later; a row alone needs only the former. The profile is summed up only where it
    matters."""
    if not profile.fits_now(c, row):
        return False
    if c.prefilling + c.decoding == 0:
        return True
    if profile.fits_at_ends(c, row):
        return True
    if not c.profile_kept:
        profile.sum_up(c)
    return profile.fits_later(c, row, 0.0)


@njit
def prefill_room(c: Records) -> int:
    """Prompt tokens that the next step may take: a chunk, or under ``Order.throttle_prefill`` at most so many that

        decoding rows x (time of the step - empty_s) x delay weight <= rows not done x empty_s,

    empty_s being the fixed time of a step. Each prompt token more delays every decoding row, and brings rows in that
    share the fixed time. In a steady flow of n equal rows of w seconds of work over o steps, b at a time, a step takes
    empty_s + b w / o, and the completions sum to n² / 2 (empty_s o / b + w) + weight n o / 2 (empty_s + b w / o): least
    where both sides above are equal. The weight is 1 if rows that run are half done on average
    (``policy/latency.py:delay_weight``)."""
    if not c.throttle or c.decoding == 0 or c.chunk >= UNLIMITED:
        return int(c.chunk)
    floor_s, memory_s = max(c.weights_s, c.gemm_base_s), c.kv_read_s * c.decode_context
    empty_s = floor_s + c.overhead_s + c.comm_base_s
    delayed = max(c.delay_weight * c.decoding, 1e-9)
    compute_s = floor_s + empty_s * (c.waiting + c.prefilling + c.decoding) / delayed
    compute_s = max(compute_s, memory_s) if c.overlapped else compute_s - memory_s
    token_s = c.gemm_s + c.comm_s + c.prefill_attn_s * c.context_per_prefill_token
    tokens = (compute_s - c.gemm_base_s) / max(token_s, 1e-15) - c.decoding
    return int(min(float(c.chunk), max(1.0, tokens)))


@njit
def may_take_prefill(c: Records) -> bool:
    """There is room in the next steps for more prefill: engines that form their steps from a queue of ours need only
    one step's waiting; more would hold KV that no step reads."""
    return bool(not (c.throttle or c.budgeted) or c.backlog < prefill_room(c))


@njit
def settling(c: Records) -> bool:
    """Memory ran out: what was thrown out waits until a row has finished, or it would be thrown out again."""
    return bool(c.overflowed) and c.prefilling + c.decoding > 0


@njit
def decide_queue(c: Records, out: I64) -> int:
    """Admit from the left queue while rows fit. Fills ``out``; returns how many."""
    count = 0
    profile.lapse_if_stale(c)
    if c.blocked == c.events or settling(c):
        return 0
    while count < len(out) and c.prefilling + c.decoding < c.max_seqs and may_take_prefill(c):
        head = peek(c, LEFT)
        if head < 0:
            break
        row = head
        if gated(c, head):
            row = _pass_gated(c)
        elif not fits(c, head):
            row = _overtaker(c, head) if c.window > 1 else -1
        if row < 0:
            c.blocked = c.events
            break
        admit(c, row, LEFT, True)
        out[count] = row
        count += 1
    return count


@njit
def _pass_gated(c: Records) -> int:
    """First row behind a gated head that may go, if less than a chunk is being prefilled; -1 if none."""
    if c.chunk < (1 << 59) and c.backlog >= c.chunk:
        return -1
    skip_taken(c, LEFT)
    end = min(c.size_left, c.head_left + GATE_WINDOW)
    for i in range(c.head_left, end):
        row = queue_of(c)[0, i]
        if rows_of(c)[row].status == WAITING and not gated(c, row):
            return int(row) if fits(c, row) else -1
    return -1


@njit
def _overtaker(c: Records, head: int) -> int:
    """First of the next ``window`` waiting rows that fits, of the head's tier and with a key of at most kappa x the
    head's; -1 if none."""
    skip_taken(c, LEFT)
    seen = 0
    i = c.head_left
    while i < c.size_left and seen < c.window:
        row = queue_of(c)[0, i]
        i += 1
        if rows_of(c)[row].status != WAITING or row == head:
            continue
        if tier_of(c)[row] != tier_of(c)[head]:
            break
        seen += 1
        if key_of(c)[row] <= c.kappa * key_of(c)[head] and not gated(c, row) and fits(c, row):
            return int(row)
    return -1
