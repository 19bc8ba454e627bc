"""Planning data in, a scheduler or a forecast out: the one place where table, tree, lengths and policy are wired."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.bounds import Bounds, bounds
from plait.deadlines import DeadlineReport, report
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import StepTime
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.simulate import Result, simulate
from plait.table import F64, I64, RequestTable
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import sharing_ratio, unique_tokens

GOALS = {"throughput": 0.0, "balanced": 0.03, "latency": np.inf}
"""Goal on the command line -> share by which a job may take longer than under the fastest order, if its answers then
come sooner on average."""
FRONT = ("blend", *(f"balanced:{weight}" for weight in (0.25, 0.5, 0.625, 0.75, 0.875, 1.0)), "latency")
"""Policies from most throughput to least mean completion time."""
BASELINES = ("fcfs", "dfs")
"""Orders that are always shown beside the chosen one."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the job will run."""

    capacity: Capacity
    step_time: StepTime


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one policy is expected to do with a job."""

    policy: str
    makespan_s: float
    tokens_per_s: float
    mean_completion_s: float
    prefill_tokens: int
    order: I64  # [n] rows by admission
    finish_s: F64  # [n]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a job is run for."""

    goal: str = "throughput"
    """A key of GOALS."""
    policy: str | None = None
    """This policy whatever the goal."""
    deadline_s: float = np.inf
    """When the whole job is wanted."""

    def candidates(self) -> tuple[str, ...]:
        """Policies worth a forecast. With a deadline all of the front are: the goal's own may be too slow."""
        if self.policy is not None:
            return (self.policy,)
        if self.goal == "balanced" or np.isfinite(self.deadline_s):
            return FRONT
        return FRONT[:1] if self.goal == "throughput" else FRONT[-1:]

    def choose(self, forecasts: Sequence[Forecast]) -> Forecast:
        """The least mean completion time among those that take at most the goal's share longer than the fastest. With a
        deadline only those in time count; if there are none, the one with most requests answered by then."""
        if not any(f.makespan_s <= self.deadline_s for f in forecasts):
            return max(forecasts, key=lambda f: int((f.finish_s <= self.deadline_s).sum()))
        limit_s = (1.0 + GOALS[self.goal]) * min(f.makespan_s for f in forecasts)
        fast = [f for f in forecasts if f.makespan_s <= min(limit_s, self.deadline_s)]
        return min(fast, key=lambda f: f.mean_completion_s)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A job before it runs: its size, what bounds it, how long it takes."""

    requests: int
    prompt_tokens: int
    unique_prompt_tokens: int
    sharing: float
    expected_output_tokens: int
    longest_s: float
    """Time of the chosen policy if every answer went on to its ``max_tokens``."""
    bounds: Bounds
    """Compute and memory seconds of the whole job, shared prefixes computed once, and the optimum they imply."""
    forecasts: tuple[Forecast, ...]
    deadlines: DeadlineReport
    """Under the chosen policy."""

    @property
    def density(self) -> float:
        """Compute seconds over memory seconds; inf where nothing is read."""
        return self.bounds.compute_s / self.bounds.memory_s if self.bounds.memory_s > 0 else float("inf")

    @property
    def bound_by(self) -> str:
        """The resource that the job uses longer."""
        return "compute" if self.density >= 1 else "memory"

    @property
    def chosen(self) -> Forecast:
        """Forecast of the policy that was asked for: the first."""
        return self.forecasts[0]


def scheduler(
    table: RequestTable, tree: PrefixTree, lengths: Lengths, machine: Machine, policy: str, seed: int = 0
) -> Scheduler:
    """The scheduler of a real run. Raises UsageError for an unknown policy."""
    return Scheduler(_view(table, tree, lengths, machine, seed), lengths, policy, calibrates=True)


def outlook(
    table: RequestTable,
    tree: PrefixTree,
    lengths: Lengths,
    machine: Machine,
    policies: Sequence[str],
    seed: int = 0,
    objective: Objective | None = None,
) -> Outlook:
    """Forecast a job under each policy: answers are as long as ``lengths`` has it, spread as its curves are, and the
    policies know of them what they would know in a run. The first policy is the chosen one, unless
    there is an ``objective``: its candidates are forecast too, and the one it chooses comes first."""
    candidates = objective.candidates() if objective is not None else ()
    rows = np.arange(table.n)
    output = np.maximum(1, np.rint(lengths.drawn(rows, np.zeros(table.n, np.int64)))).astype(np.int64)
    forecasts = []
    for policy in dict.fromkeys((*candidates, *policies)):
        known = lengths if lengths.exact else copy.deepcopy(lengths)
        result = simulate(table, tree, output, known, machine.capacity, machine.step_time, policy, seed)
        forecasts.append(_forecast(policy, table, output, result))
    if objective is not None:
        chosen = objective.choose(forecasts[: len(candidates)])
        forecasts = [chosen, *(each for each in forecasts if each is not chosen)]
    deadline_s = objective.deadline_s if objective is not None else np.inf
    bound = bounds(table, tree, output, machine.step_time, machine.capacity)
    longest = bounds(table, tree, table.max_tokens, machine.step_time, machine.capacity) if table.n else bound
    return Outlook(
        requests=table.n,
        prompt_tokens=int(table.prompt_tokens.sum()),
        unique_prompt_tokens=unique_tokens(tree, table.prompt_tokens),
        sharing=sharing_ratio(tree, table.prompt_tokens),
        expected_output_tokens=int(output.sum()),
        longest_s=forecasts[0].makespan_s * (longest.best_s / bound.best_s if bound.best_s > 0 else 1.0),
        bounds=bound,
        forecasts=tuple(forecasts),
        deadlines=report(table, forecasts[0].finish_s, output, machine.step_time, deadline_s),
    )


def _view(table: RequestTable, tree: PrefixTree, lengths: Lengths, machine: Machine, seed: int) -> View:
    return View(table, tree, lengths.expected, machine.capacity, machine.step_time, seed)


def _forecast(policy: str, table: RequestTable, output: I64, result: Result) -> Forecast:
    tokens = int(table.prompt_tokens.sum() + output.sum())
    return Forecast(
        policy=policy,
        makespan_s=result.makespan_s,
        tokens_per_s=tokens / result.makespan_s if result.makespan_s > 0 else 0.0,
        mean_completion_s=float(result.finish_s.mean()) if table.n else 0.0,
        prefill_tokens=result.prefill_tokens,
        order=np.argsort(result.admit_s, kind="stable").astype(np.int64),
        finish_s=result.finish_s,
    )
