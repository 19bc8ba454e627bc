"""Mean latency beyond the backlog of known lengths: intervals, arrivals, real step costs.

    python benchmarks/sortedf_more.py [TRACES_FOLDER] [OUT.json] [--only intervals|online|real]

80/20 of lmsys (short) and arxiv (long); seeds 0-4, intervals also 10-14. Each line: mean and spread over the seeds. The
constants of intervals were chosen on seeds 20 and 21, of lower ends on 0-2.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from paper_sortedf import HELD_OUT
from paper_sortedf import Lengths as Sources
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.specs import device, model
from plait.model.steptime import StepTime, for_machine
from plait.simulate import simulate
from plait.table import I64, RequestTable
from plait.tree.prefix import PrefixTree
from plait.unitstep.intervals import by_interval, by_lower_end, interval_around, sorted_f_amin
from plait.unitstep.kernel import area
from plait.unitstep.online import serve
from plait.unitstep.orders import starts_of

SEEDS = 5
REQUESTS = 2_000
KV_TOKENS = 16_492
FACTORS = (1.1, 1.5, 2.0, 3.0, 10.0, np.inf)
LOADS = (0.7, 0.85, 1.0, 1.2, 1.5)
MACHINES = (
    ("Llama-3.1-8B", 1, 60_000, 2_000),
    ("Llama-3.1-8B", 1, 460_000, 2_000),
    ("Llama-3.1-8B", 1, 460_000, 10_000),
    ("Llama-3.1-70B", 4, 16_492, 2_000),
)
"""Model, tensor parallelism, KV tokens, requests; sequential engine on A100s."""
CHUNK_TOKENS = 2_048
REAL_POLICIES = ("fcfs", "mc-sf", "size", "area", "latency", "dfs", "blend")
THROUGHPUT = ("dfs", "blend", "fcfs")
FRACTION = 0.01
"""Of the requests, run first where lengths are not known."""

Figures = dict[str, list[float]]
Row = dict[str, object]


def spread(values: Figures) -> dict[str, list[float]]:
    """Mean and standard deviation of each list."""
    return {name: [round(float(np.mean(v)), 4), round(float(np.std(v)), 4)] for name, v in values.items()}


def intervals(sources: Sources) -> list[Row]:
    """Mean completion over that of ``latency`` with full knowledge, by how far predictions may be off."""
    rows: list[Row] = []
    for seeds in (range(SEEDS), HELD_OUT):
        mixes = {seed: sources.mix(REQUESTS, 0.8, seed) for seed in seeds}
        full = {seed: float(np.mean(starts_of("latency", s, o, KV_TOKENS) + o)) for seed, (s, o) in mixes.items()}
        fcfs = {seed: float(np.mean(starts_of("fcfs", s, o, KV_TOKENS) + o)) for seed, (s, o) in mixes.items()}
        for factor in FACTORS:
            found: Figures = {"ours": [], "by_lower_end": [], "amin_restart": [], "amin_kept": [], "fcfs": []}
            for seed, (s, o) in mixes.items():
                lower, upper = interval_around(o, factor, KV_TOKENS - s, seed)
                flows = {
                    "ours": by_interval(s, o, lower, upper, KV_TOKENS),
                    "by_lower_end": by_lower_end(s, o, lower, KV_TOKENS),
                    "amin_restart": sorted_f_amin(s, o, lower, KV_TOKENS),
                    "amin_kept": sorted_f_amin(s, o, lower, KV_TOKENS, keep_progress=True),
                }
                for name, flow in flows.items():
                    found[name].append(float(np.mean(flow.finish)) / full[seed])
                found["fcfs"].append(fcfs[seed] / full[seed])
            which = "none" if np.isinf(factor) else factor
            rows.append({"intervals": which, "seeds": f"{seeds[0]}-{seeds[-1]}", **spread(found)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def poisson(s: I64, o: I64, load: float, seed: int) -> I64:
    """Arrival steps: ``load`` = memory area that arrives a step over the KV budget, int64 [n]."""
    gap = float(np.mean(area(s, o))) / KV_TOKENS / load
    return np.floor(np.cumsum(np.random.default_rng(seed).exponential(gap, len(s)))).astype(np.int64)


def online(sources: Sources) -> list[Row]:
    """Latency from arrival over that of Sorted-F-Online."""
    rows: list[Row] = []
    for load in LOADS:
        found: Figures = {f"{name}_{what}": [] for name in ("latency", "fcfs") for what in ("mean", "p99")}
        for seed in range(SEEDS):
            s, o = sources.mix(REQUESTS, 0.8, seed)
            arrival = poisson(s, o, load, seed + 100)
            base = serve("sorted-f-online", s, o, arrival, KV_TOKENS).finish - arrival
            for name in ("latency", "fcfs"):
                waited = serve(name, s, o, arrival, KV_TOKENS).finish - arrival
                found[f"{name}_mean"].append(float(np.mean(waited) / np.mean(base)))
                found[f"{name}_p99"].append(float(np.percentile(waited, 99) / np.percentile(base, 99)))
        rows.append({"load": load, **spread(found)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def one_real(s: I64, o: I64, kv_tokens: int, step_time: StepTime, policy: str, known: bool, seed: int) -> list[float]:
    """Mean completion, makespan (both in seconds) and preemptions of one simulated run."""
    table, tree = RequestTable.of(s), PrefixTree.without_sharing(len(s))
    lengths = (
        Lengths.known(table, o, seed) if known else Lengths.sampled(table, tree, lambda rows: o[rows], FRACTION, seed)
    )
    capacity = Capacity(kv_tokens, 1, max_batched_tokens=CHUNK_TOKENS, takes_prefill_budget=True)
    result = simulate(table, tree, o, lengths, capacity, step_time, policy, seed)
    return [float(np.mean(result.finish_s)), result.makespan_s, float(result.preemptions)]


def real(sources: Sources) -> list[Row]:
    """Mean latency over FCFS, throughput over the best throughput policy, both with the same knowledge."""
    rows: list[Row] = []
    for name, tp, kv_tokens, requests in MACHINES:
        step_time = for_machine(device("A100-80"), model(name), "sequential", tp)
        for known in (True, False):
            means: Figures = {policy: [] for policy in REAL_POLICIES}
            rates: Figures = {policy: [] for policy in REAL_POLICIES}
            preempted: Figures = {policy: [] for policy in REAL_POLICIES}
            for seed in range(SEEDS):
                s, o = sources.mix(requests, 0.8, seed)
                runs = {p: one_real(s, o, kv_tokens, step_time, p, known, seed) for p in REAL_POLICIES}
                least = min(runs[p][1] for p in THROUGHPUT)
                for p, (mean_s, makespan_s, preemptions) in runs.items():
                    means[p].append(mean_s / runs["fcfs"][0])
                    rates[p].append(least / makespan_s)
                    preempted[p].append(preemptions)
            rows.append(
                {
                    "machine": f"{name} A100 x{tp}, {kv_tokens} KV tokens, {requests} requests",
                    "lengths": "known" if known else "1 % sample",
                    "mean_over_fcfs": spread(means),
                    "throughput_over_best": spread(rates),
                    "preemptions": spread(preempted),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Print each row and write all of them; parts that do not run keep their rows in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="?", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("out", nargs="?", type=Path, default=Path("out/sortedf_more.json"))
    parts = {"intervals": intervals, "online": online, "real": real}
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    sources = Sources(options.traces)
    report = json.loads(options.out.read_text()) if options.only and options.out.exists() else {}
    report.update({name: part(sources) for name, part in parts.items() if options.only in (None, name)})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
