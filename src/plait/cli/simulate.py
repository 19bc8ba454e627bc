"""``plait simulate``: how long a trace would take on a machine under each policy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from plait.bounds import bounds
from plait.cli.simulate_input import load
from plait.data.traces import Trace
from plait.errors import UsageError
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.cost import cost_of
from plait.model.specs import device as device_row
from plait.model.specs import kv_tokens_that_fit
from plait.model.specs import model as model_row
from plait.model.steptime import StepTime, for_machine
from plait.policy.base import order_function
from plait.simulate import Result
from plait.simulate_ranks import simulate_ranks
from plait.tree.sharing import sharing_ratio

CHUNK_TOKENS = 2048
"""Tokens a step may take where a policy does not choose (NanoFlow's dense batch)."""
LARGEST_CHUNK_TOKENS = 8192
"""For the blend and its balanced variants, which choose their chunk at every step."""
POLICIES = ("dfs", "blend")
"""What is compared where the command line names no policy."""
SAY_EVERY_S = 2.0
"""Seconds between two lines of progress."""


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="FILE...")
@click.option("--device", default="A100-80", show_default=True, help="Device row.")
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="Model row or path of an HF config.json.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel devices a rank.")
@click.option("--dp", type=click.IntRange(min=1), default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Repeat to compare. [default: dfs, blend]")
@click.option(
    "--engine-mode",
    type=click.Choice(["overlapped", "sequential"]),
    default="overlapped",
    show_default=True,
    help="Whether the engine runs compute and memory traffic of a step side by side.",
)
@click.option("--kv-tokens", type=click.IntRange(min=1), help="KV cache in tokens. [default: what fits the device]")
@click.option("--block-tokens", type=click.IntRange(min=1), default=1, show_default=True, help="Tokens a KV block.")
@click.option("--max-batched-tokens", type=click.IntRange(min=1), help="Tokens one step may take.")
@click.option(
    "--lengths",
    "knowledge",
    default="sampled",
    show_default=True,
    metavar="known|sampled[:FRACTION]",
    help="What the planner knows of the output lengths.",
)
@click.option(
    "--tokenizer", metavar="PATH_OR_ID", help="Count a batch file's tokens with this model's. [default: SmolLM2-135M]"
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--plot", metavar="FILE", help="Write a figure: use of compute and memory over time, and throughput.")
@click.option(
    "--time",
    "clock",
    type=click.Choice(["seconds", "steps"]),
    default="seconds",
    show_default=True,
    help="Seconds of a machine, or the unit steps of Sorted-F.",
)
@click.option("--optimize", metavar="SECONDS", help="With --time steps: search this long, like 5s.")
@click.option("--schedule", metavar="FILE", help="With --time steps: write request,start_step.")
def command(traces: tuple[str, ...], clock: str, **options: Any) -> None:
    """Simulate each FILE under one or more policies: a trace of lengths (CSV, Parquet or Mooncake JSONL) or a batch
    file of requests; either may be gzipped.

    Tables need the columns prompt_tokens and output_tokens; group and shared_tokens say which requests start alike.
    A batch file says nothing of its answers: lengths are drawn from a prior of 256 tokens on average, cut at each
    request's max_tokens.
    """
    if clock == "steps":
        from plait.cli import unitsteps

        unitsteps.run(traces, **options)
        return
    if options["schedule"]:
        raise UsageError("--schedule belongs to --time steps")
    for policy in options["policies"] or POLICIES:
        order_function(policy)  # an unknown policy is refused before anything is read
    lengths = _lengths_maker(options["knowledge"], options["seed"])
    found = [_one(path, lengths, options) for path in traces]
    if options["as_json"]:
        click.echo(json.dumps({"policies": [row for trace in found for row in trace["policies"]]}, indent=2))
    else:
        for trace in found:
            _print(trace)
    if options["plot"]:
        from plait.cli.simulate_plot import plot

        plot(found, Path(options["plot"]))


def _one(path: str, lengths: Any, options: dict[str, Any]) -> dict[str, Any]:
    """All policies on one file."""
    device, model = device_row(options["device"]), model_row(options["model"])
    step_time = for_machine(device, model, options["engine_mode"], options["tp"])
    kv_tokens = options["kv_tokens"] or kv_tokens_that_fit(device, model, options["tp"])
    trace = load(path, Capacity(kv_tokens, options["block_tokens"]), options["tokenizer"], options["seed"])
    cost = cost_of(device, model, options["tp"])
    rows, results = [], []
    for policy in options["policies"] or POLICIES:
        chooses = policy.startswith(("blend", "balanced"))
        chunk = options["max_batched_tokens"] or (LARGEST_CHUNK_TOKENS if chooses else CHUNK_TOKENS)
        capacity = Capacity(kv_tokens, options["block_tokens"], max_batched_tokens=chunk, takes_prefill_budget=True)
        say = _progress(f"{trace.name}, {policy}", trace.table.n)
        ranks = simulate_ranks(
            trace, lengths, capacity, step_time, policy, cost, options["dp"], options["seed"], progress=say
        )
        rows.append(_row(trace, policy, ranks, step_time, capacity, options["dp"]))
        results.append(ranks)
    return {"name": trace.name, "requests": trace.table.n, "policies": rows, "results": results, "step_time": step_time}


def _progress(what: str, total: int) -> Callable[[int], None]:
    """A line on standard error every few seconds; a short simulation says nothing."""
    due_s = time.monotonic() + SAY_EVERY_S

    def say(done: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + SAY_EVERY_S
            click.echo(f"{what}: {done:,} of {total:,} requests simulated", err=True)

    return say


def _lengths_maker(knowledge: str, seed: int) -> Any:
    """``known`` or ``sampled[:fraction]`` -> trace -> Lengths. Raises UsageError for anything else."""
    kind, _, text = knowledge.partition(":")
    if kind == "known" and not text:
        return lambda part: Lengths.known(part.table, part.output_tokens, seed)
    if kind != "sampled":
        raise UsageError(f"--lengths is '{knowledge}'; known, sampled or sampled:FRACTION is needed")
    try:
        fraction = float(text) if text else 0.01
    except ValueError:
        fraction = np.nan
    if not 0 < fraction <= 1:
        raise UsageError(f"--lengths is '{knowledge}'; the fraction must be a number above 0 and at most 1")
    return lambda part: Lengths.sampled(part.table, part.tree, lambda rows: part.output_tokens[rows], fraction, seed)


def _row(
    trace: Trace, policy: str, ranks: list[Result], step_time: StepTime, capacity: Capacity, dp: int
) -> dict[str, Any]:
    """The figures of one policy."""
    table = trace.table
    limit = bounds(table, trace.tree, trace.output_tokens, step_time, capacity, ranks=dp)
    makespan = max(rank.makespan_s for rank in ranks)
    prompt = int(table.prompt_tokens.sum())
    computed = sum(rank.unique_tokens_computed for rank in ranks)
    finish = np.concatenate([rank.finish_s for rank in ranks])
    return {
        "trace": trace.name,
        "policy": policy,
        "makespan_s": makespan,
        "tokens_per_s": (prompt + int(trace.output_tokens.sum())) / makespan,
        "ideal_bound_s": limit.ideal_s,
        "practical_bound_s": limit.practical_s,
        "overhead_bound_s": limit.best_s,
        "share_of_practical": limit.practical_s / makespan,
        "sharing": max(0.0, 1.0 - computed / prompt),
        "max_sharing": sharing_ratio(trace.tree, table.prompt_tokens),
        "retracted": sum(rank.preemptions for rank in ranks),
        "recomputed_tokens": sum(rank.recomputed_tokens for rank in ranks),
        "mean_completion_s": float(finish.mean()),
        "p99_completion_s": float(np.quantile(finish, 0.99)),
        "steps": sum(len(rank.steps) for rank in ranks),
    }


def _print(trace: dict[str, Any]) -> None:
    """A table on stdout."""
    click.echo(f"{trace['name']}: {trace['requests']:,} requests")
    click.echo(
        f"{'policy':<12}{'makespan s':>12}{'tokens/s':>11}{'% practical':>13}{'sharing':>9}{'of max':>8}"
        f"{'retracted':>11}{'mean s':>10}"
    )
    for row in trace["policies"]:
        click.echo(
            f"{row['policy']:<12}{row['makespan_s']:>12,.1f}{row['tokens_per_s']:>11,.0f}"
            f"{100 * row['share_of_practical']:>13.1f}{row['sharing']:>9.3f}{row['max_sharing']:>8.3f}"
            f"{row['retracted']:>11,}{row['mean_completion_s']:>10,.1f}"
        )
    first = trace["policies"][0]
    click.echo(f"bounds: ideal {first['ideal_bound_s']:,.1f} s, practical {first['practical_bound_s']:,.1f} s")
