"""Work stealing between data-parallel ranks: a rank whose queue runs dry takes waiting rows from the one with most.

Waiting rows are taken in whole prefix groups, from all over the victim's order, so that what moves is mixed like what
stays; groups that have begun stay where their prefix is cached, unless there is nothing else. A row that was preempted
goes with the tokens it has: it has to be prefilled again anyway. Two-sided plans share out each side by itself: a rank
may have no memory-heavy row left and many others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait._numba import njit
from plait.lengths import Lengths
from plait.model.steptime import StepTime
from plait.scheduling.decide import BLEND
from plait.scheduling.kv import free_tokens
from plait.scheduling.state import LEFT, RIGHT, WAITING, State
from plait.table import F64, I64


class Queues:
    """What waits at one rank."""

    def __init__(self, state: State, lengths: Lengths, unit: I64, step_time: StepTime) -> None:
        """``unit``: prefix group of each local row, int64 [n]."""
        self._state, self._lengths, self._unit, self._st = state, lengths, unit, step_time
        self._before = [self.waiting(LEFT), self.waiting(RIGHT)]

    @property
    def left(self) -> int:
        """Rows that are not done."""
        c = self._state.scalars[0]
        return int(c["waiting"] + c["prefilling"] + c["decoding"])

    @property
    def sides(self) -> tuple[int, ...]:
        """Sides that are shared out by themselves; one where every row stands in the left queue."""
        return (LEFT, RIGHT) if self._state.scalars["policy"][0] == BLEND else (LEFT,)

    def waiting(self, side: int) -> int:
        """Rows that wait on a side, at most. O(1)."""
        c = self._state.scalars[0]
        if len(self.sides) == 1:
            return int(c["waiting"])
        name = ("left", "right")[side]
        return int(c[f"size_{name}"] - c[f"head_{name}"] + c[f"back_{name}"])

    def runs_dry(self, side: int) -> bool:
        """Whether the next slice may need more rows than wait, and the cache has room for them. Asked once a slice."""
        now = self.waiting(side)
        used, self._before[side] = self._before[side] - now, now
        c = self._state.c
        return now <= max(0, used) and (side == LEFT or free_tokens(c) > 0)

    def rows(self, side: int) -> I64:
        """Local rows that wait on a side, in order, int64 [k]."""
        c, state = self._state.scalars[0], self._state
        name = ("left", "right")[side]
        back = state.back[side, : int(c[f"back_{name}"])][::-1]
        queue = np.concatenate((back, state.queue[side, int(c[f"head_{name}"]) : int(c[f"size_{name}"])]))
        queue = queue[state.rows["status"][queue] == WAITING].astype(np.int64)
        _, first = np.unique(queue, return_index=True)  # a new plan has preempted rows in its queue too
        found: I64 = queue[np.sort(first)]
        return found

    def seconds(self, rows: I64) -> F64:
        """Expected machine time of rows, each by itself, float64 [k]."""
        st, state = self._st, self._state
        private, prompt = state.rows["private"][rows], state.rows["prompt"][rows]
        kept, output = state.rows["kept"][rows], self._remaining(rows)
        computed = private + kept
        compute = st.gemm_s_per_token * (computed + output) + st.prefill_attn_s * computed * (prompt - private / 2)
        memory = st.kv_read_s_per_token * output * (prompt + kept + output / 2)
        longer: F64 = np.maximum(compute, memory)
        return longer

    def running_s(self, side: int) -> float:
        """Expected machine time of what runs on a side: on the left, where answers are short, next to nothing."""
        c = self._state.scalars[0]
        return float(c["running_memory"]) if side == RIGHT and c["decoding"] else 0.0

    def _remaining(self, rows: I64) -> F64:
        """Output tokens that waiting rows are expected to bring yet, float64 [k]."""
        output, kept = self._state.expected[rows], self._state.rows["kept"][rows]
        for i in np.flatnonzero(kept):
            output[i] = self._lengths.expected_remaining(int(rows[i]), int(kept[i]))
        return output

    def room_tokens(self) -> int:
        """KV tokens that this rank could take now."""
        return int(free_tokens(self._state.c))

    def footprint(self, rows: I64) -> F64:
        """KV tokens of rows half-way through their answers, float64 [k]."""
        now = self._state.rows["private"][rows] + self._state.rows["kept"][rows]
        half: F64 = now + self._remaining(rows) / 2
        return half

    def units(self, rows: I64) -> tuple[I64, I64]:
        """Prefix group of each of ``rows``, int64 [k], numbered in order of appearance, and 1 for groups of which
        other rows have been started here, int64 [groups]."""
        unit = self._unit[rows]
        names, first, member = np.unique(unit, return_index=True, return_inverse=True)
        number = np.empty(len(names), np.int64)
        number[np.argsort(first, kind="stable")] = np.arange(len(names))
        status = self._state.rows["status"]
        begun = np.isin(names, self._unit[(status != WAITING) & np.isin(self._unit, names)])
        out = np.zeros(len(names), np.int64)
        out[number] = begun
        return number[member], out


def carry_on(state: State, before: State) -> None:
    """``state``, new and idle, goes on where ``before`` stands; it has the rows of ``before`` first and more behind
    them, which wait. Queues and estimates are the planner's to fill in."""
    n, more = len(before.rows), len(state.rows) - len(before.rows)
    state.rows[:n] = before.rows
    state.nodes[:] = before.nodes
    state.back[:, :n] = before.back
    for name in ("tau", "mean", "variance", "phase"):
        getattr(state, name)[:] = getattr(before, name)
    for name in before.scalars.dtype.names or ():
        if name != "n" and not name.startswith("at_"):
            state.scalars[name] = before.scalars[name]
    state.scalars["waiting"] += more


