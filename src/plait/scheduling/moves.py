"""What happens to rows: admitted, started, a decode step, progress, preempted, finished. Every move keeps the sums in
``scalars`` right, in O(1) plus the row's cold or freed nodes."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling import profile
from plait.scheduling.kv import acquire, blocks, evict, growth, mark_computed, release
from plait.scheduling.state import DECODE, DONE, LEFT, PREFILL, RIGHT, WAITING, Records, back_of, phase_of, rows_of

AVERAGED_TOKENS = 65536.0
"""Prefill tokens over which the context of prefill is averaged."""


@njit
def _link(c: Records, row: int, side: int) -> None:
    """Enter the row in the running list of a side, which is ordered by admission."""
    rows = rows_of(c)
    r = rows[row]
    r.side = side
    before = c.tail_left if side == LEFT else c.tail_right
    after = -1
    while before >= 0 and rows[before].seq > r.seq:
        after, before = before, rows[before].prev
    r.prev, r.next = before, after
    if before >= 0:
        rows[before].next = row
    if after >= 0:
        rows[after].prev = row
    elif side == LEFT:
        c.tail_left = row
    else:
        c.tail_right = row


@njit
def _unlink(c: Records, row: int) -> None:
    r = rows_of(c)[row]
    if r.prev >= 0:
        rows_of(c)[r.prev].next = r.next
    if r.next >= 0:
        rows_of(c)[r.next].prev = r.prev
    elif r.side == LEFT:
        c.tail_left = r.prev
    else:
        c.tail_right = r.prev
    r.prev = -1
    r.next = -1


@njit
def _queue_prefill(c: Records, row: int) -> None:
    """Enter the row at the end of those in prefill."""
    rows = rows_of(c)
    rows[row].ahead, rows[row].behind = c.last_prefill, -1
    if c.last_prefill >= 0:
        rows[c.last_prefill].behind = row
    else:
        c.first_prefill = row
    c.last_prefill = row
    c.prefill_need += rows[row].need


@njit
def _end_prefill(c: Records, row: int) -> None:
    """Take the row out of those in prefill."""
    rows = rows_of(c)
    ahead, behind = rows[row].ahead, rows[row].behind
    if ahead >= 0:
        rows[ahead].behind = behind
    else:
        c.first_prefill = behind
    if behind >= 0:
        rows[behind].ahead = ahead
    else:
        c.last_prefill = ahead
    rows[row].ahead = rows[row].behind = -1
    c.prefill_need -= rows[row].need


@njit
def admit(c: Records, row: int, side: int, profiled: bool) -> None:
    """A waiting row becomes a prefilling one and takes its KV: its cold nodes, its private prompt, room for one
    token."""
    r = rows_of(c)[row]
    cold = acquire(c, row)
    tokens = r.private + r.kept + 1
    allocated = blocks(tokens, c.block)
    evict(c, allocated)
    c.kv_private += allocated
    r.need = max(1, cold + r.private + r.kept)
    c.node_tokens += cold
    c.cached_tokens += r.prompt - r.private - cold
    c.backlog += r.need
    if side == RIGHT:
        c.backlog_right += r.need
    r.status = PREFILL
    r.seq = c.now_seq
    c.now_seq += 1
    c.waiting -= 1
    c.prefilling += 1
    _link(c, row, side)
    _queue_prefill(c, row)
    if profiled:
        profile.add(c, row, 1.0)


@njit
def hold(c: Records, row: int, tokens: int) -> None:
    """Count a running row with ``tokens`` against its side's share of memory, until it leaves."""
    r = rows_of(c)[row]
    if r.side == LEFT:
        c.held_left += tokens - r.held
    else:
        c.held_right += tokens - r.held
    r.held = tokens


@njit
def change_side(c: Records, row: int, tokens: int) -> None:
    """A running left row joins the right side and counts there with ``tokens``."""
    r = rows_of(c)[row]
    c.held_left -= r.held
    r.held = 0
    _unlink(c, row)
    _link(c, row, RIGHT)
    r.moved = 1
    hold(c, row, tokens)


