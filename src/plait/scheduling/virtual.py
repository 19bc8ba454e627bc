"""An engine with a virtual clock, compiled: what one step of continuous batching with chunked prefill does to the rows.

It shares ``State`` with the scheduler, whose picture of the engine is exact here. A step costs O(1) plus its events:
decoding rows advance through running sums, the next to finish are found in a calendar by decode step, and only the
head of the prefill queue is touched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from plait._numba import njit
from plait.model.steptime import StepTime, step_s
from plait.scheduling import moves
from plait.scheduling.decide import decide
from plait.scheduling.kv import evict
from plait.scheduling.pointer import carray, pointer
from plait.scheduling.state import DECODE, PREFILL, Records, phase_of, rows_of
from plait.table import F64, I32, I64

_BY_ROW = ["output", "later", "earlier", "admit_s", "start_s", "finish_s", "finished_rows"]
_BY_ROW += ["computed", "cached", "lost", "thrown_out"]
_COLUMNS = [*_BY_ROW, "calendar", "fifo", "log"]
_ENGINE = np.dtype(
    [
        ("now_s", "f8"),
        ("n", "i8"),
        ("fifo_head", "i8"),
        ("fifo_size", "i8"),
        ("head_done", "i8"),  # tokens of the head's prefill that are done
        ("finished", "i8"),
        ("logged", "i8"),
        ("log_size", "i8"),
        ("calendar_size", "i8"),
        ("preempted", "i8"),  # by the engine, for want of memory
        ("recomputed", "i8"),  # KV tokens thrown away by preemptions
        ("prefilled", "i8"),
    ]
    + [(f"at_{name}", "i8") for name in _COLUMNS]
)
STEP = np.dtype(
    [
        ("t_s", "f8"),
        ("duration_s", "f8"),
        ("prefill_tokens", "i4"),
        ("decode_seqs", "i4"),
        ("kv_tokens", "i8"),
        ("prefill_context_tokens", "i8"),
        ("decode_context_tokens", "i8"),
    ]
)
"""One record a step, the fields of ``plait.events.Step``."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The engine's own side of a simulation, n rows. True output lengths live here, out of the scheduler's reach."""

    output: I32  # [n] true output tokens
    later: I32  # [n] next row that finishes in the same step
    earlier: I32  # [n]
    calendar: I32  # [power of two > longest output] first row that finishes at decode steps congruent to the index
    fifo: I32  # [n] ring of rows in prefill
    admit_s: F64  # [n] time of the last admission
    start_s: F64  # [n] first token, at the last start
    finish_s: F64  # [n]
    finished_rows: I32  # [n] rows in order of completion
    computed: I32  # [n] tokens prefilled for the row, all its starts together
    cached: I32  # [n] tokens it needed and did not prefill: shared prefixes in KV, all its starts together
    lost: I32  # [n] KV tokens thrown away when it was preempted
    thrown_out: I32  # [n] times it was preempted
    log: Records  # STEP [capacity of the log]
    engine: Records  # _ENGINE [1]

    @property
    def e(self) -> Records:
        """The record that compiled functions take."""
        return self.engine[0]

    def with_longer_log(self) -> Machine:
        """The same machine with room for twice as many steps."""
        longer = dataclasses.replace(self, log=np.concatenate((self.log, np.zeros_like(self.log))))
        longer._connect()
        return longer

    def with_more_rows(self, output_tokens: I64) -> Machine:
        """The same machine with further rows, none longer than the machine was made for."""
        n = len(self.output)
        idle = new_machine(output_tokens)
        joined = {name: np.concatenate((getattr(self, name), getattr(idle, name))) for name in _BY_ROW}
        ring = (int(self.engine["fifo_head"][0]) + np.arange(int(self.engine["fifo_size"][0]))) % max(1, n)
        fifo = np.zeros(max(1, n + len(output_tokens)), np.int32)
        fifo[: len(ring)] = self.fifo[ring]
        larger = dataclasses.replace(self, **joined, fifo=fifo)
        larger.engine["n"], larger.engine["fifo_head"] = n + len(output_tokens), 0
        larger._connect()
        return larger

    def _connect(self) -> None:
        self.engine["log_size"] = len(self.log)
        for name in _COLUMNS:
            self.engine[f"at_{name}"] = getattr(self, name).ctypes.data


