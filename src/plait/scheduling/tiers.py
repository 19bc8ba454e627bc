"""Who goes first whatever the policy says: rows whose deadline does not allow them to wait any longer, then higher
priorities. Inside a tier the policy's order stands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.policy.base import View
from plait.policy.due import latest_admission_s
from plait.table import I32, I64, RequestTable

LOOKAHEAD = 1 / 64
"""Share of the time to the last deadline by which rows are taken as due ahead: how often queues are filled anew."""
DUE = np.iinfo(np.int32).max
"""Tier of a row that is due."""


class Tiers:
    """The tier of each row; a larger one goes first."""

    def __init__(self, table: RequestTable) -> None:
        self._priority: I32 = np.clip(table.priority, -DUE, DUE - 1).astype(np.int32)
        self._has_deadlines = bool(np.isfinite(table.deadline_s).any())
        self.in_use = self._has_deadlines or bool(np.any(self._priority != self._priority[:1]))
        """Whether there is more than one tier."""
        self._latest_s = np.full(table.n, np.inf)
        self.tier = self._priority
        self.next_due_s = np.inf
        """When the next row becomes due."""

    def update(self, view: View, waiting: npt.NDArray[np.bool_], now_s: float) -> None:
        """Which waiting rows (bool [n]) are due now, or so soon that it is not worth asking again."""
        if not self._has_deadlines:
            return
        self._latest_s = latest_admission_s(view, waiting)
        open_deadlines = view.table.deadline_s[np.isfinite(self._latest_s)]
        ahead_s = LOOKAHEAD * max(0.0, float(open_deadlines.max(initial=now_s)) - now_s)
        due = self._latest_s <= now_s + ahead_s
        self.tier = np.where(due, DUE, self._priority).astype(np.int32)
        self.next_due_s = float(self._latest_s[~due].min(initial=np.inf))

    def sort(self, rows: I64) -> I64:
        """Rows in the policy's order -> rows by tier; those that are due by the time until which they can wait."""
        if not self.in_use:
            return rows
        tier = self.tier[rows]
        pressing = np.where(tier == DUE, self._latest_s[rows], 0.0)
        return rows[np.lexsort((np.arange(len(rows)), pressing, -tier.astype(np.int64)))]
