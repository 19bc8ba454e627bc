"""The virtual engine behind the ``Engine`` protocol, a step a poll: what tests drive through ``Scheduler`` and
``drive``.

It keeps its own ``State`` and runs the same compiled step as ``simulate``, so a run through the object gives the
schedule of the compiled loop."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence

import numpy as np

from plait.events import Capacity, EngineRequest, Event, Finished, Preempted, Started, Step
from plait.model.steptime import StepTime
from plait.scheduling import moves
from plait.scheduling.profile import fits_now
from plait.scheduling.state import DECODE, LEFT, PREFILL, WAITING, new_state
from plait.scheduling.virtual import new_machine, run_step, submit, throw_out
from plait.table import I64, RequestTable
from plait.tree.prefix import PrefixTree


class SimulatedEngine:
    """Continuous batching on a virtual clock. Rows that do not fit yet wait inside, first come first served."""

    def __init__(
        self, table: RequestTable, tree: PrefixTree, output_tokens: I64, capacity: Capacity, step_time: StepTime
    ) -> None:
        self._capacity = dataclasses.replace(capacity, preempts_on_request=True)
        self._step_time = step_time
        self._state = new_state(table, tree, capacity, step_time, 1, 2.0)
        self._state.scalars["has_steps"] = 1
        self._machine = new_machine(np.minimum(np.asarray(output_tokens, np.int64), table.max_tokens))
        self._pending: deque[int] = deque()
        self._events: list[Event] = []
        self._budget = -1

    @property
    def capacity(self) -> Capacity:
        """As given; it preempts when ``cancel`` says so."""
        return self._capacity

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """Queue rows; the budget holds for the next step."""
        self._pending.extend(request.row for request in requests)
        self._budget = -1 if prefill_budget_tokens is None else prefill_budget_tokens
        self._admit_pending()

    def cancel(self, rows: Sequence[int]) -> None:
        """Throw rows out; they come back as Preempted with their tokens kept."""
        status = self._state.rows["status"]
        for row in rows:
            if row in self._pending:
                self._pending.remove(row)
                self._events.append(Preempted(row, self.now_s(), 0, requeue=True))
            elif status[row] == DECODE:
                throw_out(self._state.c, self._machine.e, row)
                self._events.append(Preempted(row, self.now_s(), 0, requeue=True))

    def poll(self, timeout_s: float) -> list[Event]:
        """Run one step; an idle engine returns only what is still to be told."""
        self._admit_pending()
        c = self._state.c
        if c["prefilling"] + c["decoding"] > 0:
            self._step()
        events, self._events = self._events, []
        return events

    def now_s(self) -> float:
        """The virtual clock."""
        return float(self._machine.e["now_s"])

    def close(self) -> None:
        """Nothing to release."""

    def _admit_pending(self) -> None:
        c = self._state.c
        while self._pending and fits_now(c, self._pending[0]):
            row = self._pending.popleft()
            moves.admit(c, row, LEFT, False)
            submit(c, self._machine.e, row)

    def _step(self) -> None:
        c, e, rows = self._state.c, self._machine.e, self._state.rows
        if e["logged"] == e["log_size"]:
            self._machine = self._machine.with_longer_log()
            e = self._machine.e
        running = np.flatnonzero((rows["status"] == PREFILL) | (rows["status"] == DECODE))
        prefilling = rows["status"] == PREFILL
        seq = rows["seq"].copy()
        finished = int(e["finished"])
        run_step(c, e, self._step_time, self._budget)
        self._budget = -1
        now = self.now_s()
        lost = running[rows["status"][running] == WAITING]
        for row in lost[np.argsort(-seq[lost])]:
            self._events.append(Preempted(int(row), now, 0, requeue=True))
        self._events.append(self._last_step())
        done = self._machine.finished_rows[finished : int(e["finished"])].tolist()
        self._events.extend(self._finished(row, now) for row in done if not prefilling[row])
        started = [row for row in running if prefilling[row] and rows["status"][row] not in (PREFILL, WAITING)]
        for row in sorted(started, key=lambda row: seq[row]):
            self._events.append(Started(int(row), now))
            if int(row) in done:
                self._events.append(self._finished(int(row), now))

    def _last_step(self) -> Step:
        record = self._machine.log[int(self._machine.e["logged"]) - 1]
        return Step(
            t_s=float(record["t_s"]),
            duration_s=float(record["duration_s"]),
            prefill_tokens=int(record["prefill_tokens"]),
            decode_seqs=int(record["decode_seqs"]),
            kv_tokens=int(record["kv_tokens"]),
            prefill_context_tokens=int(record["prefill_context_tokens"]),
            decode_context_tokens=int(record["decode_context_tokens"]),
        )

    def _finished(self, row: int, now: float) -> Finished:
        tokens = int(self._machine.output[row])
        prompt = int(self._state.rows["prompt"][row])
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        body = json.dumps({"object": "simulated", "usage": usage}).encode()
        return Finished(row, now, 200, body, prompt, 0, tokens, ("stop",))
