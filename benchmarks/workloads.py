"""Density and sharing that the workloads really have, beside what they are named for.

    python benchmarks/workloads.py [--traces ../shared/data/traces] [--requests N] [--seed 0]

Writes ``out/workloads.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from plait.data.workloads import PREFIX_RICH, REAL, SYNTHETIC, WORKLOADS, achieved, grid, synthetic, workload


def wanted(name: str) -> tuple[float, float | None]:
    """Density and sharing a workload is built for."""
    if name in PREFIX_RICH:
        return PREFIX_RICH[name], None
    return SYNTHETIC[name] if name in SYNTHETIC else REAL[name][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared/data/traces")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/workloads.json"))
    options = parser.parse_args()
    report = {}
    for name in WORKLOADS:
        began = time.perf_counter()
        trace = workload(name, options.requests, options.seed, options.traces)
        seconds = time.perf_counter() - began
        (density, sharing), (rho, s) = achieved(trace), wanted(name)
        prompt, output = trace.table.prompt_tokens.mean(), trace.output_tokens.mean()
        print(
            f"{name}: {trace.table.n:,} requests, density {density:.3f} (wanted {rho}), sharing {sharing:.3f} "
            f"(wanted {s}), prompt {prompt:.0f}, output {output:.0f} tokens on average, built in {seconds:.2f} s"
        )
        report[name] = {"requests": trace.table.n, "density": density, "sharing": sharing, "wanted": [rho, s]}
    worst = 0.0
    for rho, s in grid():
        density, sharing = achieved(synthetic(rho, s, 40_000, options.seed))
        worst = max(worst, abs(density / rho - 1), abs(sharing / s - 1))
    print(f"grid of {len(grid())} points, 40,000 requests each: worst relative error of density or sharing {worst:.2%}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"workloads": report, "grid_worst_error": worst}, indent=1))


if __name__ == "__main__":
    main()