def steal(ranks: Sequence[Queues]) -> list[tuple[int, int, I64]]:
    """(thief, victim, local rows of the victim): every rank that runs dry on a side takes from the one with most left
    there. A rank takes part in one move of a side at most."""
    moves = []
    busy: set[int] = set()
    for side in (LEFT, RIGHT):
        dry = [k for k, rank in enumerate(ranks) if side in rank.sides and rank.runs_dry(side)]
        if not dry or len(dry) == len(ranks):
            continue
        rows = {k: ranks[k].rows(side) for k in range(len(ranks)) if k not in busy}
        seconds = {k: ranks[k].seconds(found) for k, found in rows.items()}
        left = {k: float(values.sum()) + ranks[k].running_s(side) for k, values in seconds.items()}
        for thief in dry:
            if thief in busy:
                continue
            others = (k for k in left if k not in busy and k != thief and len(rows[k]))
            victim = max(others, key=lambda k: left[k], default=None)
            if victim is None or left[victim] <= left[thief]:
                continue
            share = (left[victim] - left[thief]) / 2
            unit, begun = ranks[victim].units(rows[victim])
            room = np.inf if side == LEFT else float(ranks[thief].room_tokens())
            taken = _every_other(unit, begun, seconds[victim], ranks[victim].footprint(rows[victim]), share, room)
            if taken.any():
                busy |= {thief, victim}
                moves.append((thief, victim, rows[victim][taken]))
    return moves


@njit
def _every_other(unit: I64, begun: I64, seconds: F64, footprint: F64, share: float, room: float) -> NDArray[np.bool_]:
    """Mask of the rows to take, bool [k]: groups in order, as long as less than their share of what was seen so far is
    taken; ``share`` seconds and ``room`` KV tokens at most. Begun groups only if all are, and then row by row."""
    k = len(unit)
    taken = np.zeros(k, np.bool_)
    groups = len(begun)
    whole = begun.sum() < groups
    load, size = np.zeros(groups), np.zeros(groups)
    for i in range(k):
        load[unit[i]] += seconds[i]
        size[unit[i]] += footprint[i]
    takes = np.zeros(groups, np.bool_)
    ratio = share / max(seconds.sum(), 1e-300)
    seen, got, held = 0.0, 0.0, 0.0
    for u in range(groups):
        if not whole or begun[u]:
            continue
        seen += load[u]
        if got + load[u] <= share and held + size[u] <= room and got < ratio * seen:
            takes[u] = True
            got += load[u]
            held += size[u]
    for i in range(k - 1, -1, -1):
        if whole:
            taken[i] = takes[unit[i]]
        elif got + seconds[i] <= share and held + footprint[i] <= room:
            taken[i] = True
            got += seconds[i]
            held += footprint[i]
    return taken
