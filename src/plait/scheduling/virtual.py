"""An engine with a virtual clock, compiled: what one step of continuous batching with chunked prefill does to the rows.

It shares ``State`` with the scheduler, whose picture of the engine is exact here. A step costs O(1) plus its events:
decoding rows advance through running sums, the next to finish are found in a calendar by decode step, and only the
head of the prefill queue is touched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from plait._numba import njit, prefetch
from plait.model.steptime import StepTime, step_s
from plait.scheduling import moves
from plait.scheduling.decide import decide
from plait.scheduling.kv import evict, growth
from plait.scheduling.pointer import carray, pointer
from plait.scheduling.state import DECODE, LINE_BYTES, PREFILL, Records, records, rows_of
from plait.table import I32, I64

_RUN = [
    ("output", "i4"),  # true output tokens
    ("later", "i4"),  # next row that finishes in the same step
    ("earlier", "i4"),
    ("computed", "i4"),  # tokens prefilled for the row, all its starts together
    ("cached", "i4"),  # tokens it needed and did not prefill: shared prefixes in KV, all its starts together
    ("lost", "i4"),  # KV tokens thrown away when it was preempted
    ("thrown_out", "i4"),  # times it was preempted
    ("admit_s", "f8"),  # time of the last admission
    ("start_s", "f8"),  # first token, at the last start
    ("finish_s", "f8"),
]
_NAMES, _FORMATS = zip(*_RUN, strict=True)
RUN = np.dtype({"names": list(_NAMES), "formats": list(_FORMATS), "itemsize": LINE_BYTES}, align=True)
"""What the engine knows of a row: one record, one cache line."""
FETCH_STEPS = 8
"""Steps ahead of a row's end at which its records are fetched."""
_COLUMNS = ["runs", "finished_rows", "calendar", "fifo", "log"]
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

    runs: Records  # RUN [n]
    calendar: I32  # [power of two > longest output] first row that finishes at decode steps congruent to the index
    fifo: I32  # [n] ring of rows in prefill
    finished_rows: I32  # [n] rows in order of completion
    log: Records  # STEP [capacity of the log]
    engine: Records  # _ENGINE [1]

    @property
    def e(self) -> Records:
        """The record that compiled functions take."""
        return self.engine[0]

    @property
    def output(self) -> I32:
        """True output tokens, int32 [n]."""
        found: I32 = self.runs["output"]
        return found

    def with_longer_log(self) -> Machine:
        """The same machine with room for twice as many steps."""
        longer = dataclasses.replace(self, log=np.concatenate((self.log, np.zeros_like(self.log))))
        longer._connect()
        return longer

    def with_more_rows(self, output_tokens: I64) -> Machine:
        """The same machine with further rows, none longer than the machine was made for."""
        n, more = len(self.runs), len(output_tokens)
        runs = records(n + more, RUN)
        _fill(runs[n:], output_tokens)
        runs[:n] = self.runs
        finished = np.concatenate((self.finished_rows, np.zeros(more, np.int32)))
        ring = (int(self.engine["fifo_head"][0]) + np.arange(int(self.engine["fifo_size"][0]))) % max(1, n)
        fifo = np.zeros(max(1, n + more), np.int32)
        fifo[: len(ring)] = self.fifo[ring]
        larger = dataclasses.replace(self, runs=runs, finished_rows=finished, fifo=fifo)
        larger.engine["n"], larger.engine["fifo_head"] = n + more, 0
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
        runs=records(n, RUN),
        calendar=np.full(size, -1, np.int32),
        fifo=np.zeros(max(1, n), np.int32),
        finished_rows=np.zeros(n, np.int32),
        log=np.zeros(max(1 << 16, n), STEP),
        engine=np.zeros(1, _ENGINE),
    )
    _fill(machine.runs, output_tokens)
    machine.engine["n"] = n
    machine.engine["calendar_size"] = size
    machine._connect()
    return machine


