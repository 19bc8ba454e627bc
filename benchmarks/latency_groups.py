"""Prefix groups under ``--goal latency`` where the KV cache cannot keep all their prefixes, simulated.

    python benchmarks/latency_groups.py

Requests come in random order from groups that share a prefix; a quarter of them has long answers, and lengths are known
(``max_tokens`` with ``ignore_eos``) or not (nothing seen before). The machine is the embedded engine's reference. For
each job and KV size: mean completion time and makespan over submission order's, and prompt tokens computed over the
unavoidable, of ``latency``, ``dfs`` and ``blend``. JSON goes to out/latency_groups.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from plait.events import Capacity
from plait.lengths import Lengths
from plait.plan import Machine, outlook
from plait.run.calibration import REFERENCE
from plait.table import RequestTable
from plait.tree.build import tree_from_groups

JOBS = ((8, 700, 96), (20, 600, 400), (60, 400, 400))
"""Groups, tokens they share, requests."""
KV_TOKENS = (3072, 6144, 16384)
LONG_SHARE, LONG_TOKENS, SHORT_TOKENS = 0.25, 160, 12
POLICIES = ("fcfs", "latency", "dfs", "blend")


def compare(job: tuple[int, int, int], kv_tokens: int, known: bool, seed: int) -> dict[str, Any]:
    """One job under each policy."""
    groups, shared, n = job
    rng = np.random.default_rng(seed)
    group = rng.integers(0, groups, n)
    prompt = shared + rng.integers(40, 200, n)
    output = np.where(rng.random(n) < LONG_SHARE, LONG_TOKENS, SHORT_TOKENS) + rng.integers(0, 8, n)
    table = RequestTable.of(prompt, output if known else np.full(n, LONG_TOKENS + 40))
    tree = tree_from_groups(prompt, group, np.full(n, shared))
    lengths = Lengths.known(table, output) if known else Lengths.unknown(table, tree, seed)
    capacity = Capacity(kv_tokens, 16, max_num_seqs=256, max_batched_tokens=512, prefix_lookup_at_submit=True)
    found = outlook(table, tree, lengths, Machine(capacity, REFERENCE), POLICIES, seed)
    first = found.forecasts[0]
    return {
        "groups": groups,
        "shared_tokens": shared,
        "requests": n,
        "kv_tokens": kv_tokens,
        "lengths": "known" if known else "unknown",
        "policies": {
            each.policy: {
                "mean": each.mean_completion_s / first.mean_completion_s,
                "time": each.makespan_s / first.makespan_s,
                "computed": each.prefill_tokens / found.unique_prompt_tokens,
            }
            for each in found.forecasts
        },
    }


def main() -> None:
    """All jobs, a line each."""
    rows = []
    for known in (True, False):
        for kv_tokens in KV_TOKENS:
            for job in JOBS:
                row = compare(job, kv_tokens, known, seed=1)
                rows.append(row)
                figures = "; ".join(
                    f"{name} mean {f['mean']:.2f} time {f['time']:.2f} computed {f['computed']:.2f}"
                    for name, f in row["policies"].items()
                )
                print(f"{row['lengths']:7} KV {kv_tokens:6} {job}: {figures}", flush=True)
    out = Path("out")
    out.mkdir(exist_ok=True)
    (out / "latency_groups.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
