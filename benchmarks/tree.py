"""Speed and memory of the prefix tree: exact, hashed, and arranged.

    python benchmarks/tree.py [--rows 100000 1000000] [--stream-rows 10000000]

Prompts of 512 tokens, the first 374 of them (73 %) from groups on three levels that end at 100, 237 and 374 tokens,
with about 1000, 125 and 16 prompts a group; rows in random order. Each size runs in its own process: rate = best of
three after compilation, peak = highest resident memory less that before the column existed, over the column's size.
``--stream-rows`` plans a job from a stream, keeping hashes only; at ``--rows`` sizes that order is compared to exact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plait._numba import njit
from plait.table import I32, I64
from plait.tree.arrange import Arrangement, arrange
from plait.tree.blockhash import tree_from_batches
from plait.tree.build import build_tree
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import kept_sharing, sharing_ratio

PROMPT_TOKENS = 512
BATCH_ROWS = 50_000


@njit
def fill(tokens: I32, first: int, n: int) -> None:
    """Prompts of rows ``first ..`` of an n-row job, in place, int32 [k, 512]."""
    for i in range(tokens.shape[0]):
        row = np.uint64(first + i)
        leaf = scramble(row) % np.uint64(max(1, n // 16))
        for t in range(tokens.shape[1]):
            if t < 100:
                owner = leaf // np.uint64(64)
            elif t < 237:
                owner = leaf // np.uint64(8) + np.uint64(1 << 40)
            elif t < 374:
                owner = leaf + np.uint64(2 << 40)
            else:
                owner = row + np.uint64(3 << 40)
            tokens[i, t] = np.int32(scramble(owner * np.uint64(1024) + np.uint64(t)) % np.uint64(50_000))


@njit
def scramble(x: np.uint64) -> np.uint64:
    """A 64-bit mixer: the same input gives the same output, neighbours give unlike ones."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(31)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(29))


def column(n: int) -> tuple[I32, I64]:
    """All tokens of an n-row job and the offsets."""
    tokens = np.empty((n, PROMPT_TOKENS), np.int32)
    fill(tokens, 0, n)
    return tokens.reshape(-1), np.arange(n + 1, dtype=np.int64) * PROMPT_TOKENS


def stream(n: int) -> Iterator[tuple[I32, I64]]:
    """The same job in batches."""
    for first in range(0, n, BATCH_ROWS):
        tokens = np.empty((min(BATCH_ROWS, n - first), PROMPT_TOKENS), np.int32)
        fill(tokens, first, n)
        yield tokens.reshape(-1), np.arange(len(tokens) + 1, dtype=np.int64) * PROMPT_TOKENS


def memory_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def exact(n: int) -> dict[str, float]:
    """Build rate and peak of an n-row job; sharing."""
    build_tree(*column(100))
    before = memory_bytes("VmRSS")
    tokens, offsets = column(n)
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        tree = build_tree(tokens, offsets)
        best = min(best, time.perf_counter() - start)
    peak = (memory_bytes("VmHWM") - before) / tokens.nbytes
    prompt = np.full(n, PROMPT_TOKENS, np.int64)
    return {"rows_per_s": n / best, "peak": peak, "nodes": tree.n_nodes, "sharing": sharing_ratio(tree, prompt)}


def hashed(n: int) -> dict[str, float]:
    """Sharing of the hashed order, judged by the exact tree, over the most there is."""
    tree, prompt = tree_from_batches(stream(n))
    judge = build_tree(*column(n))
    return {"of_exact_sharing": kept_sharing(judge, prompt, tree.dfs_rows) / sharing_ratio(judge, prompt)}


def streamed(n: int) -> dict[str, float]:
    """Seconds and peak bytes of planning a streamed job: tree and arrangement. The stream's own time is taken off."""
    rng = np.random.default_rng(0)
    arrange_rows(*tree_from_batches(stream(100)), rng)
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    tree, prompt = tree_from_batches(stream(n))
    built = time.perf_counter() - start
    start = time.perf_counter()
    arrange_rows(tree, prompt, rng)
    arranged = time.perf_counter() - start
    return {
        "tree_and_stream_s": built,
        "arrange_s": arranged,
        "peak_gib": (memory_bytes("VmHWM") - before) / 2**30,
        "sharing": sharing_ratio(tree, prompt),
    }


def arrangement(n: int) -> dict[str, float]:
    """Seconds to arrange n rows, best of three."""
    tree, prompt = tree_from_batches(stream(n))
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        arrange_rows(tree, prompt, np.random.default_rng(0))
        best = min(best, time.perf_counter() - start)
    return {"arrange_s": best}


def arrange_rows(tree: PrefixTree, prompt: I64, rng: np.random.Generator) -> Arrangement:
    """Arrange with outputs from one token to thousands."""
    output = np.exp(rng.normal(4.0, 2.0, len(prompt))).clip(1, 20_000)
    return arrange(tree, prompt, (prompt + output) * 6e-5, (prompt * output + output**2 / 2) * 7e-8)


PARTS = {"exact": exact, "hashed": hashed, "arrange": arrangement, "stream": streamed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--stream-rows", type=int, nargs="*", default=[])
    parser.add_argument(
        "--parts", nargs="*", choices=["exact", "hashed", "arrange"], default=["exact", "hashed", "arrange"]
    )
    parser.add_argument("--out", type=Path, default=Path("out/tree.json"))
    parser.add_argument("--one", nargs=2, metavar=("PART", "ROWS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(PARTS[args.one[0]](int(args.one[1]))))
        return
    jobs = [(part, n) for n in args.rows for part in args.parts] + [("stream", n) for n in args.stream_rows]
    results = []
    for part, n in jobs:
        done = subprocess.run(
            [sys.executable, __file__, "--one", part, str(n)], capture_output=True, text=True, check=True
        )
        result = json.loads(done.stdout)
        results.append({"part": part, "rows": n, **result})
        print(f"{part:8} {n:>10,} rows  " + "  ".join(f"{k} {v:,.4g}" for k, v in result.items()), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
