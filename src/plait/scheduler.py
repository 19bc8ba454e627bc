"""The one scheduler: engine events in, decisions out. No clock, no I/O.

A thin object over ``plait.scheduling``: it turns events into the same compiled moves and decisions that the simulator's
step loop makes, and re-plans from Python when length estimates have improved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plait.events import Decision, Event, Failed, Finished, Preempted, Progress, Started, Step
from plait.policy.base import View
from plait.scheduling import moves
from plait.scheduling.live import LiveStepTime
from plait.scheduling.plan import Planner
from plait.scheduling.state import ABSENT, DECODE, DONE, LEFT, PREFILL, RIGHT, WAITING
from plait.table import I64

if TYPE_CHECKING:
    from plait.lengths import Lengths

MAX_ADMIT = 4096
"""Rows one decision may admit."""


class Scheduler:
    """Decides which rows an engine runs next. Every row is admitted until it is done exactly once: a row is admitted
    only while it waits, waits only at first and after ``Preempted(requeue=True)``, and is done after Finished or
    Failed."""

    def __init__(self, view: View, lengths: Lengths, policy: str, calibrates: bool = False) -> None:
        """Raises UsageError for an unknown policy. Rows with ``arrival_s > 0`` stay out until ``arrive``.
        ``calibrates``: the view's step time is a first guess, corrected by the Step events of the engine."""
        self._planner = Planner(view, lengths, policy)
        self._live = LiveStepTime(self._planner, view.step_time) if calibrates else None
        self.state = self._planner.state
        self._out = np.zeros(MAX_ADMIT, np.int64)
        later = np.flatnonzero(view.table.arrival_s > 0)
        self.state.rows["status"][later] = ABSENT
        self._counts["waiting"] -= len(later)
        self._planner.replan()

    @property
    def _counts(self) -> np.void:
        found: np.void = self.state.scalars[0]
        return found

    @property
    def waiting(self) -> int:
        """Rows that have arrived and are not in the engine."""
        return int(self._counts["waiting"])

    @property
    def running(self) -> int:
        """Rows in the engine."""
        return int(self._counts["prefilling"] + self._counts["decoding"])

    @property
    def done(self) -> int:
        """Rows finished or failed for good."""
        return int(self._counts["done"])

    def oldest_running(self) -> int | None:
        """The running row that was admitted first."""
        status = self.state.rows["status"]
        running = np.flatnonzero((status == PREFILL) | (status == DECODE))
        return int(running[np.argmin(self.state.rows["seq"][running])]) if len(running) else None

    def arrive(self, rows: I64, now_s: float) -> None:
        """Rows whose time has come join the queue; rows that arrived before are ignored."""
        rows = np.asarray(rows, np.int64)
        new = rows[self.state.rows["status"][rows] == ABSENT]
        self.state.rows["status"][new] = WAITING
        self._counts["waiting"] += len(new)
        self._counts["events"] += 1
        self._planner.tell_time(now_s)
        if len(new):
            self._planner.replan()

    def renew(self, view: View, lengths: Lengths, generated: I64, running: I64) -> None:
        """Other rows from now on, for a server's requests, which come and go. ``running``: those that are in the
        engine, in order of admission; all others wait. ``generated``: tokens that each row has so far, int64 [n]; a row
        that waits with some was preempted. What was measured of the machine stays."""
        planner = self._planner.renewed(view, lengths)
        if self._live is not None:
            self._live.follow(planner)
        self._planner, self.state = planner, planner.state
        self.state.rows["kept"] = generated
        planner.tell_time(view.now_s)
        planner.replan()
        assert planner.order is not None
        on_right = np.zeros(view.table.n, np.bool_)
        if planner.order.right is not None:
            on_right[planner.order.right] = True
        profiled = planner.order.kernel != "dual-scan"
        for row in running.tolist():
            moves.admit(self.state.c, row, RIGHT if on_right[row] else LEFT, profiled)
            if generated[row]:
                moves.progress(self.state.c, row, int(generated[row]))
        rows = self.state.rows
        self._counts["backlog"] = rows["need"][rows["status"] == PREFILL].sum()
        planner.requeue()

    def update(self, event: Event) -> None:
        """Learn what the engine did. Events of rows that are not running are harmless."""
        match event:
            case Step():
                self._step(event)
            case Started():
                moves.start(self.state.c, event.row)
            case Progress():
                moves.progress(self.state.c, event.row, event.output_tokens)
            case Preempted():
                moves.preempt(self.state.c, event.row, event.lost_tokens, event.requeue)
            case Finished():
                self._done(event.row)
                if event.status_code == 200 and event.output_tokens > 0:
                    self._planner.observe(event.row, event.output_tokens, finished=True)
            case Failed():
                self._done(event.row)

    def tell_backlog(self, tokens: int) -> None:
        """An engine that can tell says how many tokens of what was admitted it still has to prefill."""
        self._counts["backlog"] = tokens

    def decide(self, now_s: float) -> Decision:
        """Which rows to submit and to preempt now, and the next step's prefill budget."""
        self._planner.tell_time(now_s)
        self._planner.replan_if_due()
        return self._planner.decide(self._out)

    def _done(self, row: int) -> None:
        if self.state.rows["status"][row] != DONE:
            moves.finish(self.state.c, row)

    def _step(self, step: Step) -> None:
        c = self._counts
        c["has_steps"] = 1
        moves.prefilled(self.state.c, step.prefill_tokens, step.prefill_context_tokens)
        moves.advance(self.state.c)
        if self._live is not None:
            self._live.observe(step)
