"""Every row of the throughput planner's table: ``python benchmarks/paper_blendserve.py`` (traces beside the checkout).

Prints the table and writes out/paper_blendserve.json, .md (the table of docs/throughput.md) and .png. ``--small``
divides every job by ten, for a quick look. Workloads, samples and shuffles have seed 0; unseen mixes the seeds that
their rows name.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from plait.bounds import bounds
from plait.data.sources import Source, burstgpt_like, from_trace, mmlu_like, openvid_like
from plait.data.traces import Trace
from plait.data.workloads import PREFIX_RICH, REAL, SYNTHETIC, grid, mix, paper_cost, synthetic, workload
from plait.errors import UsageError
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.specs import device, kv_tokens_that_fit, model
from plait.model.steptime import PAPER_KV_TOKENS, StepTime, for_machine, paper_a100_8b
from plait.simulate import Result, simulate
from plait.simulate_ranks import simulate_ranks
from plait.table import F64

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
OUT = Path(__file__).resolve().parents[1] / "out"
MODELS = (
    ("Qwen-2.5-7B", "A100-80", 1),
    ("Qwen-2.5-72B", "A100-80", 8),
    ("Llama-2-7B", "A100-80", 1),
    ("Llama-3.1-70B", "A100-80", 8),
    ("DeepSeek-67B", "A100-80", 8),
)
LIGHT: dict[str, Source] = {
    "burst": burstgpt_like,
    **{name: from_trace(TRACES / f"{name}.csv.gz") for name in ("sharegpt", "azure_conv_2023", "lmsys")},
    **{name: from_trace(TRACES / f"{name}.csv.gz") for name in ("servegen_m_mid", "arxiv_summarization")},
}
HEAVY: dict[str, Source] = {
    "video": openvid_like,
    "r1": from_trace(TRACES / "servegen_deepseek_r1.csv.gz"),
}
"""What unseen mixes are drawn from."""
UNSEEN_SEEDS = (11, 12, 13)
GAIN = 1.3
"""Wanted over depth-first, on the grid and on other models."""


def sampled(job: Any) -> Lengths:
    """Estimates from a 1 % sample."""
    return Lengths.sampled(job.table, job.tree, lambda rows: job.output_tokens[rows])


def known(job: Any) -> Lengths:
    """True lengths."""
    return Lengths.known(job.table, job.output_tokens)


def capacity(policy: str, kv_tokens: int, chunk: int = 2048) -> Capacity:
    """The blend chooses its chunk up to 8192 tokens; the others have a fixed one."""
    return Capacity(kv_tokens, 1, 0, 8192 if policy == "blend" else chunk, takes_prefill_budget=True)


Row = dict[str, Any]
Submit = Callable[..., Future[Any]]
Section = Callable[[Submit, int], Callable[[list[Row]], dict[str, Any]]]
"""Submits its runs, given what divides the sizes of jobs; returns what waits for them, adds them to all rows and makes
table rows of them."""


def run(
    trace: Trace,
    policy: str,
    lengths: Callable[[Any], Lengths] = sampled,
    step_time: StepTime | None = None,
    kv_tokens: int = PAPER_KV_TOKENS,
    chunk: int = 2048,
    believed: StepTime | None = None,
    note: str = "",
) -> Row:
    """One simulation as a row."""
    st = step_time or paper_a100_8b()
    estimates = lengths(trace)
    begin = time.process_time()
    limit = capacity(policy, kv_tokens, chunk)
    result = simulate(trace.table, trace.tree, trace.output_tokens, estimates, limit, st, policy, 0, believed)
    seconds = time.process_time() - begin
    row = figures(trace, policy, result, st, limit) | {"note": note, "chunk": limit.max_batched_tokens}
    row["requests_per_s"] = trace.table.n / seconds
    print(
        f"{trace.name:<12}{trace.table.n:>8,} {policy:<10}{note:<24}{100 * row['practical']:>7.2f} % of practical "
        f"{100 * row['bound']:>7.2f} % of best bound, {row['tokens_per_s']:>8,.0f} tokens/s, "
        f"sharing {row['sharing']:.3f}, {row['requests_per_s']:>10,.0f} requests/s",
        flush=True,
    )
    return row


def figures(trace: Trace, policy: str, result: Result, st: StepTime, limit: Capacity) -> dict[str, Any]:
    """Figures of one run."""
    bound = bounds(trace.table, trace.tree, trace.output_tokens, st, limit)
    prompt = int(trace.table.prompt_tokens.sum())
    return {
        "trace": trace.name,
        "requests": trace.table.n,
        "policy": policy,
        "makespan_s": result.makespan_s,
        "practical": bound.practical_s / result.makespan_s,
        "bound": bound.best_s / result.makespan_s,
        "tokens_per_s": (prompt + int(trace.output_tokens.sum())) / result.makespan_s,
        "sharing": 1 - result.unique_tokens_computed / prompt,
        "preemptions": result.preemptions,
    }


def main() -> None:
    """All sections, their runs spread over the machine's cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="one section of the table; repeatable")
    options = parser.parse_args()
    for policy in ("blend", "dual-scan", "dfs"):
        run(synthetic(1.4, 0.35, 20_000), policy, note="compile")
    rows: list[Row] = []
    table: dict[str, Any] = {}
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        sections = [SECTIONS[name](pool.submit, 10 if options.small else 1) for name in options.only or SECTIONS]
        for finish in sections:
            table |= finish(rows)
    lines = [f"| {name} | {text(value)} |" for name, value in table.items()]
    print("\n".join(lines))
    OUT.mkdir(exist_ok=True)
    name = "-".join(["paper_blendserve", *(options.only or ())])
    (OUT / f"{name}.md").write_text("\n".join(["| | measured |", "|---|---|", *lines]) + "\n")
    (OUT / f"{name}.json").write_text(json.dumps({"table": table, "rows": rows}, indent=2))
    if not options.only:
        figure(rows, OUT / f"{name}.png")


