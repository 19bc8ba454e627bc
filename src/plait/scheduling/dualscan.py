"""BlendServe's dual scan: two cursors on the rows sorted by density, each with a share of KV memory.

    M_L = M (rho_root - rho_R) / (rho_L - rho_R),  M_R = M - M_L        recomputed as the cursors move
    N_side = M_side / (p + d/2) rows in flight,  C_side = N_side p / d prefill tokens a step

Rows that end early free their share at once; a left row that outgrows its estimate so far that it is memory-heavy
counts on the right from then on. When memory overflows the youngest right rows are retracted; they wait in front of
their side, which takes no row until one of its own has finished."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling import profile
from plait.scheduling.kv import free_tokens, growth
from plait.scheduling.moves import admit, change_side, hold
from plait.scheduling.queues import gated, may_take_prefill, peek, settling
from plait.scheduling.state import DECODE, LEFT, RIGHT, Records, expected_of, key_of, rows_of
from plait.table import I64

CHECK_STEPS = 64
"""Steps between two looks for under-estimated rows."""
BADLY = 2.0
"""A row is badly under-estimated when it has generated this many times its estimate."""


@njit
def left_share(left: float, right: float, root: float) -> float:
    """M_L / M for the densities at the cursors and of the job, clipped to 0 .. 1; one half where both are equal."""
    if left == right:
        return 0.5
    return min(1.0, max(0.0, (root - right) / (left - right)))


@njit
def footprint(c: Records, row: int) -> int:
    """Mean KV tokens of a row over its life: p + d/2."""
    r = rows_of(c)[row]
    return int(r.prompt + 0.5 * max(1.0, expected_of(c)[row] - r.kept) + r.kept)


@njit
def prefill_share(c: Records, row: int, memory: float) -> float:
    """C = N p / d for a side whose cursor is at ``row``."""
    r = rows_of(c)[row]
    d = max(1.0, expected_of(c)[row])
    return float(memory / (r.prompt + 0.5 * d) * r.prompt / d)


@njit
def decide_dual_scan(c: Records, out: I64) -> tuple[int, int, int]:
    """Admit from both ends while their shares last. Returns (admitted, 0, prefill budget)."""
    if c.step - c.checked_step >= CHECK_STEPS:
        c.checked_step = c.step
        _move_underestimated(c)
    victims = _retract(c, out)
    count = 0
    stuck = settling(c)
    while not stuck and count < len(out) // 2 and c.prefilling + c.decoding < c.max_seqs and may_take_prefill(c):
        left, right = peek(c, LEFT), peek(c, RIGHT)
        if left < 0 and right < 0:
            break
        left, right = (right if left < 0 else left), (left if right < 0 else right)
        memory_left, memory_right = _shares(c, left, right)
        room_left = _room(c, memory_left - c.held_left, left, memory_left, c.backlog - c.backlog_right)
        room_right = 0.0 if c.right_settles else memory_right - c.held_right
        side = LEFT if room_left * memory_right >= room_right * memory_left else RIGHT  # emptier in proportion
        admitted = _try(c, out, count, side, left if side == LEFT else right, room_left, room_right)
        if not admitted:
            other = RIGHT if side == LEFT else LEFT
            admitted = _try(c, out, count, other, left if other == LEFT else right, room_left, room_right)
        stuck = not admitted
        count += admitted
    return count, victims, _budget(c)


@njit
def _retract(c: Records, out: I64) -> int:
    """Memory is about to overflow: the youngest right rows go. Returns how many stand at the end of ``out``."""
    need = growth(c)
    free = free_tokens(c)
    victims = 0
    row = c.tail_right
    while row >= 0 and free < need and victims < len(out) // 2:
        r = rows_of(c)[row]
        if r.status == DECODE:
            victims += 1
            out[len(out) - victims] = row
            free += r.private + c.step - r.base
        row = r.prev
    return victims


@njit
def _shares(c: Records, left: int, right: int) -> tuple[float, float]:
    """M_L and M_R in KV tokens for the rows at the cursors."""
    key = key_of(c)
    memory_left = c.capacity * left_share(key[left], key[right], c.root_density)
    return float(memory_left), float(c.capacity - memory_left)


@njit
def _budget(c: Records) -> int:
    """C = C_L + C_R, at most the engine's chunk; all of it once no row waits. C_R keeps a full share full: right rows
    that fill it up are prefilled at once."""
    left, right = peek(c, LEFT), peek(c, RIGHT)
    if left < 0 or right < 0:
        return int(c.chunk)
    memory_left, memory_right = _shares(c, left, right)
    budget = prefill_share(c, left, memory_left) + max(prefill_share(c, right, memory_right), float(c.backlog_right))
    return max(1, int(min(budget, float(c.chunk))))


@njit
def _room(c: Records, room: float, row: int, memory: float, backlog: int) -> float:
    """KV tokens that a side may still take. N is a number of whole rows and the prefill budget is there to be used: a
    side with less than one step's budget in prefill may take one more row."""
    if backlog < min(prefill_share(c, row, memory), float(c.chunk)):
        return float(max(room, footprint(c, row)))
    return float(room)


@njit
def _try(c: Records, out: I64, count: int, side: int, row: int, room_left: float, room_right: float) -> bool:
    """Admit the row at a side's cursor if its share and memory have room; an idle engine takes any row."""
    tokens = footprint(c, row)
    alone = c.prefilling + c.decoding == 0
    room = room_left if side == LEFT else room_right
    if gated(c, row) or not profile.fits_now(c, row) or (tokens > room and not alone):
        return False
    if c.right_settles and not c.exact and not alone and not _fits_for_life(c, row):
        return False
    admit(c, row, side, False)
    hold(c, row, tokens)
    out[count] = row
    return True


@njit
def _fits_for_life(c: Records, row: int) -> bool:
    """What runs may grow for as long as the row is expected to, beside it: asked after an overflow, which says that the
    estimates of what runs are too low."""
    r = rows_of(c)[row]
    steps = max(1.0, expected_of(c)[row] - r.kept)
    return bool(r.private + r.kept + steps * (c.decoding + 1) <= free_tokens(c))


@njit
def _move_underestimated(c: Records) -> None:
    """Left rows that have generated BADLY times their estimate, and by that are less dense than the job, go right."""
    rows, expected = rows_of(c), expected_of(c)
    row = c.tail_left
    while row >= 0:
        before = rows[row].prev
        r = rows[row]
        g = profile.generated(c, row)
        if r.status == DECODE and not r.moved and g > BADLY * expected[row]:
            compute_s = c.gemm_s * (r.prompt + g)
            memory_s = c.kv_read_s * (r.prompt * g + 0.5 * g * g)
            if compute_s < c.root_density * memory_s:
                change_side(c, row, r.prompt + g)
        row = before