@njit
def _fill(runs: Records, output_tokens: I64) -> None:
    for row in range(len(runs)):
        run = runs[row]
        run.output = output_tokens[row]
        run.later = run.earlier = -1
        run.admit_s = run.start_s = run.finish_s = np.nan


@njit
def _runs(e: Records) -> Records:
    found: Records = carray(pointer(e.at_runs), e.n, RUN)
    return found


@njit
def _by_row(address: int, e: Records) -> I32:
    found: I32 = carray(pointer(address), e.n, np.int32)
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
    _by_row(e.at_fifo, e)[(e.fifo_head + e.fifo_size) % e.n] = row
    e.fifo_size += 1
    r, run = rows_of(c)[row], _runs(e)[row]
    run.admit_s = e.now_s
    run.cached += r.prompt + r.kept - r.need


@njit
def _schedule_finish(c: Records, e: Records, row: int) -> None:
    """Enter a decoding row in the calendar: it finishes when it has all its tokens."""
    run = _runs(e)[row]
    slot = (rows_of(c)[row].base + run.output) & (e.calendar_size - 1)
    head = _calendar(e)[slot]
    run.later, run.earlier = head, -1
    if head >= 0:
        _runs(e)[head].earlier = row
    _calendar(e)[slot] = row


@njit
def _unschedule_finish(c: Records, e: Records, row: int) -> None:
    run = _runs(e)[row]
    if run.earlier >= 0:
        _runs(e)[run.earlier].later = run.later
    else:
        _calendar(e)[(rows_of(c)[row].base + run.output) & (e.calendar_size - 1)] = run.later
    if run.later >= 0:
        _runs(e)[run.later].earlier = run.earlier


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
    _runs(e)[row].lost += lost
    _runs(e)[row].thrown_out += 1
    moves.preempt(c, row, 0, True)


@njit
def make_room(c: Records, e: Records) -> None:
    """Blocks for the tokens that decoding rows are about to write: evict prefixes, then preempt the last admitted."""
    grow = growth(c)
    evict(c, grow)
    while c.kv_nodes + c.kv_private + grow > c.capacity:
        left, right = c.tail_left, c.tail_right
        victim = left
        if left < 0 or (right >= 0 and rows_of(c)[right].seq > rows_of(c)[left].seq):
            victim = right
        e.preempted += 1
        throw_out(c, e, victim)
        grow = growth(c)
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
        row = _by_row(e.at_fifo, e)[(first + completed) % e.n]
        r = rows_of(c)[row]
        k = min(r.need - e.head_done, room - taken)
        begin = r.prompt + r.kept - r.need + e.head_done
        pairs += k * begin + k * (k + 1) // 2
        taken += k
        _runs(e)[row].computed += k
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
        row = _by_row(e.at_fifo, e)[(first + i) % e.n]
        moves.start(c, row)
        run = _runs(e)[row]
        run.start_s = e.now_s
        if run.output <= c.step - rows_of(c)[row].base:
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
    _runs(e)[row].finish_s = e.now_s
    _by_row(e.at_finished_rows, e)[e.finished] = row
    e.finished += 1
    moves.finish(c, row)


@njit
def _finish_due(c: Records, e: Records) -> None:
    """Finish the rows whose last token this step made."""
    slot = c.step & (e.calendar_size - 1)
    row = _calendar(e)[slot]
    _calendar(e)[slot] = -1
    coming = _calendar(e)[(slot + FETCH_STEPS) & (e.calendar_size - 1)]
    if coming >= 0:
        prefetch(e.at_runs + LINE_BYTES * coming)
        prefetch(c.at_rows + LINE_BYTES * coming)
    while row >= 0:
        following = _runs(e)[row].later
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
            prefetch(e.at_runs + LINE_BYTES * scratch[i])
        for i in range(admitted):
            submit(c, e, scratch[i])
        if c.decoding + c.prefilling == 0:
            return bool(c.waiting == 0)
        run_step(c, e, st, budget)
    return True
