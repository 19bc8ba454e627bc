"""Tokens a CPU second and a second for each size of step and batch of the embedded engine, beside its defaults.

    python benchmarks/engine_sweep.py [--requests 48] [--rounds 2] [--mix prefix|none]

One ``plait run`` each, in a fresh process, on the BBH, GSM8K and MMLU prompts of ../shared/data/prompts (or without any
sharing), shuffled with a fixed seed, outputs <= 48 tokens, KV cache of 16,384 tokens. The best of the rounds counts.
CPU seconds are those of the engine and its driver together: they say something on a shared machine too. JSON goes to
out/engine_sweep-MIX.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

from embedded import no_sharing, prefix_rich, write_batch
from plait.engine.machine import MAX_BATCHED_TOKENS, MAX_NUM_SEQS

BATCHED_TOKENS = (256, 512, 1024, 2048)
NUM_SEQS = (32, 64, 128, 256)


def run(batch: Path, out: Path, kv_tokens: int, batched_tokens: int, num_seqs: int) -> tuple[float, float, int]:
    """(wall seconds of the job without loading, CPU seconds with loading, prompt + output tokens)."""
    command = [sys.executable, "-m", "plait", "run", str(batch), "-o", str(out), "--kv-tokens", str(kv_tokens)]
    command += ["--max-batched-tokens", str(batched_tokens), "--max-num-seqs", str(num_seqs), "--json", "--quiet"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads(done.stdout)["run"]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return summary["duration_s"], cpu_s, summary["prompt_tokens"] + summary["output_tokens"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mix", choices=("prefix", "none"), default="prefix")
    parser.add_argument("--max-output", type=int, default=48)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, nargs="*", default=BATCHED_TOKENS)
    parser.add_argument("--num-seqs", type=int, nargs="*", default=NUM_SEQS)
    options = parser.parse_args()
    make = prefix_rich if options.mix == "prefix" else no_sharing
    bodies = make(options.requests, options.max_output, np.random.default_rng(options.seed))
    settings = list(product(options.batched_tokens, options.num_seqs))
    best = {setting: (float("inf"), float("inf"), 0) for setting in settings}
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder) / "batch.jsonl"
        write_batch(bodies, batch)
        for k in range(options.rounds):
            for setting in settings if k % 2 == 0 else settings[::-1]:
                found = run(batch, Path(folder) / f"{k}-{setting}.jsonl", options.kv_tokens, *setting)
                best[setting] = (min(best[setting][0], found[0]), min(best[setting][1], found[1]), found[2])
    report(best, options)


def report(best: dict[tuple[int, int], tuple[float, float, int]], options: argparse.Namespace) -> None:
    """Ratios to the default, where it was run, else to the first."""
    base = best.get((MAX_BATCHED_TOKENS, MAX_NUM_SEQS), next(iter(best.values())))
    print(
        f"{options.requests} requests, mix {options.mix}, KV {options.kv_tokens} tokens, outputs <= "
        f"{options.max_output}, seed {options.seed}, best of {options.rounds}, load average {os.getloadavg()[0]:.1f}"
    )
    print("step tokens  sequences  tokens/s  x default  CPU s  x default")
    for (batched, seqs), (wall_s, cpu_s, tokens) in best.items():
        print(
            f"{batched:11}  {seqs:9}  {tokens / wall_s:8.0f}  {base[0] / wall_s:9.2f}  {cpu_s:5.1f}  "
            f"{base[1] / cpu_s:9.2f}"
        )
    out = Path("out")
    out.mkdir(exist_ok=True)
    rows = [{"batched_tokens": b, "num_seqs": s, "wall_s": w, "cpu_s": c} for (b, s), (w, c, _) in best.items()]
    (out / f"engine_sweep-{options.mix}.json").write_text(json.dumps({"options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