def new_machine(output_tokens: I64, longest: int = 1) -> Machine:
    """An idle engine at time 0. ``longest``: output tokens that a row may have, if that is more than these have."""
    n = len(output_tokens)
    size = 1 << int(output_tokens.max(initial=longest) + 1).bit_length()
    machine = Machine(
        output=output_tokens.astype(np.int32),
        later=np.full(n, -1, np.int32),
        earlier=np.full(n, -1, np.int32),
        calendar=np.full(size, -1, np.int32),
        fifo=np.zeros(max(1, n), np.int32),
        admit_s=np.full(n, np.nan),
        start_s=np.full(n, np.nan),
        finish_s=np.full(n, np.nan),
        finished_rows=np.zeros(n, np.int32),
        computed=np.zeros(n, np.int32),
        cached=np.zeros(n, np.int32),
        lost=np.zeros(n, np.int32),
        thrown_out=np.zeros(n, np.int32),
        log=np.zeros(1 << 16, STEP),
        engine=np.zeros(1, _ENGINE),
    )
    machine.engine["n"] = n
    machine.engine["calendar_size"] = size
    machine._connect()
    return machine


@njit
def _rows_column(address: int, e: Records) -> I32:
    found: I32 = carray(pointer(address), e.n, np.int32)
    return found


@njit
def _times(address: int, e: Records) -> F64:
    found: F64 = carray(pointer(address), e.n, np.float64)
    return found


@njit
def _calendar(e: Records) -> I32:
    found: I32 = carray(pointer(e.at_calendar), e.calendar_size, np.int32)
    return found


@njit
def _log(e: Records) -> Records:
    found: Records = carray(pointer(e.at_log), e.log_size, STEP)
    return found


@njit
def submit(c: Records, e: Records, row: int) -> None:
    """An admitted row joins the prefill queue."""
    _rows_column(e.at_fifo, e)[(e.fifo_head + e.fifo_size) % e.n] = row
    e.fifo_size += 1
    _times(e.at_admit_s, e)[row] = e.now_s
    r = rows_of(c)[row]
    _rows_column(e.at_cached, e)[row] += r.prompt + r.kept - r.need


@njit
def _schedule_finish(c: Records, e: Records, row: int) -> None:
    """Enter a decoding row in the calendar: it finishes when it has all its tokens."""
    slot = (rows_of(c)[row].base + _rows_column(e.at_output, e)[row]) % e.calendar_size
    head = _calendar(e)[slot]
    _rows_column(e.at_later, e)[row] = head
    _rows_column(e.at_earlier, e)[row] = -1
    if head >= 0:
        _rows_column(e.at_earlier, e)[head] = row
    _calendar(e)[slot] = row


@njit
def _unschedule_finish(c: Records, e: Records, row: int) -> None:
    before, after = _rows_column(e.at_earlier, e)[row], _rows_column(e.at_later, e)[row]
    if before >= 0:
        _rows_column(e.at_later, e)[before] = after
    else:
        _calendar(e)[(rows_of(c)[row].base + _rows_column(e.at_output, e)[row]) % e.calendar_size] = after
    if after >= 0:
        _rows_column(e.at_earlier, e)[after] = before


@njit
def throw_out(c: Records, e: Records, row: int) -> None:
    """Preempt by recompute: the KV is lost, the tokens generated so far are kept, the row goes back to the
    scheduler."""
    r = rows_of(c)[row]
    lost = 0
    if r.status == DECODE:
        _unschedule_finish(c, e, row)
        lost = r.private + c.step - r.base
    elif r.status == PREFILL:  # the last one admitted is the last one in the queue
        e.fifo_size -= 1
        if e.fifo_size == 0:
            lost = e.head_done
            e.head_done = 0
    e.recomputed += lost
    _rows_column(e.at_lost, e)[row] += lost
    _rows_column(e.at_thrown_out, e)[row] += 1
    moves.preempt(c, row, 0, True)


