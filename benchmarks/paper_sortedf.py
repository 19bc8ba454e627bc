"""Unit-step latency figures: TEL over the bound, speed, and named policies over ours.

    python benchmarks/paper_sortedf.py [TRACES_DIR] [OUT_JSON]

80/20 mixes of lmsys.csv.gz and arxiv_summarization.csv.gz in TRACES_DIR (default ../shared/data/traces); seeds 0-4.
The bound is the mean busy time alone, so ratios at small n are pessimistic.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from plait.data.traces import read_trace
from plait.table import I64
from plait.unitstep.bounds import mean_busy_time
from plait.unitstep.kernel import total_completion
from plait.unitstep.orders import LISTS, starts_of

SEEDS = 5
SIZES = {16_492: (100, 200, 1_000, 2_000, 10_000, 100_000), 60_000: (2_000, 100_000), 460_000: (10_000,)}
NAMED = ("sorted-f-swap", *LISTS)
NAMED_ROWS = 2_000
"""Named policies are compared up to this many requests."""


class Lengths:
    """Prompt and output lengths of both sources."""

    def __init__(self, folder: Path) -> None:
        files = ("lmsys.csv.gz", "arxiv_summarization.csv.gz")
        traces = [read_trace(folder / name) for name in files]
        self.short, self.long = (np.column_stack([t.table.prompt_tokens, t.output_tokens]) for t in traces)

    def mix(self, n: int, short_share: float, seed: int) -> tuple[I64, I64]:
        """n requests drawn with replacement, shuffled: prompt and output tokens, int64 [n] each."""
        generator = np.random.default_rng(seed)
        k = round(n * short_share)
        short = self.short[generator.integers(0, len(self.short), k)]
        rows = np.concatenate([short, self.long[generator.integers(0, len(self.long), n - k)]])
        return generator.permutation(rows).T.copy()  # type: ignore[return-value]


def setting(lengths: Lengths, n: int, kv_tokens: int) -> dict[str, object]:
    """Ratios and times of one size over all seeds."""
    ratios: list[float] = []
    times: list[float] = []
    over: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        s, o = lengths.mix(n, 0.8, seed)
        begin = time.perf_counter()
        ours = total_completion(starts_of("latency", s, o, kv_tokens), o)
        times.append(time.perf_counter() - begin)
        ratios.append(ours / mean_busy_time(s, o, kv_tokens))
        for name in NAMED if n <= NAMED_ROWS else ():
            over.setdefault(name, []).append(total_completion(starts_of(name, s, o, kv_tokens), o) / ours)
    return {
        "kv_tokens": kv_tokens,
        "n": n,
        "tel_over_bound": [float(np.mean(ratios)), float(np.std(ratios))],
        "least_s": min(times),
        "named_over_ours": {name: [float(np.mean(v)), float(np.min(v))] for name, v in over.items()},
    }


def main() -> None:
    """Print each row and write all of them."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared/data/traces")
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "out/paper_sortedf.json")
    lengths = Lengths(folder)
    starts_of("latency", *lengths.mix(50, 0.8, 0), 16_492)  # compiles
    rows = []
    for kv_tokens, sizes in SIZES.items():
        for n in sizes:
            rows.append(setting(lengths, n, kv_tokens))
            print(json.dumps(rows[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
