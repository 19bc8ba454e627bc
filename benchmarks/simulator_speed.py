"""Requests a second of the simulator on T1 (400k requests), one core, after compilation.

What is timed, in CPU seconds of this process (other programs do not count), the best of three runs each:

- *whole*: ``simulate`` from its call to its result: scheduler state, planning, every re-plan and refresh of the length
  curves, the simulated steps. The trace, its prefix tree and the 1 % length sample exist before.
- *steps*: of that, the compiled loop alone: decisions and simulated steps.

Writes out/simulator_speed.json. ``--requests`` for a smaller trace.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from plait import simulate as simulator
from plait.data.traces import Trace
from plait.data.workloads import workload
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import PAPER_KV_TOKENS, paper_a100_8b
from plait.scheduling import virtual

OUT = Path(__file__).resolve().parents[1] / "out"
REPETITIONS = 3
TARGETS = {"fcfs": 1_000_000, "dfs": 1_000_000, "dual-scan": 1_000_000, "blend": 400_000}


class Loop:
    """The compiled loop with a stopwatch."""

    def __init__(self) -> None:
        self._loop, self.seconds = virtual.loop, 0.0

    def __call__(self, *arguments: Any) -> bool:
        begin = time.process_time()
        found: bool = self._loop(*arguments)
        self.seconds += time.process_time() - begin
        return found


def seconds(trace: Trace, policy: str, knowledge: str, loop: Loop) -> tuple[float, float]:
    """CPU seconds of one simulation: whole, steps."""
    if knowledge == "known":
        lengths = Lengths.known(trace.table, trace.output_tokens)
    else:
        lengths = Lengths.sampled(trace.table, trace.tree, lambda rows: trace.output_tokens[rows])
    limit = Capacity(PAPER_KV_TOKENS, 1, 0, 8192 if policy == "blend" else 2048, takes_prefill_budget=True)
    loop.seconds, begin = 0.0, time.process_time()
    simulator.simulate(trace.table, trace.tree, trace.output_tokens, lengths, limit, paper_a100_8b(), policy)
    return time.process_time() - begin, loop.seconds


def main() -> None:
    """All policies, lengths known and sampled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400_000)
    trace, small = workload("T1", parser.parse_args().requests), workload("T1", 20_000)
    loop = Loop()
    vars(simulator)["loop"] = loop
    found: dict[str, dict[str, float]] = {}
    for policy, target in TARGETS.items():
        for knowledge in ("known", "sampled"):
            seconds(small, policy, knowledge, loop)  # compiles
            runs = [seconds(trace, policy, knowledge, loop) for _ in range(REPETITIONS)]
            whole, steps = (trace.table.n / min(run[k] for run in runs) for k in (0, 1))
            found[f"{policy}, lengths {knowledge}"] = {"whole": whole, "steps": steps, "target": target}
            print(
                f"{policy:<10} lengths {knowledge:<8}{whole:>12,.0f} requests/s, steps alone {steps:>12,.0f}, "
                f"target {target:>10,}",
                flush=True,
            )
    OUT.mkdir(exist_ok=True)
    (OUT / "simulator_speed.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