@njit
def start(c: Records, row: int) -> None:
    """Prefill done, first token there. Without Step events the backlog falls here."""
    r = rows_of(c)[row]
    if r.status != PREFILL:
        return
    mark_computed(c, row)
    r.status = DECODE
    g = r.kept + 1
    r.base = c.step - g
    _end_prefill(c, row)
    c.prefilling -= 1
    c.decoding += 1
    if r.side == RIGHT:
        c.backlog_right -= r.need
    c.decode_context += r.prompt + g
    phase_of(c)[(r.base - r.private) % c.block] += 1
    if not c.has_steps:
        c.backlog -= r.need
    if c.prefilling == 0:
        c.backlog = 0
    c.events += 1


@njit
def advance(c: Records) -> None:
    """Every decoding row gets one token; prefixes nobody needs make room for it."""
    grow = growth(c)
    evict(c, grow)
    c.kv_private += grow
    c.decode_context += c.decoding
    c.step += 1


@njit
def prefilled(c: Records, tokens: int, context_tokens: int) -> None:
    """A step has prefilled that many tokens, which attended to that much context together."""
    c.backlog = max(0, c.backlog - tokens)
    if tokens > 0:
        average = context_tokens / tokens
        c.context_per_prefill_token += (average - c.context_per_prefill_token) * min(1.0, tokens / AVERAGED_TOKENS)


@njit
def progress(c: Records, row: int, output_tokens: int) -> None:
    """The engine says how many tokens the row has: correct the estimate."""
    r = rows_of(c)[row]
    if r.status == PREFILL:
        start(c, row)
    if r.status != DECODE:
        return
    known = c.step - r.base
    if known == output_tokens:
        return
    phase_of(c)[(r.base - r.private) % c.block] -= 1
    c.kv_private += blocks(r.private + output_tokens, c.block) - blocks(r.private + known, c.block)
    c.decode_context += output_tokens - known
    r.base = c.step - output_tokens
    phase_of(c)[(r.base - r.private) % c.block] += 1


@njit
def _leave(c: Records, row: int) -> int:
    """Take a running row out of every sum. Returns its generated tokens."""
    r = rows_of(c)[row]
    g = profile.generated(c, row)
    if r.profiled >= 0:
        profile.add(c, row, -1.0)
    if r.status == DECODE:
        c.kv_private -= blocks(r.private + g, c.block)
        c.decode_context -= r.prompt + g
        phase_of(c)[(r.base - r.private) % c.block] -= 1
        c.decoding -= 1
    else:
        c.kv_private -= blocks(r.private + r.kept + 1, c.block)
        _end_prefill(c, row)
        c.prefilling -= 1
        if r.side == RIGHT:
            c.backlog_right -= r.need
        c.backlog = max(0, c.backlog - r.need) if c.prefilling > 0 else 0
    if r.side == LEFT:
        c.held_left -= r.held
    else:
        c.held_right -= r.held
    r.held = 0
    _unlink(c, row)
    release(c, row)
    c.events += 1
    return int(g)


@njit
def finish(c: Records, row: int) -> None:
    """The row has its answer, or has failed for good."""
    r = rows_of(c)[row]
    if r.status == DONE:
        return
    if r.status == PREFILL:
        mark_computed(c, row)
    if r.status == PREFILL or r.status == DECODE:
        _leave(c, row)
    elif r.status == WAITING:
        c.waiting -= 1
    r.status = DONE
    c.done += 1
    c.overflowed = 0
    if r.side == RIGHT:
        c.right_settles = 0
    c.events += 1


@njit
def preempt(c: Records, row: int, lost_tokens: int, requeue: bool) -> None:
    """The row's KV is gone. It waits in front of its queue (``requeue``), or in the engine to be prefilled again."""
    r = rows_of(c)[row]
    if r.status != PREFILL and r.status != DECODE:
        return
    side = r.side
    profiled = r.profiled >= 0
    r.kept = max(0, _leave(c, row) - lost_tokens)
    c.preemptions += 1
    c.overflowed = 1
    if side == RIGHT:
        c.right_settles = 1
    c.waiting += 1
    r.status = WAITING
    if not requeue:
        admit(c, row, side, profiled)
    elif side == LEFT:
        back_of(c)[0, c.back_left] = row
        c.back_left += 1
    else:
        back_of(c)[1, c.back_right] = row
        c.back_right += 1
