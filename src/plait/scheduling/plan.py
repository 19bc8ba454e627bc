"""Between estimates and queues: asks the policy for an order, fills the state's queues, and does it again as answers
arrive."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from plait._numba import njit
from plait.events import Decision
from plait.model.steptime import StepTime
from plait.policy.base import Order, View, order_function
from plait.policy.blend import root_child, units, work
from plait.policy.latency import lost_prefix_tokens
from plait.scheduling.decide import BLEND, DUAL_SCAN, QUEUE, decide
from plait.scheduling.outlook import BEYOND_SEEN, chances, moments
from plait.scheduling.profile import refresh, running_rows
from plait.scheduling.state import WAITING, longest_output, new_state
from plait.scheduling.tiers import Tiers
from plait.scheduling.unit_means import UnitMeans
from plait.table import F64, I64

if TYPE_CHECKING:
    from plait.lengths import Lengths

KERNELS = {"queue": QUEUE, "dual-scan": DUAL_SCAN, "blend": BLEND}
REPLAN_GROWTH = 1.5
"""Answers seen grow by this factor between two plans: the work of planning stays a constant share of the job's."""
REPLAN_DRIFT = 0.02
"""Mean relative change of the rows' estimates from which on a new plan is made."""
REFRESH_STEPS, REFRESH_GROWTH = 16, 0.2
"""Decode steps between two refreshes of the length curves: so many, and so much of the steps so far."""
QUEUE_REFRESH_STEPS, QUEUE_REFRESH_GROWTH = 256, 1.0
"""The same for one queue, which only asks the curves whether its head fits."""
NEVER = 1 << 60
SAMPLE_KV_SHARE = 0.25
"""Of the KV cache, for the prompts of a length sample that runs before its groups' turn."""
SAMPLE_WORK_SHARE = 0.05
"""Of a job's tokens, for prefixes that such a sample computes and their groups compute again."""
FIRST_REPLAN = 8
"""Answers after which a job without a sample plans again for the first time."""


