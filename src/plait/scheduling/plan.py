"""Between estimates and queues: asks the policy for an order, fills the state's queues, and does it again as answers
arrive."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from plait.events import Decision
from plait.policy.base import Order, View, order_function
from plait.policy.blend import work
from plait.scheduling.decide import BLEND, DUAL_SCAN, QUEUE, decide
from plait.scheduling.profile import chances, reads_ahead, refresh
from plait.scheduling.state import WAITING, longest_output, new_state
from plait.table import F64, I64

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
        view = dataclasses.replace(
            self._view, expected_output_tokens=self.state.expected, expected_square=self._squares()
        )
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
        if order.kernel == "blend" and order.right is not None:
            self._look_ahead(view, order)

    def _look_ahead(self, view: View, order: Order) -> None:
        """What is left to do, and the KV x steps that left rows hold for each token they prefill."""
        c, waits = self.state.c, self.state.rows["status"] == WAITING
        compute, memory = work(view)
        c["compute_left_s"] = compute[waits].sum() + c["gemm_s"] * c["backlog"]
        c["memory_left_s"] = memory[waits].sum() + c["kv_read_s"] * reads_ahead(c)
        left = order.rows[waits[order.rows]] if waits[order.rows].any() else order.rows
        tokens = compute[left].sum() / max(float(c["gemm_s"]), 1e-12)
        c["left_area"] = memory[left].sum() / max(float(c["kv_read_s"]), 1e-15) / max(1.0, tokens)

    def _squares(self) -> F64 | None:
        """Expected square of each row's output, float64 [n]: the class's ratio of E[d^2] to E[d]^2 times the row's."""
        if self._lengths.exact:
            return None
        grid, survival = self._lengths.grid_tokens.astype(np.float64), self._lengths.survival
        width, middle = np.diff(grid), (grid[1:] + grid[:-1]) / 2
        height = (survival[:, 1:] + survival[:, :-1]) / 2
        mean = np.maximum((height * width).sum(axis=1), 1e-9)
        ratio = np.maximum(1.0, 2.0 * (height * width * middle).sum(axis=1) / mean**2)[self._lengths.classes]
        return np.minimum(ratio * self.state.expected, self._view.table.max_tokens) * self.state.expected

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
