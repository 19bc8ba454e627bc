"""How well output lengths are predicted from a 1 % sample and after 10 % of a run: BBH, GSM8K, lmsys, DeepSeek-R1.

    python benchmarks/lengths.py [--seeds 100] [--shared ../shared]
    python benchmarks/lengths.py --together

Beside ``plait.lengths`` stand the mean of a sample over all rows and BlendServe's rule (mean of the sampled rows in the
subtree): with the sample alone and, after 10 % of the run, also with every answer that has finished by then ("online").
They get a random sample of the very size ours has. Errors are over the rows that have not started, as a share of the
mean length: ``row``, root mean square error of one row (what a mean can minimise); ``group``, mean absolute error of 32
random rows together (what a planner sums up); ``total``, absolute error of all of them together.

``--together``: jobs that nothing is known of, whose rows all run at once, a token a step: tokens expected in all over
those that come, when a tenth of them, a fifth and so on are there. Kinds of rows have a prefix each, and are cut off at
their ``max_tokens``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from plait.lengths import Lengths, paper_estimate
from plait.table import F64, I64, RequestTable
from plait.tree.build import build_tree, tree_from_groups
from plait.tree.prefix import PrefixTree

GROUP_ROWS = 32
SLOTS_SHARE = 0.02
"""Rows running at once in the 10 % experiment, as a share of the job."""

Job = tuple[RequestTable, PrefixTree, I64]


def prompts_job(path: Path) -> Job:
    """A job of real prompts, words as tokens: the tree only needs to know where prompts part."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    words = [record["prompt"].split() for record in records]
    sizes = [len(row) for row in words]
    _, tokens = np.unique([word for row in words for word in row], return_inverse=True)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    tree = build_tree(tokens.astype(np.int32), offsets)
    output = np.array([record["output_tokens"] for record in records], np.int64)
    return RequestTable.of(sizes), tree, np.maximum(output, 1)


