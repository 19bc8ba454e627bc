"""How many requests a server should hold, and how fast a user allows us to send: arithmetic without a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

QUEUE_DEPTH = 4
"""Requests a server should have waiting: enough that a freed place is filled at once, few enough that our order stays
the order."""
START = 8
DECREASE = 0.6
GROWTH = 1.5
WORTH_IT = 1.05
"""A larger window is kept if it raised throughput by at least this factor."""
HOLD_EPOCHS = 8
"""Epochs a settled window is kept before a larger one is tried again."""


@dataclass
class Window:
    """Limit on a server's requests in flight.

    With ``load`` reports (the server's own metrics) the limit is what runs plus a short queue. Without them it climbs
    while throughput rises, by epochs of two windows of answers. ``refused`` (429, overload) cuts it; answers raise it
    by one a window until it is back where it was.
    """

    ceiling: int = 4096
    limit: float = START
    measured: bool = False
    """True once the server has reported its load."""
    cut_s: float = -1.0
    """Time of the last cut: refusals of requests sent before it say nothing new."""
    best_rate: float = 0.0
    settled: float = 0.0
    """Limit to return to if the one being tried is not better; 0 while none has been measured."""
    hold: int = 0
    epoch_s: float = -1.0
    epoch_work: float = 0.0
    epoch_answers: int = 0
    recover_to: float = 0.0
    """Limit before the last cut; 0 once it has been reached again."""
    full: bool = False
    """The window was reached in this epoch: only then does its throughput say something about it."""

    def fix(self, limit: int) -> None:
        """It is known what runs at once, and nothing should wait there."""
        self.ceiling = max(min(limit, self.ceiling), 1)
        self.limit = float(self.ceiling)

    def room(self, in_flight: int) -> bool:
        """May one more request be sent?"""
        has_room = in_flight < int(self.limit)
        self.full |= not has_room
        return has_room

    def refused(self, sent_s: float, now_s: float, in_flight: int) -> None:
        """The server turned away a request sent at ``sent_s`` for want of room."""
        if sent_s <= self.cut_s:
            return
        self.cut_s = now_s
        self.recover_to = max(self.recover_to, self.limit)
        self._set(min(self.limit, in_flight + 1) * DECREASE)
        self._restart(now_s)

    def answered(self, work_tokens: float, now_s: float) -> None:
        """An answer arrived; ``work_tokens`` is what it took (prompt computed + output)."""
        if self.recover_to:
            self._set(self.limit + 1 / self.limit)
            if self.limit >= self.recover_to:
                self.recover_to = 0.0
            return
        if self.measured:
            return
        if self.epoch_s < 0:
            self._restart(now_s)
            return
        self.epoch_work += work_tokens
        self.epoch_answers += 1
        if self.epoch_answers >= max(2 * self.limit, 8) and now_s > self.epoch_s:
            if self.full:
                self._climb(self.epoch_work / (now_s - self.epoch_s))
            self._restart(now_s)

    def load(self, running: float, waiting: float) -> None:
        """The server's own count of running and waiting requests."""
        self.measured = True
        if self.recover_to:
            return
        if waiting > QUEUE_DEPTH:
            self._set(running + QUEUE_DEPTH)
        elif waiting <= QUEUE_DEPTH / 2 and self.full:
            self._set(max(self.limit, min(2 * self.limit, running + waiting + max(QUEUE_DEPTH, running / 2))))
            self.full = False

    def _climb(self, rate: float) -> None:
        if self.hold > 0:
            self.hold -= 1
            self.best_rate = 0.8 * self.best_rate + 0.2 * rate
            return
        if self.settled == 0 or rate >= WORTH_IT * self.best_rate:
            self.best_rate = rate if self.settled else max(rate, self.best_rate)
            self.settled = self.limit
            self._set(self.limit * GROWTH)
        elif self.limit > self.settled:
            self._set(self.settled)
            self.hold = HOLD_EPOCHS
        else:  # at the settled window after a hold: try a larger one again
            self.best_rate = rate
            self._set(self.limit * GROWTH)

    def _set(self, limit: float) -> None:
        self.limit = min(max(limit, 1.0), float(self.ceiling))

    def _restart(self, now_s: float) -> None:
        self.epoch_s, self.epoch_work, self.epoch_answers, self.full = now_s, 0.0, 0, False


MINUTE_S = 60.0
MERGE_S = 0.1


@dataclass
class RateLimit:
    """At most ``per_minute`` units in any 60 seconds (0 = no limit)."""

    per_minute: float
    spent: deque[list[float]] = field(default_factory=deque)  # [last time, units, first time], oldest first
    total: float = 0.0

    def wait_s(self, units: float, now_s: float) -> float:
        """Seconds until ``units`` may be spent; 0 = now. More than a whole minute's units wait for an idle minute."""
        if self.per_minute <= 0:
            return 0.0
        while self.spent and self.spent[0][0] <= now_s - MINUTE_S:
            self.total -= self.spent.popleft()[1]
        over = self.total + units - self.per_minute
        if over <= 0 or not self.spent:
            return 0.0
        for t_s, amount, _ in self.spent:
            over -= amount
            if over <= 0:
                return t_s + MINUTE_S - now_s
        return self.spent[-1][0] + MINUTE_S - now_s

    def spend(self, units: float, now_s: float) -> list[float] | None:
        """Record units as spent now; the entry may be given to ``correct`` later."""
        if self.per_minute <= 0:
            return None
        if self.spent and now_s - self.spent[-1][2] < MERGE_S:
            entry = self.spent[-1]
            entry[0], entry[1] = now_s, entry[1] + units
        else:
            entry = [now_s, units, now_s]
            self.spent.append(entry)
        self.total += units
        return entry

    def correct(self, entry: list[float] | None, units: float) -> None:
        """Add ``units`` (negative to give back) to an entry, if its minute is not over."""
        if entry is not None and self.spent and entry[0] >= self.spent[0][0]:
            entry[1] += units
            self.total += units