@njit
def make_room(c: Records, e: Records) -> None:
    """Blocks for the tokens that decoding rows are about to write: evict prefixes, then preempt the last admitted."""
    grow = c.block * phase_of(c)[c.step % c.block]
    evict(c, grow)
    while c.kv_nodes + c.kv_private + grow > c.capacity:
        left, right = c.tail_left, c.tail_right
        victim = left
        if left < 0 or (right >= 0 and rows_of(c)[right].seq > rows_of(c)[left].seq):
            victim = right
        e.preempted += 1
        throw_out(c, e, victim)
        grow = c.block * phase_of(c)[c.step % c.block]
        evict(c, grow)


@njit
def run_step(c: Records, e: Records, st: StepTime, budget: int) -> None:
    """One step: every decoding row gets a token, the prefill queue takes up to ``budget`` tokens (-1: what is left of
    the chunk), rows whose prefill ends get their first token. Writes one record to the log."""
    make_room(c, e)
    decoding = c.decoding
    context = c.decode_context
    room = c.chunk - decoding
    if budget >= 0:
        room = min(room, budget)
    if decoding == 0:
        room = max(room, 1)
    first = e.fifo_head
    taken = 0
    pairs = 0
    size = e.fifo_size
    completed = 0
    while completed < size and taken < room:
        row = _rows_column(e.at_fifo, e)[(first + completed) % e.n]
        r = rows_of(c)[row]
        k = min(r.need - e.head_done, room - taken)
        begin = r.prompt + r.kept - r.need + e.head_done
        pairs += k * begin + k * (k + 1) // 2
        taken += k
        _rows_column(e.at_computed, e)[row] += k
        e.head_done += k
        if e.head_done < r.need:
            break
        e.head_done = 0
        completed += 1
    duration = step_s(st, float(taken), float(pairs), float(decoding), float(context))
    e.now_s += duration
    e.prefilled += taken
    moves.prefilled(c, taken, pairs)
    moves.advance(c)
    _finish_due(c, e)
    for i in range(completed):
        row = _rows_column(e.at_fifo, e)[(first + i) % e.n]
        moves.start(c, row)
        _times(e.at_start_s, e)[row] = e.now_s
        if _rows_column(e.at_output, e)[row] <= c.step - rows_of(c)[row].base:
            _finish(c, e, row)
        else:
            _schedule_finish(c, e, row)
    e.fifo_head = (first + completed) % e.n
    e.fifo_size -= completed
    record = _log(e)[e.logged]
    record.t_s = e.now_s
    record.duration_s = duration
    record.prefill_tokens = taken
    record.decode_seqs = decoding
    record.kv_tokens = c.kv_nodes + c.kv_private
    record.prefill_context_tokens = pairs
    record.decode_context_tokens = context
    e.logged += 1


@njit
def _finish(c: Records, e: Records, row: int) -> None:
    _times(e.at_finish_s, e)[row] = e.now_s
    _rows_column(e.at_finished_rows, e)[e.finished] = row
    e.finished += 1
    moves.finish(c, row)


@njit
def _finish_due(c: Records, e: Records) -> None:
    """Finish the rows whose last token this step made."""
    slot = c.step % e.calendar_size
    row = _calendar(e)[slot]
    _calendar(e)[slot] = -1
    while row >= 0:
        following = _rows_column(e.at_later, e)[row]
        _finish(c, e, row)
        row = following


@njit
def loop(
    c: Records, e: Records, st: StepTime, until_finished: int, until_s: float, until_step: int, scratch: I64
) -> bool:
    """Steps until that many rows have finished, the clock has passed ``until_s``, the log is full or nothing is left.
    False if the scheduler left an idle engine with waiting rows."""
    while e.finished < until_finished and e.now_s < until_s and c.step < until_step and e.logged < e.log_size:
        admitted, preempted, budget = decide(c, scratch)
        for i in range(preempted):
            throw_out(c, e, scratch[len(scratch) - 1 - i])
        for i in range(admitted):
            submit(c, e, scratch[i])
        if c.decoding + c.prefilling == 0:
            return bool(c.waiting == 0)
        run_step(c, e, st, budget)
    return True
