"""Mean completion time against makespan: every named policy, the weights between, and what ``--goal balanced`` picks.

    python benchmarks/pareto.py [TRACES_FOLDER] [--requests 8000] [--out out]

Llama-3.1-8B on a simulated A100-80, overlapped and sequential; lengths known, and from a 1 % sample that runs first. T1
and S1 need no data; X2 (BlendServe-like, real lengths) and 80/20 (short chats and long documents) take the traces. The
balanced goal is judged as in a run: forecasts with the lengths as known at the start, then the true ones. Writes
pareto.json and pareto.png (sampled lengths) to --out and a copy of the figure to docs/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from paper_sortedf import Lengths as Sources
from plait.data.traces import Trace
from plait.data.workloads import workload
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.specs import device, kv_tokens_that_fit, model
from plait.model.steptime import for_machine
from plait.plan import FRONT, Machine, Objective, outlook
from plait.simulate import simulate
from plait.table import RequestTable
from plait.tree.prefix import PrefixTree

NAMED = ("fcfs", "dfs", "dual-scan", "mc-sf", "size", "area")
FRACTION = 0.01
CHUNK_TOKENS = 8192
LATENCY_KV_TOKENS = 60_000
"""For 80/20, whose requests are short: so that memory binds."""


def mixed(traces: Path, n: int) -> Trace:
    """80 % short chats, 20 % long documents, nothing shared."""
    prompt, output = Sources(traces).mix(n, 0.8, 0)
    return Trace("80/20", RequestTable.of(prompt), PrefixTree.without_sharing(n), output)


def points(trace: Trace, machine: Machine, known: bool) -> dict[str, Any]:
    """Makespan and mean completion of every policy, and the policy that the balanced goal picks."""

    def lengths() -> Lengths:
        if known:
            return Lengths.known(trace.table, trace.output_tokens)
        return Lengths.sampled(trace.table, trace.tree, lambda rows: trace.output_tokens[rows], FRACTION)

    found = {}
    for policy in (*FRONT, *NAMED):
        result = simulate(
            trace.table, trace.tree, trace.output_tokens, lengths(), machine.capacity, machine.step_time, policy
        )
        found[policy] = [result.makespan_s, float(np.mean(result.finish_s))]
    began_s = time.perf_counter()
    chosen = outlook(
        trace.table, trace.tree, lengths(), machine, ["fcfs"], objective=Objective("balanced")
    ).chosen.policy
    fast, soon, mine = found["blend"], found["latency"], found[chosen]
    return {
        "points": found,
        "balanced": chosen,
        "throughput_of_goal_throughput": fast[0] / mine[0],
        "mean_of_goal_throughput": mine[1] / fast[1],
        "latency_throughput": fast[0] / soon[0],
        "latency_mean": soon[1] / fast[1],
        "planning_s": time.perf_counter() - began_s,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel a job: makespan to the right, mean completion upwards, both as shares of the throughput goal's."""
    columns = (len(rows) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(3.1 * columns, 5.4), squeeze=False)
    for axis, row in zip(axes.T.ravel(), rows, strict=False):
        base = row["points"]["blend"]
        at = {name: (makespan / base[0], mean / base[1]) for name, (makespan, mean) in row["points"].items()}
        axis.plot(*zip(*(at[name] for name in FRONT), strict=True), "o-", color="#336699", ms=3, lw=1)
        for name in NAMED:
            axis.plot(*at[name], "x", color="#999999", ms=5)
        for name in (*NAMED, "blend", "latency"):
            axis.annotate(name, at[name], fontsize=6, xytext=(3, 2), textcoords="offset points")
        axis.plot(*at[row["balanced"]], "o", color="#cc4433", ms=7, mfc="none", label="--goal balanced")
        axis.axvline(1.03, color="#cccccc", lw=0.7, ls=":")
        axis.set_title(f"{row['workload']}, {row['mode']}", fontsize=8)
        axis.tick_params(labelsize=6)
    axes[0, 0].legend(fontsize=6)
    figure.supxlabel("makespan / that of --goal throughput", fontsize=8)
    figure.supylabel("mean completion / that of --goal throughput", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    """All jobs on both kinds of engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    llama, a100 = model("Llama-3.1-8B"), device("A100-80")
    jobs = [(workload(name, given.requests), kv_tokens_that_fit(a100, llama)) for name in ("T1", "S1")]
    if given.traces is not None:
        jobs.append((workload("X2", given.requests, 0, given.traces), kv_tokens_that_fit(a100, llama)))
        jobs.append((mixed(given.traces, given.requests), LATENCY_KV_TOKENS))
    rows: list[dict[str, Any]] = []
    for trace, kv_tokens in jobs:
        for mode, known in itertools.product(("overlapped", "sequential"), (True, False)):
            capacity = Capacity(kv_tokens, max_batched_tokens=CHUNK_TOKENS, takes_prefill_budget=True)
            found = points(trace, Machine(capacity, for_machine(a100, llama, mode)), known)
            lengths = "known" if known else "sampled"
            rows.append({"workload": trace.name, "mode": mode, "lengths": lengths, "requests": trace.table.n, **found})
            shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}
            print(json.dumps({key: value for key, value in shown.items() if key != "points"}), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "pareto.json").write_text(json.dumps(rows, indent=1))
    draw([row for row in rows if row["lengths"] == "sampled"], given.out / "pareto.png")
    shutil.copy(given.out / "pareto.png", Path(__file__).resolve().parents[1] / "docs" / "pareto.png")


if __name__ == "__main__":
    main()