def text(value: Any) -> str:
    """A cell: numbers to four digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(part)}" for name, part in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(text(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def mix_runs(name: str, n: int) -> dict[str, Row]:
    """Every policy on T, X or S; on T dual scan with a static chunk and perfect lengths too."""
    trace = workload(name, n, 0, TRACES)
    runs = {policy: run(trace, policy) for policy in ("dfs", "random", "dual-scan", "blend")}
    if name in SYNTHETIC:
        runs["static"] = run(trace, "dual-scan", chunk=512, note="static chunk 512")
        runs["dfs known"] = run(trace, "dfs", known, note="lengths known")
        runs["dual-scan known"] = run(trace, "dual-scan", known, note="lengths known")
        runs["sequential"] = run(trace, "dfs", known, paper_a100_8b("sequential"), note="sequential engine")
    return runs


def mixes(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """T, X and S: every policy."""
    names = (*SYNTHETIC, *REAL, *PREFIX_RICH)
    started = {name: submit(mix_runs, name, (400_000 if name in SYNTHETIC else 200_000) // scale) for name in names}

    def finish(rows: list[Row]) -> dict[str, Any]:
        runs: dict[str, dict[str, Row]] = {name: future.result() for name, future in started.items()}
        rows += [row for found in runs.values() for row in found.values()]

        def share(name: str, policy: str) -> float:
            return float(100 * runs[name][policy]["practical"])

        def mean(names: Any, policy: str) -> float:
            return float(np.mean([share(name, policy) for name in names]))

        def each(names: Any) -> dict[str, float]:
            return {name: share(name, "blend") for name in names}

        def kept(policy: str) -> float:
            return float(min(run[policy]["sharing"] / max(run["dfs"]["sharing"], 1e-9) for run in runs.values()))

        def gain(base: str) -> dict[str, float]:
            speed = {name: runs[name] for name in SYNTHETIC}
            return {name: f["dual-scan known"]["tokens_per_s"] / f[base]["tokens_per_s"] for name, f in speed.items()}

        static = np.mean([max(share(name, "static"), share(name, "dual-scan")) for name in SYNTHETIC])
        return {
            "T1–T4, blend, % of the practical optimum: mean (>= 95)": mean(SYNTHETIC, "blend"),
            "each (>= 94)": each(SYNTHETIC),
            "X1–X5, blend: mean (>= 94)": mean(REAL, "blend"),
            "each (>= 93)": each(REAL),
            "S1, S2, blend: each (>= 93)": each(PREFIX_RICH),
            "sharing kept, least share of depth-first: blend (>= 0.99), dual scan (>= 0.97)": {
                policy: kept(policy) for policy in ("blend", "dual-scan")
            },
            "T, blend over depth-first (>= 1.50)": mean(SYNTHETIC, "blend") / mean(SYNTHETIC, "dfs"),
            "T, blend over best static dual scan (>= 1.18)": mean(SYNTHETIC, "blend") / static,
            "dual scan over depth-first, lengths known: each (1.15–1.30)": gain("dfs known"),
            "dual scan over the sequential engine's depth-first, lengths known: each (<= 1.5)": gain("sequential"),
        }

    return finish


def unseen_run(n: int, seed: int) -> Row:
    """The blend on one random mix."""
    return run(random_mix(n, seed), "blend", note=f"unseen, seed {seed}")


def unseen(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """Mixes that nothing was tuned on: sources, density, sharing and lengths drawn with other seeds."""
    started = [submit(unseen_run, 200_000 // scale, seed) for seed in UNSEEN_SEEDS]

    def finish(rows: list[Row]) -> dict[str, Any]:
        runs = [future.result() for future in started]
        rows += runs
        return {"unseen random mixes, blend: each (>= 93)": {row["trace"]: 100 * row["practical"] for row in runs}}

    return finish


def random_mix(n: int, seed: int) -> Trace:
    """Two random sources and MMLU-like requests at a random density and sharing, drawn again where no mix has them."""
    rng = np.random.default_rng(seed)
    while True:
        light, heavy = rng.choice(list(LIGHT)), rng.choice(list(HEAVY))
        density, sharing = round(rng.uniform(0.8, 1.5), 2), round(rng.uniform(0.05, 0.4), 2)
        name = f"{light}+{heavy} {density}/{sharing}"
        try:
            return mix([LIGHT[light], HEAVY[heavy], mmlu_like], density, sharing, n, seed, name)
        except UsageError:
            continue


def small_run(name: str, n: int) -> Row:
    """The blend on one small mix."""
    return run(synthetic(*SYNTHETIC[name], n, 0, name), "blend", note="small job")


def small_jobs(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """20k, 40k, 100k requests, whatever the scale, against the bound with the critical path."""
    targets = {20_000: 85, 40_000: 88, 100_000: 93}
    started = {n: [submit(small_run, name, n) for name in SYNTHETIC] for n in targets}

    def finish(rows: list[Row]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for n, futures in started.items():
            runs = [future.result() for future in futures]
            rows += runs
            shares = [100 * run["bound"] for run in runs]
            name = f"T at {n:,} requests, blend, % of the bound with critical path: mean (>= {targets[n]})"
            found[name] = float(np.mean(shares))
            found[f"{n:,} requests: each"] = dict(zip(SYNTHETIC, shares, strict=True))
        return found

    return finish


def grid_runs(density: float, sharing: float, n: int) -> list[Row]:
    """Blend and depth-first at one point."""
    trace = synthetic(density, sharing, n, 0, f"{density}/{sharing}")
    return [run(trace, policy, note="grid") for policy in ("blend", "dfs")]


def density_grid(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """The paper's 65 points."""
    n = 40_000 // scale
    started = [submit(grid_runs, *point, n) for point in grid()]

    def finish(rows: list[Row]) -> dict[str, Any]:
        gains = Gains()
        for future in started:
            gains.add(runs := future.result())
            rows += runs
        return gains.table(f"grid of 65 points, {n:,} requests each")

    return finish


