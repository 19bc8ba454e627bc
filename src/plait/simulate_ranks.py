"""Data parallelism, simulated: the central tree is cut into ranks of equal work, each rank serves its own queue, all
learn output lengths together, and a rank that runs out of work takes some of another's (``plait.scheduling.stealing``).

The ranks advance in turns, a small slice of the job's time each, so what one rank observes the others know within a
slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.cost import Cost
from plait.model.steptime import StepTime
from plait.partition import balanced_cut
from plait.policy.base import View
from plait.policy.blend import SHARING_KEPT, work
from plait.policy.units import split_units
from plait.scheduling.plan import Planner
from plait.scheduling.state import ABSENT, Records
from plait.scheduling.stealing import Queues, carry_on, steal
from plait.scheduling.virtual import Machine, new_machine
from plait.simulate import Progress, Result, checked_output, preempting, result, run, silent, simulate
from plait.table import I32, I64, RequestTable
from plait.tree.prefix import PrefixTree

SLICES = 256
"""Turns of a rank in the time that its share of the job is expected to take."""


class Job(Protocol):
    """A job with true output lengths (``plait.data.traces.Trace``)."""

    @property
    def table(self) -> RequestTable: ...

    @property
    def tree(self) -> PrefixTree: ...

    @property
    def output_tokens(self) -> I64: ...


class Part:
    """Some rows of a job, as a job. ``place``: position of each row of the whole in its depth-first order, int64 [n]"""

    def __init__(self, job: Job, rows: I64, place: I64) -> None:
        table = job.table
        self.table = RequestTable.of(
            table.prompt_tokens[rows],
            table.max_tokens[rows],
            table.arrival_s[rows],
            table.priority[rows],
            table.deadline_s[rows],
            min_tokens=table.min_tokens[rows],
        )
        self.tree = tree_of_rows(job.tree, rows, place)
        self.output_tokens = job.output_tokens[rows]


def tree_of_rows(tree: PrefixTree, rows: I64, place: I64) -> PrefixTree:
    """The same nodes over fewer rows; row k of the result is ``rows[k]``."""
    order = np.argsort(place[rows], kind="stable")
    at = place[rows][order]
    return dataclasses.replace(
        tree,
        node_of=tree.node_of[rows],
        dfs_rows=order.astype(np.int64),
        row_begin=np.searchsorted(at, tree.row_begin).astype(np.int64),
        row_end=np.searchsorted(at, tree.row_end).astype(np.int64),
    )


def place_of(tree: PrefixTree) -> I64:
    """Position of each row in depth-first order, int64 [n]."""
    place = np.empty(len(tree.node_of), np.int64)
    place[tree.dfs_rows] = np.arange(len(place))
    return place


def simulate_ranks(
    job: Job,
    lengths_of: Callable[[Job], Lengths],
    capacity: Capacity,
    step_time: StepTime,
    policy: str,
    cost: Cost,
    ranks: int = 1,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Result]:
    """One result a rank; ``Result.rows`` says which rows of the job it ran. ``lengths_of`` makes the estimates that
    the ranks start with, and share, from the job. ``progress`` is told now and then how many rows are done.

    Raises what ``simulate`` raises, and UsageError for ranks < 1.
    """
    lengths = lengths_of(job)
    if ranks == 1:
        whole_job = (job.table, job.tree, job.output_tokens)
        return [simulate(*whole_job, lengths, capacity, step_time, policy, seed, progress=progress)]
    checked_output(job.table, job.output_tokens, capacity)
    rank_of = balanced_cut(job.tree, job.table.prompt_tokens, lengths.expected, cost, ranks)
    whole = _Whole(job, lengths, capacity, step_time, policy, seed)
    running = [_Rank(whole, np.flatnonzero(rank_of == rank)) for rank in range(ranks)]
    slice_s, now_s = whole.seconds() / ranks / SLICES, 0.0
    while any(rank.queues.left for rank in running):
        now_s += slice_s
        for rank in running:
            rank.run(now_s)
        for thief, victim, rows in steal([rank.queues for rank in running]):
            running[thief].take(running[victim].give(rows), now_s)
        progress(job.table.n - sum(rank.queues.left for rank in running))
    return [rank.result() for rank in running]


class Moved(NamedTuple):
    """Waiting rows of the job that go from one rank to another, int64 [k], with what was done for them so far."""

    rows: I64
    kept: I32  # [k] output tokens they have
    seen: I64  # [k] as in ``LengthState``
    runs: Records  # [k] as in ``Machine``


class _Whole:
    """What all ranks have in common."""

    def __init__(
        self, job: Job, lengths: Lengths, capacity: Capacity, step_time: StepTime, policy: str, seed: int
    ) -> None:
        self.job, self.lengths, self.capacity, self.step_time = job, lengths, preempting(capacity), step_time
        self.policy, self.seed = policy, seed
        self.place = place_of(job.tree)
        self.unit = split_units(job.tree, SHARING_KEPT)
        self.longest = int(job.output_tokens.max(initial=1))

    def seconds(self) -> float:
        """Expected seconds of the job on one rank."""
        view = View(self.job.table, self.job.tree, self.lengths.expected, self.capacity, self.step_time)
        compute, memory, _ = work(view)
        return max(float(np.maximum(compute.sum(), memory.sum())), 1e-9)


class _Rank:
    """One engine and its scheduler. Local row k is row ``rows[k]`` of the job."""

    def __init__(self, whole: _Whole, rows: I64) -> None:
        self.whole, self.rows = whole, rows
        part = Part(whole.job, rows, whole.place)
        self.lengths = whole.lengths.part(rows)
        self.planner = self._planner(part)
        self.planner.replan()
        self.machine: Machine = new_machine(np.minimum(part.output_tokens, part.table.max_tokens), whole.longest)
        self.queues = self._queues()

    def _planner(self, part: Part) -> Planner:
        whole = self.whole
        view = View(part.table, part.tree, self.lengths.expected, whole.capacity, whole.step_time, whole.seed)
        planner = Planner(view, self.lengths, whole.policy)
        planner.state.scalars["has_steps"] = 1
        return planner

    def _queues(self) -> Queues:
        whole = self.whole
        return Queues(self.planner.state, self.lengths, whole.unit[self.rows], whole.step_time)

    def run(self, until_s: float) -> None:
        """Advance to ``until_s``, or to the end of what there is to do."""
        self.machine = run(self.planner, self.machine, self.whole.step_time, until_s)

    def give(self, rows: I64) -> Moved:
        """Let go of waiting rows (local)."""
        state = self.planner.state
        moved = Moved(self.rows[rows], state.rows["kept"][rows], self.lengths.state.seen[rows], self.machine.runs[rows])
        state.rows["status"][rows] = ABSENT
        state.scalars["waiting"] -= len(rows)
        return moved

    def take(self, moved: Moved, now_s: float) -> None:
        """Add rows of the job to the queue. What runs goes on."""
        whole, old, n = self.whole, self.planner.state, len(self.rows)
        whole.lengths.state.seen[self.rows] = self.lengths.state.seen
        whole.lengths.state.seen[moved.rows] = moved.seen
        self.rows = np.concatenate((self.rows, moved.rows))
        part = Part(whole.job, self.rows, whole.place)
        self.lengths = whole.lengths.part(self.rows)
        done = self.machine.finished_rows[: int(self.machine.engine["finished"][0])].astype(np.int64)
        sampled, tokens = self.lengths.answers
        new = ~np.isin(sampled, done)
        self.lengths.answers = (
            np.concatenate((done, sampled[new])),
            np.concatenate((self.machine.output[done].astype(np.int64), tokens[new])),
        )
        self.planner = self._planner(part)
        carry_on(self.planner.state, old)
        self.planner.state.rows["kept"][n:] = moved.kept
        self.planner.refresh_lengths()
        self.planner.replan()
        self.machine = self.machine.with_more_rows(np.minimum(part.output_tokens, part.table.max_tokens)[n:])
        self.machine.runs[n:] = moved.runs
        if old.scalars["prefilling"][0] + old.scalars["decoding"][0] == 0:
            self.machine.engine["now_s"] = np.maximum(self.machine.engine["now_s"], now_s)
        self.queues = self._queues()

    def result(self) -> Result:
        """What this rank did, rows in the order of the job."""
        found = result(self.planner, self.machine)
        done = found.completion_order[: int(self.machine.engine["finished"][0])]
        local = done[np.argsort(self.rows[done])]
        new = np.full(len(self.rows), -1, np.int32)
        new[local] = np.arange(len(local))

        by_row = (
            "admit_s",
            "start_s",
            "finish_s",
            "computed_tokens",
            "cached_tokens",
            "lost_tokens",
            "row_preemptions",
        )
        own: dict[str, Any] = {name: getattr(found, name)[local] for name in by_row}
        return dataclasses.replace(
            found, rows=self.rows[local], completion_order=new[found.completion_order[: len(local)]], **own
        )
