"""Requests a second of the simulator on T1 (best of three, after compilation): ``benchmarks/simulator_speed.py``.

The compiled loop alone, and with planning and length estimates. Writes out/simulator_speed.json.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from plait.data.workloads import workload
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import PAPER_KV_TOKENS, paper_a100_8b
from plait.simulate import simulate

OUT = Path(__file__).resolve().parents[1] / "out"
REPETITIONS = 3


def main() -> None:
    """All policies, lengths known and sampled."""
    trace, found = workload("T1"), {}
    for policy in ("fcfs", "dfs", "dual-scan", "blend"):
        for knowledge in ("known", "sampled"):
            best = float("inf")
            for _ in range(REPETITIONS + 1):  # the first one compiles
                if knowledge == "known":
                    lengths = Lengths.known(trace.table, trace.output_tokens)
                else:
                    lengths = Lengths.sampled(trace.table, trace.tree, lambda rows: trace.output_tokens[rows])
                limit = Capacity(PAPER_KV_TOKENS, 1, 0, 8192 if policy == "blend" else 2048, takes_prefill_budget=True)
                begin = time.perf_counter()
                simulate(trace.table, trace.tree, trace.output_tokens, lengths, limit, paper_a100_8b(), policy)
                best = min(best, time.perf_counter() - begin)
            found[f"{policy}, lengths {knowledge}"] = trace.table.n / best
            print(f"{policy:<10} lengths {knowledge:<8}{trace.table.n / best:>12,.0f} requests/s")
    OUT.mkdir(exist_ok=True)
    (OUT / "simulator_speed.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
