"""The README's figure: BlendServe's mix T1 on a described A100 under four policies.

python benchmarks/figure.py                   # 100 000 requests, seed 0; writes docs/figure.png
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from plait.data.traces import Trace
from plait.data.workloads import workload

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT.parent / "shared" / "data" / "traces"


def write_csv(trace: Trace, path: Path) -> None:
    """The trace as ``plait simulate`` reads it; rows of one shared prefix are a group."""
    node, shared = trace.tree.node_of, trace.tree.prefix_tokens[trace.tree.node_of]
    with path.open("w") as out:
        out.write("prompt_tokens,output_tokens,group,shared_tokens\n")
        for prompt, output, v, tokens in zip(trace.table.prompt_tokens, trace.output_tokens, node, shared, strict=True):
            out.write(f"{prompt},{output},{v if v else -1},{tokens}\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figure.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        csv = Path(folder) / "T1.csv"
        write_csv(workload("T1", options.requests, options.seed, traces=TRACES), csv)
        policies = [part for name in ("blend", "dual-scan", "dfs", "fcfs") for part in ("--policy", name)]
        command = ["simulate", str(csv), "--device", "A100-80", "--model", "Llama-3.1-8B", *policies]
        subprocess.run([sys.executable, "-m", "plait", *command, "--plot", str(options.figure)], check=True)


if __name__ == "__main__":
    main()