def model_runs(name: str, machine: str, tp: int, mixture: str, n: int) -> list[Row]:
    """Blend and depth-first with one model."""
    spec = model(name)
    st, kv = for_machine(device(machine), spec, "overlapped", tp), kv_tokens_that_fit(device(machine), spec, tp)
    trace = synthetic(*SYNTHETIC[mixture], n, 0, mixture)
    return [run(trace, p, step_time=st, kv_tokens=kv, note=f"{name} tp {tp}") for p in ("blend", "dfs")]


def other_models(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """Other models and tensor parallelism on T1 and T2."""
    n = 100_000 // scale
    started = {row: [submit(model_runs, *row, mixture, n) for mixture in ("T1", "T2")] for row in MODELS}

    def finish(rows: list[Row]) -> dict[str, Any]:
        found, every = {}, Gains()
        for (name, _, tp), futures in started.items():
            gains = Gains()
            for future in futures:
                gains.add(runs := future.result())
                every.add(runs)
                rows += runs
            found[f"{name} TP {tp}, T1 and T2: over depth-first, most possible"] = {
                "blend": gains.blend,
                "bound": gains.bound,
            }
        return every.table(f"other models, T1 and T2, {n:,} requests") | found

    return finish


class Gains:
    """Blend over depth-first, and what any schedule could gain: depth-first time over the best lower bound."""

    def __init__(self) -> None:
        self.blend: list[float] = []
        self.bound: list[float] = []

    def add(self, runs: list[Row]) -> None:
        """A run of the blend and one of depth-first."""
        blend, dfs = runs
        self.blend.append(blend["tokens_per_s"] / dfs["tokens_per_s"])
        self.bound.append(1 / dfs["bound"])

    def table(self, name: str) -> dict[str, Any]:
        """Mean and least gain, what the bounds allow, and the same where they allow less than GAIN."""
        blend, bound = np.array(self.blend), np.array(self.bound)
        enough = bound >= GAIN
        share = (blend - 1) / np.maximum(bound - 1, 1e-9)
        return {
            f"{name}, blend over depth-first: mean (>= {GAIN}), least (>= 1.0)": (
                float(blend.mean()),
                float(blend.min()),
            ),
            f"{name}, most that any schedule could gain: mean, points below {GAIN}": (
                float(bound.mean()),
                int((~enough).sum()),
            ),
            f"{name}, points that allow {GAIN}: blend, most possible": _means(blend[enough], bound[enough]),
            f"{name}, the others: blend, most possible": _means(blend[~enough], bound[~enough]),
            f"{name}, share of the possible gain that blend has: mean": float(share.mean()),
        }


def _means(*values: F64) -> tuple[float, ...]:
    return tuple(float(v.mean()) if len(v) else float("nan") for v in values)


def rank_run(count: int, each: int) -> tuple[float, float]:
    """T1 with ``each`` requests a rank: time of one rank / ranks over the time of all of them; sharing lost."""
    st, limit = paper_a100_8b(), capacity("blend", PAPER_KV_TOKENS)
    trace = synthetic(*SYNTHETIC["T1"], each * count, 0, "T1")
    alone = simulate_ranks(trace, sampled, limit, st, "blend", paper_cost(), 1)[0]
    parts = simulate_ranks(trace, sampled, limit, st, "blend", paper_cost(), count)
    makespan = max(part.makespan_s for part in parts)
    computed = sum(part.unique_tokens_computed for part in parts)
    lost = (computed - alone.unique_tokens_computed) / int(trace.table.prompt_tokens.sum())
    linear_s = alone.makespan_s / count
    steps = (len(alone.steps) / count, sum(len(part.steps) for part in parts) / count, int(trace.output_tokens.max()))
    fixed = ", ".join(f"{st.overhead_s * k / linear_s:.4f}" for k in steps)
    print(
        f"DP {count}: {linear_s / makespan:.4f} of linear, sharing lost {lost:.5f}; fixed time of steps, of linear: "
        f"one rank / {count}, a rank, steps of the longest answer: {fixed}",
        flush=True,
    )
    return linear_s / makespan, lost


def ranks(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """Data parallelism."""
    each = 100_000 // scale
    targets = {2: 0.98, 4: 0.98, 8: 0.97, 64: 0.95}
    started = {count: submit(rank_run, count, each) for count in targets}

    def finish(rows: list[Row]) -> dict[str, Any]:
        return {
            f"DP {count}, {each * count:,} requests: share of linear (>= {targets[count]}), sharing lost (<= 0.01)": (
                future.result()
            )
            for count, future in started.items()
        }

    return finish


def wrong_cost_run(factor: float, n: int) -> Row:
    """A cost model that is off by ``factor``, corrected while it runs."""
    st = paper_a100_8b()
    believed = st._replace(gemm_s_per_token=st.gemm_s_per_token * factor)
    return run(synthetic(*SYNTHETIC["T1"], n, 0, "T1"), "blend", believed=believed, note=f"cost model x {factor}")


def wrong_costs(submit: Submit, scale: int) -> Callable[[list[Row]], dict[str, Any]]:
    """Live calibration from a right and from wrong cost models."""
    started = {factor: submit(wrong_cost_run, factor, 400_000 // scale) for factor in (1.0, 0.8, 1.25)}

    def finish(rows: list[Row]) -> dict[str, Any]:
        runs = {factor: future.result() for factor, future in started.items()}
        rows += runs.values()
        right = runs.pop(1.0)
        return {
            f"cost model × {factor}, live calibration: points lost (<= 1)": 100
            * (right["practical"] - row["practical"])
            for factor, row in runs.items()
        }

    return finish


SECTIONS: dict[str, Section] = {
    "ranks": ranks,
    "mixes": mixes,
    "wrong-costs": wrong_costs,
    "unseen": unseen,
    "other-models": other_models,
    "grid": density_grid,
    "small-jobs": small_jobs,
}
"""Longest runs first, so that no core is left with one of them in the end."""


def figure(rows: list[Row], path: Path) -> None:
    """Bars: share of the practical optimum, a mix and policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [*SYNTHETIC, *REAL, *PREFIX_RICH]
    _, axis = pyplot.subplots(figsize=(11, 4))
    for i, policy in enumerate(("dfs", "random", "dual-scan", "blend")):
        found = {
            row["trace"]: row["practical"] for row in reversed(rows) if row["policy"] == policy and not row["note"]
        }
        axis.bar(np.arange(len(names)) + 0.2 * i, [100 * found[name] for name in names], 0.2, label=policy)
    axis.set_xticks(np.arange(len(names)) + 0.3, names)
    axis.set(ylabel="% of practical optimum", ylim=(0, 100))
    axis.legend(ncols=4, fontsize=8)
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
