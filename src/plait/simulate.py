"""The simulator: a job run by the real scheduler on an engine with a virtual clock, hundreds of thousands of requests a
second. It emits what a real run emits: a record a step, and times, tokens and preemptions a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from plait.errors import CapacityError, InputError
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import StepTime
from plait.policy.base import View
from plait.scheduling.live import LiveStepTime
from plait.scheduling.plan import Planner
from plait.scheduling.state import Records
from plait.scheduling.virtual import Machine, loop, new_machine
from plait.table import F64, I32, I64, RequestTable
from plait.tree.prefix import PrefixTree

MAX_ADMIT = 4096
"""Rows one decision may admit."""
PROGRESS_ROWS = 50_000
"""Answers after which a simulation says how far it is."""

Progress = Callable[[int], None]
"""Is told how many rows are done."""


def silent(done: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Result:
    """One simulated run of n requests in k steps."""

    makespan_s: float
    rows: I64  # [n] rows of the job that this engine ran: all of them, or a data-parallel rank's
    steps: Records  # STEP [k], fields as in plait.events.Step
    admit_s: F64  # [n] last admission
    start_s: F64  # [n] first token after it
    finish_s: F64  # [n]
    completion_order: I32  # [n] rows
    computed_tokens: I32  # [n] prefilled for the row, shared prefixes it was first to need and recomputation included
    cached_tokens: I32  # [n] prompt and kept output tokens that its starts found in KV
    lost_tokens: I32  # [n] its KV tokens thrown away by preemption
    row_preemptions: I32  # [n]
    prefill_tokens: int  # computed, recomputation included
    recomputed_tokens: int  # KV tokens thrown away by preemption
    preemptions: int
    unique_tokens_computed: int  # prefill_tokens without recomputed ones


def simulate(
    table: RequestTable,
    tree: PrefixTree,
    output_tokens: I64,
    lengths: Lengths,
    capacity: Capacity,
    step_time: StepTime,
    policy: str,
    seed: int = 0,
    believed: StepTime | None = None,
    progress: Progress = silent,
) -> Result:
    """Run a backlog to its end. ``output_tokens``: true lengths, int [n], seen by the virtual engine only.

    ``believed``: what the scheduler thinks of the machine at first, if it has to find out by the steps it sees; without
    it, it knows ``step_time``. Raises CapacityError
    for a request that can never fit, InputError for lengths that do not belong to the table.
    """
    output = checked_output(table, output_tokens, capacity)
    view = View(table, tree, lengths.expected, preempting(capacity), believed or step_time, seed)
    planner = Planner(view, lengths, policy)
    planner.state.scalars["has_steps"] = 1
    planner.replan()
    live = None if believed is None else LiveStepTime(planner, believed)
    machine = run(planner, new_machine(output), step_time, live=live, progress=progress)
    return result(planner, machine)


def run(
    planner: Planner,
    machine: Machine,
    step_time: StepTime,
    until_s: float = np.inf,
    live: LiveStepTime | None = None,
    progress: Progress = silent,
) -> Machine:
    """Advance a simulation to its end or to ``until_s``; returns the machine, whose log may have moved. ``live``
    corrects what the planner believes of the machine from the steps it sees."""
    engine, n = machine.engine[0], len(machine.runs)
    counts = planner.state.scalars[0]
    scratch = np.zeros(MAX_ADMIT, np.int64)
    while counts["waiting"] + counts["prefilling"] + counts["decoding"] > 0 and engine["now_s"] < until_s:
        seen = int(engine["finished"])
        if engine["logged"] == len(machine.log):
            machine = machine.with_longer_log()
        goal = min(n, seen + planner.until_replan(), seen + PROGRESS_ROWS)
        pause_s = min(until_s, planner.until_due_s())
        pause_step = planner.until_step() if live is None else min(planner.until_step(), live.due_step)
        if not loop(planner.state.c, machine.e, step_time, goal, pause_s, pause_step, scratch):
            raise CapacityError("the scheduler left the engine idle with rows waiting")
        rows = machine.finished_rows[seen : int(engine["finished"])].astype(np.int64)
        planner.observe_rows(rows, machine.output[rows].astype(np.int64))
        if live is not None:
            live.observe_log(machine.log[: int(engine["logged"])])
        planner.tell_time(float(engine["now_s"]))
        planner.replan_if_due()
        progress(int(engine["finished"]))
    return machine


def result(planner: Planner, machine: Machine) -> Result:
    """What happened, as arrays."""
    engine, runs = machine.engine[0], machine.runs
    return Result(
        makespan_s=float(engine["now_s"]),
        rows=np.arange(len(runs), dtype=np.int64),
        steps=machine.log[: int(engine["logged"])],
        admit_s=runs["admit_s"],
        start_s=runs["start_s"],
        finish_s=runs["finish_s"],
        completion_order=machine.finished_rows,
        computed_tokens=runs["computed"],
        cached_tokens=runs["cached"],
        lost_tokens=runs["lost"],
        row_preemptions=runs["thrown_out"],
        prefill_tokens=int(engine["prefilled"]),
        recomputed_tokens=int(engine["recomputed"]),
        preemptions=int(planner.state.scalars["preemptions"][0]),
        unique_tokens_computed=int(engine["prefilled"] - engine["recomputed"]),
    )


def preempting(capacity: Capacity) -> Capacity:
    """The capacity of a virtual engine, which can always be told to preempt and has no queue of its own."""
    return dataclasses.replace(capacity, preempts_on_request=True, queued_seqs=0)


def checked_output(table: RequestTable, output_tokens: I64, capacity: Capacity) -> I64:
    """True output lengths, cut at ``max_tokens``; every request fits the engine alone."""
    output = np.asarray(output_tokens, np.int64)
    if output.shape != (table.n,):
        raise InputError(f"{len(output)} output lengths for {table.n} requests")
    bad = np.flatnonzero(output < 1)
    if len(bad):
        raise InputError(f"row {bad[0]}: output length is {output[bad[0]]}; an integer >= 1 is needed")
    output = np.minimum(output, table.max_tokens)
    block = max(1, capacity.block_tokens)
    need = (table.prompt_tokens + output + block - 1) // block * block
    for limit, what, tokens in (
        (capacity.kv_tokens, "KV tokens", need),
        (capacity.max_context_tokens, "tokens of context", table.prompt_tokens + output),
    ):
        over = np.flatnonzero(tokens > limit) if limit else bad
        if len(over):
            raise CapacityError(
                f"row {over[0]}: {table.prompt_tokens[over[0]]} prompt + {output[over[0]]} output tokens need "
                f"{tokens[over[0]]} {what}, the engine has {limit}; raise the capacity or drop the row "
                f"({len(over)} rows do not fit)"
            )
    return output
