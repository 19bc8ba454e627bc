"""Every row of the throughput planner's table: ``python benchmarks/paper_blendserve.py`` (traces beside the checkout).

Prints the table and writes out/paper_blendserve.json, .md (the table of docs/throughput.md) and .png. ``--small``
divides every job by ten, for a quick look. Workloads, samples and shuffles have seed 0; unseen mixes the seeds that
their rows name.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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


class Bench:
    """Runs policies and keeps what was measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def run(
        self,
        trace: Trace,
        policy: str,
        lengths: Callable[[Any], Lengths] = sampled,
        step_time: StepTime | None = None,
        kv_tokens: int = PAPER_KV_TOKENS,
        chunk: int = 2048,
        believed: StepTime | None = None,
        note: str = "",
    ) -> dict[str, Any]:
        """One simulation as a row."""
        st = step_time or paper_a100_8b()
        estimates = lengths(trace)
        begin = time.perf_counter()
        limit = capacity(policy, kv_tokens, chunk)
        result = simulate(trace.table, trace.tree, trace.output_tokens, estimates, limit, st, policy, 0, believed)
        row = self.row(trace, policy, result, st, limit) | {"note": note, "chunk": limit.max_batched_tokens}
        row["requests_per_s"] = trace.table.n / (time.perf_counter() - begin)
        self.rows.append(row)
        print(
            f"{trace.name:<12}{trace.table.n:>8,} {policy:<10}{note:<24}{100 * row['practical']:>7.2f} % of practical "
            f"{100 * row['bound']:>7.2f} % of best bound, {row['tokens_per_s']:>8,.0f} tokens/s, "
            f"sharing {row['sharing']:.3f}, {row['requests_per_s']:>10,.0f} requests/s",
            flush=True,
        )
        return row

    @staticmethod
    def row(trace: Trace, policy: str, result: Result, st: StepTime, limit: Capacity) -> dict[str, Any]:
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
    """All sections in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    scale = 10 if parser.parse_args().small else 1
    bench = Bench()
    table: dict[str, Any] = {}
    for policy in ("blend", "dual-scan", "dfs"):
        bench.run(synthetic(1.4, 0.35, 20_000), policy, note="compile")
    table |= mixes(bench, scale)
    table |= unseen(bench, 200_000 // scale)
    table |= small_jobs(bench)
    table |= density_grid(bench, 40_000 // scale)
    table |= other_models(bench, 100_000 // scale)
    table |= ranks(100_000 // scale)
    table |= wrong_costs(bench, 400_000 // scale)
    lines = [f"| {name} | {text(value)} |" for name, value in table.items()]
    print("\n".join(lines))
    OUT.mkdir(exist_ok=True)
    (OUT / "paper_blendserve.md").write_text("\n".join(["| | measured |", "|---|---|", *lines]) + "\n")
    (OUT / "paper_blendserve.json").write_text(json.dumps({"table": table, "rows": bench.rows}, indent=2))
    figure(bench.rows, OUT / "paper_blendserve.png")


def text(value: Any) -> str:
    """A cell: numbers to four digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(part)}" for name, part in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(text(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def mixes(bench: Bench, scale: int) -> dict[str, Any]:
    """T, X and S: every policy, dual scan with static chunks, perfect lengths."""
    share: dict[tuple[str, str], float] = {}
    static: dict[str, float] = {}
    faithful, sequential, kept = {}, {}, {"blend": 1.0, "dual-scan": 1.0}
    for name in (*SYNTHETIC, *REAL, *PREFIX_RICH):
        trace = workload(name, (400_000 if name in SYNTHETIC else 200_000) // scale, 0, TRACES)
        runs = {policy: bench.run(trace, policy) for policy in ("dfs", "random", "dual-scan", "blend")}
        for policy, run in runs.items():
            share[name, policy] = run["practical"]
        for policy in kept:
            kept[policy] = min(kept[policy], runs[policy]["sharing"] / max(runs["dfs"]["sharing"], 1e-9))
        if name in SYNTHETIC:
            half = bench.run(trace, "dual-scan", chunk=512, note="static chunk 512")
            static[name] = max(half["practical"], share[name, "dual-scan"])
            exact = {policy: bench.run(trace, policy, known, note="lengths known") for policy in ("dfs", "dual-scan")}
            faithful[name] = exact["dual-scan"]["tokens_per_s"] / exact["dfs"]["tokens_per_s"]
            one = bench.run(trace, "dfs", known, paper_a100_8b("sequential"), note="sequential engine")
            sequential[name] = exact["dual-scan"]["tokens_per_s"] / one["tokens_per_s"]

    def mean(names: Any, policy: str) -> float:
        return 100 * float(np.mean([share[name, policy] for name in names]))

    def least(names: Any) -> float:
        return 100 * min(share[name, "blend"] for name in names)

    def each(names: Any) -> dict[str, float]:
        return {name: 100 * share[name, "blend"] for name in names}

    return {
        "T1–T4, blend, % of the practical optimum: mean (>= 95)": mean(SYNTHETIC, "blend"),
        "each (>= 94)": each(SYNTHETIC),
        "X1–X5, blend: mean (>= 94)": mean(REAL, "blend"),
        "each (>= 93)": each(REAL),
        "S1, S2, blend: each (>= 93)": each(PREFIX_RICH),
        "sharing kept, least share of depth-first: blend (>= 0.99), dual scan (>= 0.97)": kept,
        "T, blend over depth-first (>= 1.50)": mean(SYNTHETIC, "blend") / mean(SYNTHETIC, "dfs"),
        "T, blend over best static dual scan (>= 1.18)": mean(SYNTHETIC, "blend") / (100 * np.mean([*static.values()])),
        "dual scan over depth-first, lengths known: each (1.15–1.30)": faithful,
        "dual scan over the sequential engine's depth-first, lengths known: each (<= 1.5)": sequential,
    }


def unseen(bench: Bench, n: int) -> dict[str, Any]:
    """Mixes that nothing was tuned on: sources, density, sharing and lengths drawn with other seeds."""
    found = {}
    for seed in UNSEEN_SEEDS:
        trace = random_mix(n, seed)
        found[trace.name] = 100 * bench.run(trace, "blend", note=f"unseen, seed {seed}")["practical"]
    return {"unseen random mixes, blend: each (>= 93)": found}


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


def small_jobs(bench: Bench) -> dict[str, Any]:
    """20k, 40k, 100k requests against the bound with the critical path."""
    found: dict[str, Any] = {}
    for n, target in ((20_000, 85), (40_000, 88), (100_000, 93)):
        runs = [bench.run(synthetic(*SYNTHETIC[name], n, 0, name), "blend", note="small job") for name in SYNTHETIC]
        shares = [100 * run["bound"] for run in runs]
        found[f"T at {n:,} requests, blend, % of the bound with critical path: mean (>= {target})"] = float(
            np.mean(shares)
        )
        found[f"{n:,} requests: each"] = dict(zip(SYNTHETIC, shares, strict=True))
    return found


def density_grid(bench: Bench, n: int) -> dict[str, Any]:
    """The paper's 65 points."""
    gains = Gains()
    for density, sharing in grid():
        trace = synthetic(density, sharing, n, 0, f"{density}/{sharing}")
        gains.add([bench.run(trace, policy, note="grid") for policy in ("blend", "dfs")])
    return gains.table(f"grid of 65 points, {n:,} requests each")


def other_models(bench: Bench, n: int) -> dict[str, Any]:
    """Other models and tensor parallelism on T1 and T2."""
    found, every = {}, Gains()
    for name, machine, tp in MODELS:
        spec, gains = model(name), Gains()
        st, kv = for_machine(device(machine), spec, "overlapped", tp), kv_tokens_that_fit(device(machine), spec, tp)
        for mixture in ("T1", "T2"):
            trace = synthetic(*SYNTHETIC[mixture], n, 0, mixture)
            note = f"{name} tp {tp}"
            runs = [bench.run(trace, p, step_time=st, kv_tokens=kv, note=note) for p in ("blend", "dfs")]
            gains.add(runs)
            every.add(runs)
        found[f"{name} TP {tp}, T1 and T2: over depth-first, most possible"] = {
            "blend": gains.blend,
            "bound": gains.bound,
        }
    return every.table(f"other models, T1 and T2, {n:,} requests") | found


class Gains:
    """Blend over depth-first, and what any schedule could gain: depth-first time over the best lower bound."""

    def __init__(self) -> None:
        self.blend: list[float] = []
        self.bound: list[float] = []

    def add(self, runs: list[dict[str, Any]]) -> None:
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


def ranks(each: int) -> dict[str, Any]:
    """Data parallelism on T1 with ``each`` requests a rank: time of one rank / ranks over the time of all of them."""
    st, limit = paper_a100_8b(), capacity("blend", PAPER_KV_TOKENS)
    found = {}
    for count, target in ((2, 0.98), (4, 0.98), (8, 0.97), (64, 0.95)):
        trace = synthetic(*SYNTHETIC["T1"], each * count, 0, "T1")
        alone = simulate_ranks(trace, sampled, limit, st, "blend", paper_cost(), 1)[0]
        parts = simulate_ranks(trace, sampled, limit, st, "blend", paper_cost(), count)
        makespan = max(part.makespan_s for part in parts)
        computed = sum(part.unique_tokens_computed for part in parts)
        lost = (computed - alone.unique_tokens_computed) / int(trace.table.prompt_tokens.sum())
        found[f"DP {count}, {each * count:,} requests: share of linear (>= {target}), sharing lost (<= 0.01)"] = (
            alone.makespan_s / count / makespan,
            lost,
        )
    return found


def wrong_costs(bench: Bench, n: int) -> dict[str, Any]:
    """A cost model that is off, corrected while it runs."""
    trace, st = synthetic(*SYNTHETIC["T1"], n, 0, "T1"), paper_a100_8b()
    right = bench.run(trace, "blend", believed=st, note="calibrated, right prior")
    found = {}
    for factor in (0.8, 1.25):
        wrong = st._replace(gemm_s_per_token=st.gemm_s_per_token * factor)
        run = bench.run(trace, "blend", believed=wrong, note=f"cost model x {factor}")
        found[f"cost model × {factor}, live calibration: points lost (<= 1)"] = 100 * (
            right["practical"] - run["practical"]
        )
    return found


def figure(rows: list[dict[str, Any]], path: Path) -> None:
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
