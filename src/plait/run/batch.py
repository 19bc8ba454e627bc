"""A whole run: check, plan, run, write, learn. What ``plait run`` does behind its display."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from plait._numba import compiled_before
from plait.data.job import LISTED_PROBLEMS, BatchRequest, Job, open_job
from plait.data.limits import model_faults
from plait.data.problems import Fault
from plait.errors import InputError
from plait.events import Capacity, EngineRequest
from plait.lengths import Lengths
from plait.model.calibrate import Calibrator
from plait.model.steptime import empty_step_s
from plait.plan import Objective, Outlook, outlook, scheduler
from plait.policy.base import order_function
from plait.report.metrics import TRUNCATED, LiveStats, Numbers
from plait.report.steps_left import StepsLeft
from plait.run.executor import Observer, Options, Outcome, Planned, Run, open_run
from plait.run.history import History, basis
from plait.run.notices import notices, why_nothing_runs
from plait.run.place import Place
from plait.run.prepare import Overflow, Prepared, asked_tokens, prepare, with_cap
from plait.run.watcher import Ready, Say, Watcher
from plait.table import I64, RequestTable
from plait.tree.sharing import prefix_groups, shared_with_previous, unique_tokens

LEAST_GROUP_TOKENS = 64
"""Shared tokens that make requests a group: worth keeping at one server."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What to run and how to plan it."""

    files: Sequence[str]
    policy: str | None = None
    """None: what the goal asks for."""
    seed: int = 0
    on_overflow: Overflow = "error"
    default_max_tokens: int | None = None
    allow_duplicates: bool = False
    strict: bool = False
    """Stop before starting if any request cannot run."""
    goal: str = "throughput"
    deadline_s: float = np.inf
    """When the whole job is wanted, seconds after its start."""

    @property
    def objective(self) -> Objective:
        """What the job is run for."""
        return Objective(self.goal, self.policy, self.deadline_s)


@dataclass(frozen=True, slots=True)
class Report:
    """How a run went."""

    outcome: Outcome
    numbers: Numbers | None = None
    """None where nothing was left to run."""
    unique_prompt_tokens: int = 0
    """Prompt tokens that any order has to compute."""
    driver_cpu_s: float = 0.0
    """CPU time of this process while the engine worked."""
    forecast: Outlook | None = None
    """As before the run."""
    hindsight: Outlook | None = None
    """The same with the lengths and step times that the run showed; None where it did not show enough."""
    adopted: int = 0
    truncated: int = 0
    """Answers that were cut off at max_tokens, over all runs of the job."""


Watch = Callable[[Ready], Observer]


def run_batch(batch: BatchOptions, place: Place, options: Options, watch: Watch, say: Say) -> Report:
    """Run the files to their end, or as far as it goes. ``say`` gets a line before each slow step.

    Raises PlaitError where nothing could be started; afterwards the outcome says how it ended.
    """
    for policy in batch.objective.candidates():  # an unknown policy is refused before anything is read
        order_function(policy)
    with (
        tempfile.TemporaryDirectory(prefix="plait-") as workdir,
        open_job(batch.files, workdir, batch.allow_duplicates, place.passthrough) as job,
    ):
        if batch.strict and job.bad.any():
            raise InputError(_listed(str(p) for p in job.iter_problems() if p.severity == "error"))
        for line in notices(job):
            say(line)
        with open_run(job, options) as run:
            if run.adopted:
                say(f"{run.adopted:,} results without a journal were taken over, matched by custom_id")
            if run.complete:
                say(why_nothing_runs(job, run.state))
                return Report(run.finish(), adopted=run.adopted, truncated=run.state.finish_reasons[TRUNCATED])
            return _execute(batch, place, job, run, watch, say)


