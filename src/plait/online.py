"""A job without an end: requests come and go, and one ``Scheduler`` decides about those that are here.

A plan needs all its requests side by side, so the scheduler is given the present ones anew when others have come: at
once, unless planning would then take more than a small share of the time; requests that find nobody waiting need no
plan. Whoever was passed by too many goes first, so nobody waits for ever under any policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from plait.events import Capacity, Event, Failed, Finished, Preempted, Progress, Step
from plait.lengths import Lengths
from plait.lengths.past import Past
from plait.model.steptime import StepTime, assumed
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.table import I32, I64, RequestTable
from plait.tree.build import build_tree
from plait.tree.prefix import PrefixTree

PLAN_SHARE, LONGEST_PAUSE_S = 0.05, 0.5
"""Share of the time that planning may take, and the longest pause between two plans that this leads to."""
PASSED_SHARE, PASSED_SLACK = 2, 256
"""A request may be passed by so many times the requests that waited when it came, and so many more."""
LEAST_SHARED_TOKENS = 16
"""Shorter common beginnings are no group."""


@dataclass(eq=False, slots=True)
class Present:
    """A request that is here."""

    key: Hashable
    tokens: I32
    max_tokens: int
    min_tokens: int
    priority: int
    arrival_s: float
    due: int
    """Admissions of others after which it is passed no more."""
    row: int = -1
    """Of the scheduler; -1: not planned yet."""
    running: bool = False
    admission: int = 0
    """Its number among all."""
    generated: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """The requests that the scheduler knows, row by row, and what their answers turned out to be."""

    rows: list[Present]
    table: RequestTable
    tree: PrefixTree
    lengths: Lengths
    output_tokens: I64  # [n] -1: no answer (yet)


class OnlineScheduler:
    """Requests by the engine's own keys. ``clock``: seconds, for arrival times and what planning costs."""

    def __init__(
        self, capacity: Capacity, step_time: StepTime, policy: str, clock: Callable[[], float], shares: bool = True
    ) -> None:
        """``step_time``: a first guess. ``shares``: the engine reuses the KV of common beginnings. Raises UsageError
        for an unknown policy."""
        self._capacity, self._step_time, self._clock, self._shares = capacity, step_time, clock, shares
        self._zero_s = clock()
        self._here: dict[Hashable, Present] = {}
        self._fresh: dict[Hashable, Present] = {}  # wait and are not planned yet
        self._past = Past()
        self._admissions = 0
        self._pause_until_s = 0.0
        self._plan = self._plan_of([])
        self.scheduler = Scheduler(self._view(0.0), self._plan.lengths, policy, calibrates=True)

    def __len__(self) -> int:
        """Requests that are not in the engine."""
        return len(self._fresh) + self.scheduler.waiting

    def __iter__(self) -> Iterator[Hashable]:
        """Their keys, the first that came first."""
        return (each.key for each in self._here.values() if not each.running)

    def __contains__(self, key: Hashable) -> bool:
        """Whether the request is here, in the engine or not."""
        return key in self._here

    def arrive(self, key: Hashable, tokens: I32, max_tokens: int, min_tokens: int = 0, priority: int = 0) -> None:
        """A request has come. ``priority``: higher goes first."""
        due = self._admissions + PASSED_SHARE * len(self) + PASSED_SLACK
        new = Present(key, tokens, max_tokens, min(min_tokens, max_tokens), priority, self._now_s(), due)
        self._here[key] = self._fresh[key] = new

    def leave(self, key: Hashable, output_tokens: int = -1) -> None:
        """A request is answered, with so many tokens, or gone without an answer. Unknown ones are ignored."""
        gone = self._here.pop(key, None)
        if gone is None:
            return
        self._fresh.pop(key, None)
        if gone.row < 0:
            return
        self._plan.output_tokens[gone.row] = output_tokens
        ended: Event = Failed(gone.row, self._now_s(), "gone", "left without an answer")
        if output_tokens > 0:
            ended = Finished(gone.row, self._now_s(), 200, b"", output_tokens=output_tokens)
        self.scheduler.update(ended)

    def progress(self, key: Hashable, output_tokens: int) -> None:
        """A running request has so many tokens now."""
        found = self._here.get(key)
        if found is not None and output_tokens != found.generated:
            found.generated = output_tokens
            if found.row >= 0:
                self.scheduler.update(Progress(found.row, self._now_s(), output_tokens))

    def preempted(self, key: Hashable) -> None:
        """The engine threw a running request out: it waits again, and goes before those that came after it."""
        found = self._here[key]
        found.running, found.due = False, 0
        if found.row >= 0:
            self.scheduler.update(Preempted(found.row, self._now_s(), requeue=True))
        else:
            self._fresh[key] = found

    def step(self, step: Step) -> None:
        """What the engine's last step did."""
        self.scheduler.update(step)

    def decide(self, backlog: int) -> tuple[list[Hashable], int | None]:
        """Requests to hand to the engine now, in order, and the prefill tokens that its next step should take.
        ``backlog``: tokens of what it was handed that it still has to prefill."""
        now_s = self._now_s()
        if self._fresh and now_s >= self._pause_until_s:
            self._renew(now_s)
        self.scheduler.tell_backlog(backlog)
        decision = self.scheduler.decide(now_s)
        found = [self._plan.rows[row] for row in decision.admit.tolist()]
        if self._fresh and not self.scheduler.waiting:
            found += islice(self._fresh.values(), self._room())
        for each in found:
            self._fresh.pop(each.key, None)
            self._admissions += 1
            each.running, each.admission = True, self._admissions
        return [each.key for each in found], decision.prefill_budget_tokens

    def _room(self) -> int:
        """Requests that the engine may take now, by their number alone."""
        most = self._capacity.max_num_seqs or len(self._here)
        return max(0, most - (len(self._here) - len(self)))

    def _now_s(self) -> float:
        return self._clock() - self._zero_s

    def _renew(self, now_s: float) -> None:
        """Give the scheduler all requests that are here."""
        before = self._plan
        self._past.learn(before.lengths, before.table, before.tree, before.output_tokens)
        self._plan, self._fresh = self._plan_of(list(self._here.values())), {}
        rows = self._plan.rows
        for row, each in enumerate(rows):
            each.row = row
        running = sorted((each.admission, each.row) for each in rows if each.running)
        generated = np.array([each.generated for each in rows], np.int64)
        order = np.array([row for _, row in running], np.int64)
        self.scheduler.renew(self._view(now_s), self._plan.lengths, generated, order)
        done_s = self._now_s()
        self._pause_until_s = done_s + min(LONGEST_PAUSE_S, (done_s - now_s) / PLAN_SHARE)

    def _plan_of(self, rows: list[Present]) -> _Plan:
        lengths_of = np.array([len(each.tokens) for each in rows], np.int64)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths_of)))
        tokens = np.concatenate([each.tokens for each in rows]) if rows else np.zeros(0, np.int32)
        table = RequestTable.of(
            lengths_of,
            np.array([each.max_tokens for each in rows], np.int64),
            np.array([each.arrival_s for each in rows]),
            self._tiers(rows),
            tokens=tokens,
            offsets=offsets,
            min_tokens=np.array([each.min_tokens for each in rows], np.int64),
        )
        tree = PrefixTree.without_sharing(table.n)
        if self._shares:
            tree = build_tree(tokens, offsets, LEAST_SHARED_TOKENS, self._capacity.block_tokens)
        lengths = Lengths.unknown(table, tree)
        self._past.seed(lengths, table, tree)
        return _Plan(rows, table, tree, lengths, np.full(table.n, -1, np.int64))

    def _tiers(self, rows: list[Present]) -> I64:
        """Who goes first whatever the policy says, int64 [n]: by priority, and of one priority those that were passed
        by too many, the first that came first."""
        _, rank = np.unique(np.array([each.priority for each in rows], np.int64), return_inverse=True)
        overdue = np.array([not each.running and each.due <= self._admissions for each in rows], np.bool_)
        tier: I64 = rank.astype(np.int64) * (len(rows) + 1)
        tier[overdue] += len(rows) - np.flatnonzero(overdue)
        return tier

    def _view(self, now_s: float) -> View:
        plan = self._plan
        return View(plan.table, plan.tree, plan.lengths.expected, self._capacity, self._step_time, now_s=now_s)


def compile_ahead(policy: str) -> None:
    """Compile what a server would else wait for at its first requests."""
    capacity = Capacity(4096, 16, 8, 512, takes_prefill_budget=True)
    online = OnlineScheduler(capacity, assumed(), policy, lambda: 0.0)
    prompt = np.arange(64, dtype=np.int32)
    for key in range(4):
        online.arrive(key, np.append(prompt, np.int32(key)), 8)
        online.decide(64)
        online.step(Step(0.0, 1e-3, 64, key, 64 * key, 64 * 32, 64 * key))
        online.progress(key, 1)
    online.preempted(3)
    online.leave(0, 4)
    online.arrive(4, prompt, 8)
    online.decide(0)
