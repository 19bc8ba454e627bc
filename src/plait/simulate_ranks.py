"""Data parallelism, simulated: the central tree is cut into ranks of equal work, each rank runs its own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.cost import Cost
from plait.model.steptime import StepTime
from plait.partition import balanced_cut
from plait.simulate import Result, simulate
from plait.table import I64, RequestTable
from plait.tree.prefix import PrefixTree


class Job(Protocol):
    """A job with true output lengths (``plait.data.traces.Trace``)."""

    @property
    def table(self) -> RequestTable: ...

    @property
    def tree(self) -> PrefixTree: ...

    @property
    def output_tokens(self) -> I64: ...


class Part:
    """One rank's rows of a job."""

    def __init__(self, job: Job, rows: I64) -> None:
        table = job.table
        self.table = RequestTable.of(
            table.prompt_tokens[rows],
            table.max_tokens[rows],
            table.arrival_s[rows],
            table.priority[rows],
            table.deadline_s[rows],
            min_tokens=table.min_tokens[rows],
        )
        self.tree = tree_of_rows(job.tree, rows)
        self.output_tokens = job.output_tokens[rows]


def tree_of_rows(tree: PrefixTree, rows: I64) -> PrefixTree:
    """The same nodes over fewer rows; row k of the result is ``rows[k]``."""
    new = np.full(len(tree.node_of), -1, np.int64)
    new[rows] = np.arange(len(rows))
    kept = new[tree.dfs_rows] >= 0
    before = np.concatenate(([0], np.cumsum(kept)))
    return replace(
        tree,
        node_of=tree.node_of[rows],
        dfs_rows=new[tree.dfs_rows[kept]],
        row_begin=before[tree.row_begin],
        row_end=before[tree.row_end],
    )


def simulate_ranks(
    job: Job,
    lengths_of: Callable[[Job], Lengths],
    capacity: Capacity,
    step_time: StepTime,
    policy: str,
    cost: Cost,
    ranks: int = 1,
    seed: int = 0,
) -> list[Result]:
    """One result a rank. ``lengths_of`` makes the estimates a scheduler starts with from the job it schedules.

    The cut uses those of the whole job. Raises what ``simulate`` raises, and UsageError for ranks < 1.
    """
    if ranks == 1:
        return [simulate(job.table, job.tree, job.output_tokens, lengths_of(job), capacity, step_time, policy, seed)]
    expected = lengths_of(job).expected
    rank_of = balanced_cut(job.tree, job.table.prompt_tokens, expected, cost, ranks)
    results = []
    for rank in range(ranks):
        part = Part(job, np.flatnonzero(rank_of == rank))
        results.append(
            simulate(part.table, part.tree, part.output_tokens, lengths_of(part), capacity, step_time, policy, seed)
        )
    return results