def _execute(batch: BatchOptions, place: Place, job: Job, run: Run, watch: Watch, say: Say) -> Report:
    first = "" if compiled_before() else "; a first run compiles the planner, which takes a minute or two"
    say(f"planning {len(run.rows):,} requests{first}")
    started_s, started_unix_s = time.monotonic(), time.time()
    prepared = prepare(
        job,
        run.rows,
        place.tokenizer(),
        place.machine.capacity,
        batch.on_overflow,
        batch.default_max_tokens,
        _unserved(job, run.rows, place.served),
        started_unix_s=started_unix_s,
    )
    if batch.strict and prepared.faults:
        raise InputError(_listed(str(job.problem(row, fault)) for row, fault in prepared.faults.items()))
    lengths, familiar = lengths_before(prepared, place.history, batch.seed)
    forecast = outlook(prepared.table, prepared.tree, lengths, place.machine, ["fcfs"], batch.seed, batch.objective)
    policy = forecast.chosen.policy
    if len(batch.objective.candidates()) > 1:
        best = forecast.chosen
        say(f"order {policy}: about {best.makespan_s:.1f} s, mean completion {best.mean_completion_s:.1f} s")
    for line in forecast.deadlines.lines(lambda i: job.custom_id(int(prepared.rows[i]))):
        say(line)
    if place.calibrated:
        expected_s = forecast.chosen.makespan_s
        say(f"about {expected_s:,.0f} s expected before anything has run ({basis(prepared.table, familiar)})")
    say(f"starting {place.name}")
    engine = place.engine()
    try:
        start_s = engine.now_s()
        table = _on_clock(prepared.table, start_s - (time.monotonic() - started_s))
        chosen = scheduler(table, prepared.tree, lengths, place.machine, policy, batch.seed)
        stats = _live_stats(prepared, engine.capacity, place, batch.seed, start_s)
        ready = Ready(job, run, prepared, chosen, stats, forecast, engine.capacity.kv_tokens)
        watcher = Watcher(watch(ready), ready, start_s, Calibrator(place.machine.step_time), say)
        request = _request_maker(prepared, batch.default_max_tokens, lambda i: stats.sent(i, engine.now_s()))
        planned = Planned(prepared.rows, chosen, request, prepared.faults, prepared.notes())
        cpu_s = time.process_time()
        outcome = run.execute(planned, engine, watcher)
        cpu_s = time.process_time() - cpu_s
    finally:
        engine.close()
    return Report(
        outcome,
        watcher.summary.numbers(),
        unique_tokens(prepared.tree, prepared.table.prompt_tokens),
        cpu_s,
        forecast,
        watcher.hindsight(policy, batch.seed, place),
        run.adopted,
        run.state.finish_reasons[TRUNCATED],
    )


def _on_clock(table: RequestTable, start_s: float) -> RequestTable:
    """The table with its deadlines on the engine's clock, on which the run began at ``start_s``."""
    return replace(table, deadline_s=table.deadline_s + start_s)


def _unserved(job: Job, rows: I64, served: frozenset[str]) -> dict[int, Fault]:
    """Rows of the run that ask for a model which the engine does not serve: they are never sent."""
    wanted = np.zeros(job.n, np.bool_)
    wanted[rows] = True
    return {row: fault for row, fault in model_faults(job, served) if wanted[row]} if served else {}


def lengths_before(prepared: Prepared, history: History | None, seed: int) -> tuple[Lengths, float]:
    """What is known of a job's output lengths before it runs, and the share of the rows like which others have run."""
    lengths = Lengths.unknown(prepared.table, prepared.tree, seed)
    familiar = 0.0 if history is None else history.seed(lengths, prepared.table, prepared.tree)
    return lengths, familiar


def _live_stats(prepared: Prepared, capacity: Capacity, place: Place, seed: int, start_s: float) -> LiveStats:
    """With length estimates of its own: those of the scheduler stand still under policies that ignore lengths."""
    table, st = prepared.table, place.machine.step_time
    seen, _ = lengths_before(prepared, place.history, seed)
    costs = (
        empty_step_s(st),
        st.gemm_s_per_token,
        st.gemm_s_per_token + st.decode_seq_s,
        st.kv_read_s_per_token,
    )
    steps_left = StepsLeft(seen, table.prompt_tokens, table.max_tokens, capacity, costs)
    return LiveStats(table.prompt_tokens, seen, _new_tokens(prepared), start_s, steps_left)


def _new_tokens(prepared: Prepared) -> I64:
    """Prompt tokens of each row that a depth-first order computes, int64 [n]."""
    rows = prepared.tree.dfs_rows
    new = prepared.table.prompt_tokens.copy()
    new[rows] -= shared_with_previous(prepared.tree, rows)
    return new


def _request_maker(
    prepared: Prepared, default_max_tokens: int | None, sent: Callable[[int], None]
) -> Callable[[int, BatchRequest], EngineRequest]:
    """Requests with their token ids and the cap of each of their sequences; a cap that Plait has set (clamped, by
    default) stands in the body too, since servers see nothing else."""
    table = prepared.table
    assert table.tokens is not None and table.offsets is not None
    tokens, offsets = table.tokens, table.offsets
    groups = prefix_groups(prepared.tree, LEAST_GROUP_TOKENS)

    def make(i: int, request: BatchRequest) -> EngineRequest:
        sent(i)
        cap = int(table.max_tokens[i]) // int(request.body.get("n") or 1)
        ids = tokens[offsets[i] : offsets[i + 1]]
        body = request.body
        if request.row in prepared.clamped or (default_max_tokens is not None and asked_tokens(body) is None):
            body = with_cap(body, cap)
        group = int(groups[i]) or -1
        return EngineRequest(i, request.url, body, ids, cap, group, request.custom_id or "")

    return make


def _listed(problems: Iterable[str]) -> str:
    return "--strict: not started.\n" + "\n".join(islice(problems, LISTED_PROBLEMS))
