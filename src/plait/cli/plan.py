"""``plait plan``: what a job is, what bounds it and how long it will take, without running it."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click
import msgspec
import numpy as np

from plait.cli.options import EMBEDDED, PLANNING, together
from plait.data.job import LISTED_PROBLEMS, Job, open_job
from plait.data.problems import Problem
from plait.engine.machine import EngineSettings
from plait.errors import InputError
from plait.plan import BASELINES, Forecast, Objective, Outlook, outlook
from plait.policy.base import order_function
from plait.run.batch import lengths_before
from plait.run.embedded import Embedded
from plait.run.files import RunFiles, replace_file
from plait.run.history import basis
from plait.run.notices import notices
from plait.run.prepare import Prepared, prepare


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", metavar="FILE", help="Write the requests in planned order, for any other engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@together(PLANNING)
@together(EMBEDDED)
def command(
    files: tuple[str, ...],
    output: str | None,
    as_json: bool,
    goal: str,
    deadline: float | None,
    policy: str | None,
    seed: int,
    on_overflow: Any,
    default_max_tokens: int | None,
    allow_duplicates: bool,
    model: str | None,
    **engine: Any,
) -> None:
    """Say how long a job will take and why, without running it.

    Answers are taken to be as long as their requests fix them, else as answers to prompts that began alike in earlier
    runs on this machine, else by a prior of 256 tokens on average, cut at max_tokens. Times are those of the embedded
    engine, loaded; its steps are measured by every run on this machine.
    """
    objective = Objective(goal, policy, math.inf if deadline is None else deadline)
    for each in objective.candidates():  # an unknown policy is refused before anything is read
        order_function(each)
    embedded = Embedded(model, EngineSettings(**engine), lambda line: click.echo(line, err=True))
    with (
        tempfile.TemporaryDirectory(prefix="plait-plan-") as workdir,
        open_job(files, workdir, allow_duplicates) as job,
    ):
        for line in notices(job):
            click.echo(f"plait: {line}", err=True)
        good = np.flatnonzero(~job.bad)
        capacity = embedded.machine.capacity
        ready = prepare(
            job, good, embedded.tokenizer(), capacity, on_overflow, default_max_tokens, started_unix_s=time.time()
        )
        if not len(ready.rows):
            listed = "\n".join(str(problem) for problem in islice(problems(job, ready), LISTED_PROBLEMS))
            raise InputError(f"none of the {job.n} requests can run\n{listed}")
        lengths, familiar = lengths_before(ready, embedded.history, seed)
        found = outlook(ready.table, ready.tree, lengths, embedded.machine, BASELINES, seed, objective)
        if output is not None:
            _write_reordered(job, ready, found, RunFiles.of(output), files)
        summary = as_dict(found, embedded, job, ready) | {"lengths": basis(ready.table, familiar)}
        text = as_text(found, embedded, job, ready, basis(ready.table, familiar))
    click.echo(msgspec.json.encode(summary).decode() if as_json else text)


def _write_reordered(job: Job, ready: Prepared, found: Outlook, target: RunFiles, inputs: tuple[str, ...]) -> None:
    """The requests that can run, in the order in which they would be admitted."""
    target.refuse_inputs(inputs)
    lines = (_batch_line(job, int(ready.rows[i])) + b"\n" for i in found.chosen.order)
    try:
        replace_file(target.output, lines)
    except OSError as error:
        raise InputError(f"-o {target.output}: cannot write: {(error.strerror or str(error)).lower()}") from None


def _batch_line(job: Job, row: int) -> bytes:
    """A batch line as it stands; a plain row or one of a table as the batch line that it means, so that other engines
    can read it and it keeps the id that its place in the input gave it."""
    line = job.line(row)
    if "body" in msgspec.json.decode(line, type=dict[str, msgspec.Raw]):
        return line
    request = job.request(row)
    whole = {"custom_id": request.custom_id, "method": "POST", "url": request.url, "body": request.body}
    return msgspec.json.encode(whole | request.metadata)


def problems(job: Job, ready: Prepared) -> Iterator[Problem]:
    """What is wrong with the rows that cannot run: bad lines first, then what does not fit the engine."""
    yield from (problem for problem in job.iter_problems() if problem.severity == "error")
    yield from (job.problem(row, fault) for row, fault in sorted(ready.faults.items()))


def as_dict(found: Outlook, embedded: Embedded, job: Job, ready: Prepared) -> dict[str, Any]:
    """The outlook as plain values."""
    bounds = found.bounds
    return {
        "requests": found.requests,
        "cannot_run": int(job.bad.sum()) + len(ready.faults),
        "problems": [problem.as_dict() for problem in islice(problems(job, ready), LISTED_PROBLEMS)],
        "clamped": len(ready.clamped),
        "prompt_tokens": found.prompt_tokens,
        "unique_prompt_tokens": found.unique_prompt_tokens,
        "sharing": found.sharing,
        "expected_output_tokens": found.expected_output_tokens,
        "density": found.density if bounds.memory_s > 0 else None,
        "bound_by": found.bound_by,
        "compute_s": bounds.compute_s,
        "memory_s": bounds.memory_s,
        "optimum_s": bounds.best_s,
        "longest_s": found.longest_s,
        "calibrated": embedded.calibrated,
        "model": embedded.model.name,
        "kv_tokens": embedded.machine.capacity.kv_tokens,
        "chosen_policy": found.chosen.policy,
        "deadlines": {
            "hopeless": len(found.deadlines.hopeless),
            "late": len(found.deadlines.late),
            "answered_by_job_deadline": found.deadlines.in_time,
            "messages": late(found, job, ready),
        },
        "policies": [
            {
                "policy": forecast.policy,
                "makespan_s": forecast.makespan_s,
                "tokens_per_s": forecast.tokens_per_s,
                "mean_completion_s": forecast.mean_completion_s,
                "prefill_tokens": forecast.prefill_tokens,
            }
            for forecast in found.forecasts
        ],
    }


def as_text(found: Outlook, embedded: Embedded, job: Job, ready: Prepared, lengths: str) -> str:
    """The outlook for people."""
    capacity, bounds = embedded.machine.capacity, found.bounds
    lines = [
        f"{found.requests:,} requests, {found.prompt_tokens:,} prompt tokens, about {found.expected_output_tokens:,} "
        f"output tokens expected",
        f"prefix sharing {found.sharing:.1%}: {found.unique_prompt_tokens:,} prompt tokens need computing",
        f"bound by {found.bound_by}: {bounds.compute_s:.1f} s of compute, {bounds.memory_s:.1f} s of KV reads "
        f"(density {found.density:.2f})",
        f"engine: {embedded.model.name}, KV cache {capacity.kv_tokens:,} tokens, {capacity.max_num_seqs} sequences",
        "",
        "policy            time   tokens/s   mean completion   prompt tokens computed",
        *(_row(forecast) for forecast in found.forecasts),
        f"{'optimum':12} {bounds.best_s:7.1f} s",
        f"{lengths}; {found.longest_s:,.1f} s if each went on to its max_tokens",
    ]
    if len(ready.faults) or job.bad.any():
        lines.append(f"{int(job.bad.sum()) + len(ready.faults):,} requests cannot run, among them:")
        lines += [f"  {problem}" for problem in islice(problems(job, ready), LISTED_PROBLEMS)]
    if ready.clamped:
        lines.append(f"{len(ready.clamped):,} requests got a lower max_tokens, to fit")
    lines += late(found, job, ready)
    if not embedded.calibrated:
        lines.append("Times are a first guess: no run on this machine has measured the engine yet.")
    if not gains(found):
        lines.append("No gain from ordering is to be expected for this job.")
    return "\n".join(lines)


def gains(found: Outlook, least: float = 0.02) -> bool:
    """Whether the chosen order is expected to beat file order in time or in mean completion."""
    base = next(forecast for forecast in found.forecasts if forecast.policy == "fcfs")
    chosen = found.chosen
    return chosen.makespan_s < (1 - least) * base.makespan_s or (
        chosen.mean_completion_s < (1 - least) * base.mean_completion_s
    )


def late(found: Outlook, job: Job, ready: Prepared) -> list[str]:
    """What to say of deadlines."""
    return found.deadlines.lines(lambda i: job.custom_id(int(ready.rows[i])))


def _row(forecast: Forecast) -> str:
    return (
        f"{forecast.policy:12} {forecast.makespan_s:7.1f} s {forecast.tokens_per_s:10,.0f} "
        f"{forecast.mean_completion_s:15.1f} s {forecast.prefill_tokens:24,}"
    )