def trace_job(path: Path) -> Job:
    """A length trace; rows of one client share a system prompt of up to 32 tokens, which makes them a subtree."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = list(csv.DictReader(lines))
    prompt = np.maximum([int(record["prompt_tokens"]) for record in records], 1).astype(np.int64)
    output = np.maximum([int(record["output_tokens"]) for record in records], 1).astype(np.int64)
    client = np.array([int(record.get("client") or -1) for record in records], np.int64)
    return RequestTable.of(prompt), tree_from_groups(prompt, client, np.full(len(prompt), 32)), output


JOBS: dict[str, Callable[[Path], Job]] = {
    "bbh": lambda data: prompts_job(data / "prompts" / "bbh_cot_3shot_15tasks.jsonl.gz"),
    "gsm8k": lambda data: prompts_job(data / "prompts" / "gsm8k_8shot.jsonl.gz"),
    "lmsys": lambda data: trace_job(data / "traces" / "lmsys.csv.gz"),
    "r1": lambda data: trace_job(data / "traces" / "servegen_deepseek_r1.csv.gz"),
}


def errors(estimate: F64, true: I64, rng: np.random.Generator) -> dict[str, float]:
    """The three errors of the module's docstring."""
    groups = rng.permutation(len(true))[: len(true) // GROUP_ROWS * GROUP_ROWS].reshape(-1, GROUP_ROWS)
    difference = estimate - true
    return {
        "total": abs(float(difference.sum())) / float(true.sum()),
        "group": float(np.abs(difference[groups].sum(1)).mean()) / (GROUP_ROWS * float(true.mean())),
        "row": float(np.sqrt((difference**2).mean())) / float(true.mean()),
    }


def run_part(order: I64, true: I64, share: float) -> tuple[I64, I64, I64]:
    """Serve rows in ``order`` on a fixed number of slots, a token a step, until ``share`` of them finished. Returns the
    finished rows, the running rows and what those have produced."""
    slots = max(4, int(SLOTS_SHARE * len(order)))
    ends = np.zeros(slots)
    start, stop = np.zeros(len(order)), np.zeros(len(order))
    for k, row in enumerate(order):
        slot = int(ends.argmin())
        start[k] = ends[slot]
        ends[slot] += true[row]
        stop[k] = ends[slot]
    now = np.sort(stop)[int(share * len(order))]
    live = (start < now) & (stop > now)
    return order[stop <= now], order[live], (now - start[live]).astype(np.int64)


def one_seed(job: Job, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Errors by moment, estimator and kind."""
    table, tree, true = job
    rng = np.random.default_rng(seed)
    ours = Lengths.sampled(table, tree, lambda rows: true[rows], seed=seed)
    sample = rng.permutation(table.n)[: len(ours.sample_rows())].astype(np.int64)
    estimates = {
        "global mean": np.full(table.n, true[sample].mean()),
        "paper": paper_estimate(tree, sample, true[sample]),
        "plait": ours.expected,
    }
    rest = np.setdiff1d(np.arange(table.n), np.concatenate((sample, ours.sample_rows())))
    result = {"1 % sample": {name: errors(e[rest], true[rest], rng) for name, e in estimates.items()}}

    finished, running, produced = run_part(rng.permutation(rest), true, 0.1)
    ours.observe_rows(finished, true[finished])
    ours.observe_rows(running, produced, finished=False)
    ours.refresh()
    seen = np.concatenate((sample, finished))
    estimates["global mean, online"] = np.full(table.n, true[seen].mean())
    estimates["paper, online"] = paper_estimate(tree, seen, true[seen])
    estimates["plait"] = ours.expected
    rest = np.setdiff1d(rest, np.concatenate((finished, running)))
    result["10 % of the run"] = {name: errors(e[rest], true[rest], rng) for name, e in estimates.items()}
    return result


Kind = tuple[str, int, int]
"""Where lengths come from, rows, max_tokens."""
TOGETHER: dict[str, list[Kind]] = {
    "bbh, gsm8k, endless": [("bbh", 50, 256), ("gsm8k", 50, 256), ("endless", 50, 768)],
    "lmsys, endless": [("lmsys", 100, 512), ("endless", 100, 512)],
    "endless": [("endless", 50, 768)],
    "gsm8k": [("gsm8k", 150, 512)],
    "bbh, gsm8k": [("bbh", 100, 4096), ("gsm8k", 100, 4096)],
    "lmsys": [("lmsys", 200, 2048)],
    "sharegpt": [("sharegpt", 200, 1024)],
    "azure": [("azure_conv_2023", 200, 4096)],
    "r1": [("r1", 200, 16384)],
    "gsm8k, r1": [("gsm8k", 100, 8192), ("r1", 100, 8192)],
}
MARKS = (0.1, 0.2, 0.35, 0.5)


@cache
def answer_lengths(source: str, data: Path) -> I64:
    """Output tokens of all rows of a source, loaded once; ``endless``: of answers that only their cap ends."""
    if source == "endless":
        return np.array([2**30])
    if source in JOBS:
        return JOBS[source](data)[2]
    return trace_job(data / "traces" / f"{source}.csv.gz")[2]


def together(kinds: list[Kind], data: Path, seed: int) -> list[float]:
    """Tokens expected over tokens that come, at each of MARKS."""
    rng = np.random.default_rng(seed)
    sizes, caps = [n for _, n, _ in kinds], [cap for _, _, cap in kinds]
    drawn = [rng.choice(answer_lengths(source, data), n) for source, n, _ in kinds]
    table = RequestTable.of(np.full(sum(sizes), 600), np.repeat(caps, sizes).astype(np.int64))
    true = np.minimum(np.concatenate(drawn), table.max_tokens)
    tree = tree_from_groups(table.prompt_tokens, np.repeat(np.arange(len(kinds)), sizes), np.full(len(true), 500))
    produced = np.cumsum([np.count_nonzero(true > age) for age in range(int(true.max()))])
    found = []
    for mark in MARKS:
        age = int(np.searchsorted(produced, mark * true.sum())) + 1
        ended = true <= age
        lengths = Lengths.unknown(table, tree)
        lengths.observe_rows(np.flatnonzero(ended), true[ended])
        live = np.flatnonzero(~ended)
        lengths.observe_rows(live, np.full(len(live), age), finished=False)
        lengths.refresh()
        left = sum(lengths.expected_remaining(int(row), age) for row in live)
        found.append((float(np.minimum(true, age).sum()) + left) / float(true.sum()))
    return found


def show_together(data: Path, seeds: int) -> None:
    """A line for each job: medians over seeds, then how far off they are on average (factor)."""
    print("tokens expected / tokens that come, when so many of them are there: " + ", ".join(f"{m:.0%}" for m in MARKS))
    off = []
    for name, kinds in TOGETHER.items():
        runs = np.array([together(kinds, data, seed) for seed in range(seeds)])
        off.append(np.abs(np.log(runs)).mean(axis=0))
        print(f"  {name:20}" + "".join(f"{ratio:7.2f}" for ratio in np.median(runs, axis=0)))
    print(f"  {'off by a factor of':20}" + "".join(f"{factor:7.2f}" for factor in np.exp(np.mean(off, axis=0))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--shared", type=Path, default=Path(__file__).resolve().parents[2] / "shared")
    parser.add_argument("--out", type=Path, default=Path("out/lengths.json"))
    parser.add_argument("--together", action="store_true", help="Jobs whose rows all run at once.")
    args = parser.parse_args()
    if args.together:
        show_together(args.shared / "data", args.seeds)
        return
    table: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, load in JOBS.items():
        job = load(args.shared / "data")
        seeds = [one_seed(job, seed) for seed in range(args.seeds)]
        table[name] = {}
        for moment, estimators in seeds[0].items():
            table[name][moment] = {}
            print(f"\n{name}, {moment}: mean relative error over {args.seeds} seeds")
            for estimator, kinds in estimators.items():
                means = {k: float(np.mean([s[moment][estimator][k] for s in seeds])) for k in kinds}
                table[name][moment][estimator] = means
                print(f"  {estimator:20}" + "".join(f"  {k} {v:6.2%}" for k, v in means.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
