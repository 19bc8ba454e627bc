"""Between estimates and queues: asks the policy for an order, fills the state's queues, and does it again as answers
arrive."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from plait.events import Decision
from plait.policy.base import Order, View, order_function
from plait.scheduling.decide import BLEND, DUAL_SCAN, QUEUE, decide
from plait.scheduling.profile import chances, refresh
from plait.scheduling.state import WAITING, longest_output, new_state
from plait.table import I64

if TYPE_CHECKING:
    from plait.lengths import Lengths

KERNELS = {"queue": QUEUE, "dual-scan": DUAL_SCAN, "blend": BLEND}
REPLAN_GROWTH = 1.5
"""Answers seen grow by this factor between two plans: the work of planning stays a constant share of the job's."""
FIRST_REPLAN = 8
"""Answers after which a job without a sample plans again for the first time."""


class Planner:
    """Owns the ``State`` and keeps its queues and length curves current."""

    def __init__(self, view: View, lengths: Lengths, policy: str) -> None:
        self._view = view
        self._lengths = lengths
        self._order_of = order_function(policy)
        horizon = longest_output(view.table.max_tokens, view.expected_output_tokens)
        self.state = new_state(view.table, view.tree, view.capacity, view.step_time, len(lengths.survival), horizon)
        self.state.rows["cls"] = lengths.classes
        self._take_lengths()
        scalars = self.state.scalars[0]
        scalars["exact"] = lengths.exact
        scalars["spread"] = 0.0 if lengths.exact else 1.0
        self._observed = int(lengths.state.finished.sum())
        self._sample = np.zeros(0, np.int64) if lengths.exact or self._observed else lengths.sample_rows()
        self._next_replan = len(self._sample) or max(FIRST_REPLAN, int(self._observed * REPLAN_GROWTH))
        self.order: Order | None = None

    def observe(self, row: int, output_tokens: int, finished: bool) -> None:
        """An engine's report on one row's output."""
        self._lengths.observe(row, output_tokens, finished)
        self._observed += finished

    def observe_rows(self, rows: I64, output_tokens: I64) -> None:
        """Outputs of rows that finished."""
        self._lengths.observe_rows(rows, output_tokens)
        self._observed += len(rows)

    def until_replan(self) -> int:
        """Answers that may still come in before the next plan; a huge number if there will be none."""
        return 1 << 60 if self._lengths.exact else max(1, self._next_replan - self._observed)

    def replan_if_due(self) -> None:
        """Refresh the estimates and order the waiting rows anew when enough answers have come in."""
        if self._observed >= self._next_replan and not self._lengths.exact:
            self._next_replan = max(self._observed + 1, int(self._observed * REPLAN_GROWTH))
            self.refresh_lengths()
            self.replan()

    def refresh_lengths(self) -> None:
        """New survival curves and expectations from all answers so far."""
        self._lengths.refresh()
        self._take_lengths()
        refresh(self.state.c)
        self.state.scalars[0]["events"] += 1

    def _take_lengths(self) -> None:
        self.state.expected[:] = self._lengths.expected
        if not self._lengths.exact:
            self.state.alive[:] = chances(self._lengths.survival, self._lengths.grid_tokens, self.state.tau)

    def replan(self) -> None:
        """Fill the queues with the waiting rows in the policy's order, the length sample first."""
        view = dataclasses.replace(self._view, expected_output_tokens=self.state.expected)
        order = self._order_of(view)
        self.order = order
        scalars, status = self.state.scalars[0], self.state.rows["status"]
        for side, rows in enumerate((order.rows, order.right)):
            kept = np.zeros(0, np.int64) if rows is None else self._sample_first(rows[status[rows] == WAITING])
            self.state.queue[side, : len(kept)] = kept
            scalars[("size_left", "size_right")[side]] = len(kept)
            scalars[("head_left", "head_right")[side]] = 0
        if order.key is not None:
            self.state.key[:] = order.key
        scalars["policy"] = KERNELS[order.kernel]
        scalars["window"], scalars["kappa"] = order.window, order.kappa
        scalars["throttle"] = order.throttle_prefill
        scalars["events"] += 1

    def decide(self, out: I64) -> Decision:
        """The kernel's decision as plain data; ``out`` is scratch."""
        admitted, preempted, budget = decide(self.state.c, out)
        return Decision(
            admit=out[:admitted].copy(),
            preempt=out[len(out) - preempted :].copy(),
            prefill_budget_tokens=int(budget) if budget >= 0 else None,
        )

    def _sample_first(self, rows: I64) -> I64:
        if not len(self._sample) or self._observed:
            return rows
        sampled = np.zeros(self._view.table.n, np.bool_)
        sampled[self._sample] = True
        here = sampled[rows]
        return np.concatenate((rows[here], rows[~here]))