class Planner:
    """Owns the ``State`` and keeps its queues and length curves current."""

    def __init__(self, view: View, lengths: Lengths, policy: str, observed: int = 0) -> None:
        """``observed``: answers to other rows that an earlier plan was told."""
        self._view = view
        self._lengths = lengths
        self._policy = policy
        self._order_of = order_function(policy)
        horizon = longest_output(view.table.max_tokens, view.expected_output_tokens)
        self.state = new_state(view.table, view.tree, view.capacity, view.step_time, len(lengths.survival), horizon)
        self.state.rows["cls"] = lengths.classes
        self.state.expected[:] = lengths.expected
        self._take_curves()
        scalars = self.state.scalars[0]
        scalars["exact"] = lengths.exact
        self._observed = observed + round(float(lengths.state.finished.sum() - lengths.begun_with))
        self._sample = np.zeros(0, np.int64) if lengths.exact or self._observed else lengths.sample_rows()
        self._next_replan = max(FIRST_REPLAN, len(self._sample), int(self._observed * REPLAN_GROWTH))
        self._units = UnitMeans(np.zeros(0, np.int64) if lengths.exact else units(view))
        self._units.observe(*lengths.answers)
        self._next_refresh = REFRESH_STEPS
        self._longest = _longest_seen(lengths)
        self._tiers = Tiers(view.table)
        self._now_s = 0.0
        self.order: Order | None = None

    def renewed(self, view: View, lengths: Lengths) -> Planner:
        """A planner of other rows on the same machine, as it was measured. Their order is still to be asked for."""
        view = dataclasses.replace(view, step_time=self._view.step_time)
        found, before = Planner(view, lengths, self._policy, self._observed), self.state.c
        for name in ("has_steps", "context_per_prefill_token", "overflowed"):
            found.state.scalars[0][name] = before[name]
        return found

    def observe(self, row: int, output_tokens: int, finished: bool) -> None:
        """An engine's report on one row's output."""
        self._lengths.observe(row, output_tokens, finished)
        self._observed += finished
        if finished:
            self._units.observe(np.array([row]), np.array([output_tokens]))
        self._longest = max(self._longest, output_tokens)

    def observe_rows(self, rows: I64, output_tokens: I64) -> None:
        """Outputs of rows that finished."""
        self._observed += len(rows)
        if self._lengths.exact:
            return
        self._lengths.observe_rows(rows, output_tokens)
        if self._next_replan < NEVER:
            self._units.observe(rows, output_tokens)
        self._longest = max(self._longest, int(output_tokens.max(initial=1)))

    def until_replan(self) -> int:
        """Answers that may still come in before the next plan; a huge number if there will be none."""
        return NEVER if self._lengths.exact else max(1, self._next_replan - self._observed)

    def until_due_s(self) -> float:
        """Time at which the next deadline does not allow its row to wait any longer."""
        return self._tiers.next_due_s

    def tell_time(self, now_s: float) -> None:
        """Bring rows that have become due to the front of their queues."""
        self._now_s = max(self._now_s, now_s)
        if self._now_s >= self._tiers.next_due_s and self.order is not None:
            self._fill_queues(self.order, self._view_now())

    def until_step(self) -> int:
        """Decode step at which the estimates are due for a refresh."""
        return NEVER if self._lengths.exact else self._next_refresh

    def replan_if_due(self) -> None:
        """Refresh the estimates, and order the waiting rows anew when enough answers have come in."""
        if self._lengths.exact:
            return
        if self._observed >= self._next_replan:
            self._next_replan = self._replan_after()
            self.refresh_lengths()
            expected = self._units.refine(self._lengths.expected)
            if self._have_moved(expected):
                self._plan(expected)
        elif self.state.c["step"] >= self._next_refresh:
            self.refresh_lengths()

    def _have_moved(self, expected: F64) -> bool:
        """Whether the estimates are so far from those of the last plan that a new one may differ."""
        return bool(np.abs(expected / self.state.expected - 1.0).mean() > REPLAN_DRIFT)

    def _replan_after(self) -> int:
        """Answers to wait for. Orders that ignore lengths stand."""
        order = self.order
        if order is None or (order.right is None and order.key is None and not order.finish_groups):
            return NEVER
        return max(self._observed + 1, int(self._observed * REPLAN_GROWTH))

    def _refresh_after(self) -> int:
        """Decode step to wait for; one queue only asks the curves whether its head fits."""
        step = int(self.state.c["step"])
        if self.state.c["policy"] == QUEUE:
            return step + max(QUEUE_REFRESH_STEPS, int(step * QUEUE_REFRESH_GROWTH))
        return step + max(REFRESH_STEPS, int(step * REFRESH_GROWTH))

    def set_step_time(self, step_time: StepTime) -> None:
        """Constants measured on the live engine, from now on."""
        c = self.state.c
        c["gemm_s"], c["weights_s"] = step_time.gemm_s_per_token, step_time.weights_s
        c["prefill_attn_s"], c["kv_read_s"] = step_time.prefill_attn_s, step_time.kv_read_s_per_token
        c["overhead_s"], c["gemm_base_s"] = step_time.overhead_s, step_time.gemm_base_s
        c["comm_s"], c["comm_base_s"] = step_time.comm_s_per_token, step_time.comm_base_s
        self._view = dataclasses.replace(self._view, step_time=step_time)

    def refresh_lengths(self) -> None:
        """New survival curves from all answers so far; running rows count as "longer than this"."""
        rows, c = self.state.rows, self.state.c
        running = np.empty(int(c["decoding"]), np.int64)
        running_rows(c, running)
        ages = c["step"] - rows["base"][running]
        self._longest = max(self._longest, int(ages.max(initial=1)))
        self._lengths.observe_rows(running, ages, finished=False)
        self._lengths.refresh()
        self._take_curves()
        refresh(c)
        c["events"] += 1
        self._next_refresh = self._refresh_after()

    def _take_curves(self) -> None:
        if not self._lengths.exact and self.state.c["policy"] != DUAL_SCAN:
            chances(self._lengths.survival, self._lengths.grid_tokens, self.state.tau, self.state.alive)

    def replan(self) -> None:
        """Ask the policy for an order and fill the queues."""
        self._plan(self._units.refine(self._lengths.expected))

    def _plan(self, expected: F64) -> None:
        self.state.expected[:] = expected
        view = self._view_now()
        order = self._order_of(view)
        self.order = order
        if self._observed and self._replan_after() == NEVER:
            self._next_replan = NEVER
        self._fill_queues(order, view)
        scalars = self.state.scalars[0]
        if order.key is not None:
            self.state.key[:] = order.key
        scalars["policy"] = KERNELS[order.kernel]
        scalars["window"], scalars["kappa"] = order.window, order.kappa
        scalars["throttle"], scalars["delay_weight"] = order.throttle_prefill, order.delay_weight
        scalars["events"] += 1
        if order.kernel == "dual-scan":
            compute, memory, _ = work(view)
            scalars["root_density"] = compute.sum() / max(float(memory.sum()), 1e-300)
        if order.kernel == "blend":
            self._weigh(order, view)

    def requeue(self) -> None:
        """Fill the queues again in the order that was asked for."""
        assert self.order is not None
        view = self._view_now()
        self._fill_queues(self.order, view)
        if self.order.kernel == "blend":
            self._weigh(self.order, view)

    def _view_now(self) -> View:
        """The view with today's estimates."""
        return dataclasses.replace(
            self._view,
            expected_output_tokens=self.state.expected,
            expected_square=self._squares(),
            now_s=self._now_s,
        )

    def _fill_queues(self, order: Order, view: View) -> None:
        """The waiting rows in that order by tier, the length sample first in each."""
        scalars, waits = self.state.scalars[0], self.state.rows["status"] == WAITING
        if self._tiers.in_use:
            self._tiers.update(view, waits, self._now_s)
            self.state.tier[:] = self._tiers.tier
        for side, rows in enumerate((order.rows, order.right)):
            kept = np.zeros(0, np.int64) if rows is None else self._first(order, rows[waits[rows]])
            kept = self._tiers.sort(kept)
            self.state.queue[side, : len(kept)] = kept
            scalars[("size_left", "size_right")[side]] = len(kept)
            scalars[("head_left", "head_right")[side]] = 0
        scalars["events"] += 1

    def _weigh(self, order: Order, view: View) -> None:
        """What the left side of the blend still has to compute and the KV that it holds meanwhile; what the right side
        still has to read."""
        scalars, status, costs = self.state.scalars[0], self.state.rows["status"], work(view)
        left = order.rows[status[order.rows] == WAITING]
        scalars["left_compute"], scalars["left_memory"], _ = _sums(left, costs)
        right = order.rows[:0] if order.right is None else order.right[status[order.right] == WAITING]
        scalars["right_compute"], scalars["right_memory"], _ = _sums(right, costs)
        _, memory, prefill = _sums(left if len(left) else order.rows, costs)
        scalars["left_area"] = memory / max(float(scalars["kv_read_s"]), 1e-15) / max(1.0, prefill)

    def _squares(self) -> F64 | None:
        """Expected square of each row's output, float64 [n]: the class's ratio of E[d^2] to E[d]^2 times the row's."""
        if self._lengths.exact:
            return None
        mean, square = moments(self._lengths.survival, self._lengths.grid_tokens, BEYOND_SEEN * self._longest)
        ratio = np.maximum(1.0, square / mean**2)[self._lengths.classes]
        return np.minimum(ratio * self.state.expected, self._view.table.max_tokens) * self.state.expected

    def decide(self, out: I64) -> Decision:
        """The kernel's decision as plain data; ``out`` is scratch."""
        admitted, preempted, budget = decide(self.state.c, out)
        return Decision(
            admit=out[:admitted].copy(),
            preempt=out[len(out) - preempted :][::-1].copy(),
            prefill_budget_tokens=int(budget) if budget >= 0 else None,
        )

    def _first(self, order: Order, rows: I64) -> I64:
        """The length sample first, where the order depends on lengths and little is computed twice for it, or nothing
        is; else prefix groups that have begun, so that a new plan does not leave a cached prefix behind."""
        if order.right is not None or order.key is not None:
            pays = not self._observed and (order.right is not None or self._sample_fits() or self._sample_is_cheap())
            ahead = self._sample if pays else np.zeros(0, np.int64)
        elif not order.finish_groups:
            return rows
        elif self._observed:
            group = self._view.once("groups", lambda: root_child(self._view.tree))
            ahead = np.flatnonzero(np.isin(group, group[self.state.rows["status"] != WAITING]))
        else:
            ahead = self._sample if self._sample_fits() else np.zeros(0, np.int64)
        if not len(ahead):
            return rows
        first = np.zeros(self._view.table.n, np.bool_)
        first[ahead] = True
        here = first[rows]
        return np.concatenate((rows[here], rows[~here]))

    def _sample_fits(self) -> bool:
        """Whether the sample's prompts can stay in the cache until their groups' turn comes."""
        prompts = int(self._view.table.prompt_tokens[self._sample].sum())
        return prompts <= SAMPLE_KV_SHARE * self._view.capacity.kv_tokens

    def _sample_is_cheap(self) -> bool:
        """Whether it costs little that the prefixes of its groups will not stay in the cache until then."""
        view = self._view_now()
        (_, _, tokens), (_, one) = work(view), np.unique(units(view)[self._sample], return_index=True)
        twice = lost_prefix_tokens(view)[self._sample[one]].sum()
        return bool(twice <= SAMPLE_WORK_SHARE * (tokens.sum() + view.expected_output_tokens.sum()))


@njit
def _sums(rows: I64, costs: tuple[F64, F64, F64]) -> tuple[float, float, float]:
    """Compute and memory seconds and prefill tokens of rows together."""
    compute, memory, prefill = costs
    total = (0.0, 0.0, 0.0)
    for row in rows:
        total = (total[0] + compute[row], total[1] + memory[row], total[2] + prefill[row])
    return total


def _longest_seen(lengths: Lengths) -> int:
    """Tokens of the longest answer observed so far, to the resolution of the grid."""
    seen = np.flatnonzero(lengths.state.finished.sum(axis=0))
    return int(lengths.grid_tokens[min(seen[-1] + 1, len(lengths.grid_tokens) - 1)]) if len(seen) else 1024
