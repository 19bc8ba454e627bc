"""Mean completion time on the embedded engine: ``--goal latency`` beside submission order, throughput, engine alone.

    python benchmarks/latency.py                  # 300 requests, 2 interleaved runs of each mode: about 11 minutes
    python benchmarks/latency.py --simulate       # the same on the virtual clock, with this machine's step times
    python benchmarks/latency.py --add --modes blend --runs 1      # one more run of one mode, beside those in the file

80/20 of short and long requests, shuffled with a fixed seed: lengths from the lmsys and arxiv traces of
../shared/data/traces, so scaled (--prompt-scale, --output-scale) that a run takes about a minute on two cores, half of
it prefill; prompts have at least 8 tokens. Text: the questions of ../shared/data/prompts (BBH, GSM8K, MMLU) without
their examples; a prompt is as many consecutive questions of a shuffled list as its length takes, the last one cut, and
no question is used twice.

Modes, each a ``plait run`` in a fresh process with one KV cache that binds:

alone                         OpenVINO GenAI's own scheduler, everything submitted at once in file order
fcfs, latency, blend          lengths are known: ``ignore_eos`` and ``max_tokens`` = the trace's length
NAME-estimated                the file asks for --cap tokens and nothing else, so that is all that Plait reads; an
                              engine around the embedded one, made after planning, cuts each answer at its length

Each run begins with an empty cache: without what earlier ones taught Plait about lengths and step times. Times start
when the engine is loaded; throughput is prompt + output tokens over the time until the last answer. JSON goes to
out/latency.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embedded import SHARED, SOURCES, run_alone, run_plait, write_batch
from eta import forget
from paper_sortedf import Lengths as Traces
from plait.data.tokenize import Tokenizer
from plait.engine.machine import EngineSettings
from plait.engine.models import find_model
from plait.events import Capacity, Engine, EngineRequest, Event
from plait.lengths import Lengths
from plait.policy.base import POLICIES
from plait.run.batch import BatchOptions, run_batch
from plait.run.embedded import Embedded
from plait.run.options import Options, Unwatched
from plait.simulate import simulate
from plait.table import I64, RequestTable
from plait.tree.build import build_tree

SHORT_SHARE = 0.8
LEAST_PROMPT_TOKENS = 8
MODES = ("alone", "fcfs", "latency", "blend", "latency-estimated", "blend-estimated")
ESTIMATED = "-estimated"
FIGURES = ("mean_completion_s", "p50_completion_s", "p99_completion_s", "duration_s")


@dataclass(frozen=True)
class Work:
    """n requests: prompts as text, and how long each answer is."""

    prompts: list[str]
    output_tokens: I64  # [n]

    def known(self) -> list[dict[str, Any]]:
        """Bodies that say how long the answer is."""
        return [
            {"prompt": text, "max_tokens": int(o), "temperature": 0, "ignore_eos": True}
            for text, o in zip(self.prompts, self.output_tokens, strict=True)
        ]

    def capped(self, cap: int) -> list[dict[str, Any]]:
        """Bodies that all ask for the same."""
        return [{"prompt": text, "max_tokens": cap, "temperature": 0} for text in self.prompts]


def work(options: argparse.Namespace, tokenizer: Tokenizer) -> Work:
    """The benchmark's requests. Raises ValueError where the questions do not suffice."""
    prompt, output = Traces(SHARED / "data" / "traces").mix(options.requests, SHORT_SHARE, options.seed)
    prompt = np.maximum(LEAST_PROMPT_TOKENS, np.rint(prompt * options.prompt_scale)).astype(np.int64)
    asked = questions(np.random.default_rng(options.seed))
    encoded = tokenizer.encode_many([("/v1/completions", {"prompt": text}) for text in asked])
    texts: dict[str, None] = {}
    at = 0
    for tokens in prompt.tolist():
        text, ids = "", list[int]()
        while len(ids) < tokens or text in texts:  # short prompts are all different too: equal ones would run once
            if at == len(encoded):
                raise ValueError(f"the questions end after {len(texts)} prompts; lower --requests or --prompt-scale")
            ids = (ids if len(ids) < tokens else []) + np.asarray(encoded[at]).tolist()
            text = tokenizer.decode(ids[:tokens])
            at += 1
        texts[text] = None
    return Work(list(texts), np.maximum(1, np.rint(output * options.output_scale)).astype(np.int64))


def questions(rng: np.random.Generator) -> list[str]:
    """The question that each prompt of the sets ends with, shuffled."""
    texts = []
    for source in SOURCES:
        with gzip.open(SHARED / "data" / "prompts" / f"{source}.jsonl.gz", "rt") as lines:
            texts += [_last_question(json.loads(line)["prompt"]) for line in lines]
    found = list(dict.fromkeys(texts))
    return [found[i] for i in rng.permutation(len(found))]


def _last_question(prompt: str) -> str:
    """What follows the last example, without "Question:" in front and "Answer:" behind."""
    last = prompt.rstrip().rpartition("\n\n")[2]
    last = re.sub(r"^(Q|Question): ?", "", last)
    return re.sub(r"\n(A: Let's think step by step\.|Answer:)$", "", last) + "\n"


class Cut:
    """An engine that ends each answer at its true length, whatever the request asks for."""

    def __init__(self, engine: Engine, output_tokens: Sequence[int]) -> None:
        self._engine, self._output_tokens = engine, output_tokens

    @property
    def capacity(self) -> Capacity:
        return self._engine.capacity

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        cut = [replace(r, max_tokens=self._output_tokens[r.row], body={**r.body, "ignore_eos": True}) for r in requests]
        self._engine.submit(cut, prefill_budget_tokens)

    def cancel(self, rows: Sequence[int]) -> None:
        self._engine.cancel(rows)

    def poll(self, timeout_s: float) -> list[Event]:
        return self._engine.poll(timeout_s)

    def now_s(self) -> float:
        return self._engine.now_s()

    def close(self) -> None:
        self._engine.close()


class CutEmbedded(Embedded):
    """The embedded engine with ``Cut`` around it. The lengths are read when the engine is made: after planning."""

    def __init__(self, lengths: Path, settings: EngineSettings) -> None:
        super().__init__(None, settings, lambda line: None)
        self._lengths = lengths

    def engine(self) -> Engine:
        """The engine, loaded."""
        return Cut(super().engine(), json.loads(self._lengths.read_text()))


def run_estimated(batch: Path, lengths: Path, out: Path, policy: str, kv_tokens: int) -> dict[str, Any]:
    """A whole run of ``batch`` in this process; its numbers."""
    place = CutEmbedded(lengths, EngineSettings(kv_tokens=kv_tokens))
    report = run_batch(
        BatchOptions([str(batch)], policy), place, Options(out, [batch]), lambda ready: Unwatched(), lambda line: None
    )
    assert report.numbers is not None and report.numbers.output_tokens == sum(json.loads(lengths.read_text()))
    return report.numbers.as_dict()


def one_run(mode: str, folder: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One mode once, in a fresh process."""
    forget(Path(tempfile.mkdtemp(dir=folder)))
    if mode == "alone":
        return run_alone(folder / "known.jsonl", options)
    if not mode.endswith(ESTIMATED):
        return run_plait(folder / "known.jsonl", out, mode, options)
    command = [sys.executable, __file__, "--hidden", str(folder), "--out", str(out), "--modes", mode]
    command += ["--kv-tokens", str(options.kv_tokens)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def one_simulation(mode: str, given: Work, tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Any] | None:
    """One mode on the virtual clock."""
    policy = mode.removesuffix(ESTIMATED)
    if policy not in POLICIES:
        return None
    ids = tokenizer.encode_many([("/v1/completions", body) for body in given.known()])
    offsets = np.concatenate(([0], np.cumsum([len(np.asarray(row)) for row in ids]))).astype(np.int64)
    tokens = np.concatenate([np.asarray(row) for row in ids]).astype(np.int32)
    estimated = mode.endswith(ESTIMATED)
    cap = np.full(len(ids), options.cap) if estimated else given.output_tokens
    table = RequestTable.of(np.diff(offsets), cap, tokens=tokens, offsets=offsets)
    place = Embedded(None, EngineSettings(kv_tokens=options.kv_tokens), lambda line: None)
    tree = build_tree(tokens, offsets, 16, place.machine.capacity.block_tokens)
    lengths = Lengths.unknown(table, tree) if estimated else Lengths.known(table, given.output_tokens)
    capacity, step_time = place.machine.capacity, place.machine.step_time
    result = simulate(table, tree, given.output_tokens, lengths, capacity, step_time, policy)
    return {
        "mean_completion_s": float(result.finish_s.mean()),
        "p50_completion_s": float(np.percentile(result.finish_s, 50)),
        "p99_completion_s": float(np.percentile(result.finish_s, 99)),
        "duration_s": result.makespan_s,
        "prompt_tokens": len(tokens),
        "output_tokens": int(given.output_tokens.sum()),
        "preemptions": result.preemptions,
    }


def compare(options: argparse.Namespace) -> None:
    """Interleaved runs of every mode; prints and writes the table."""
    tokenizer = Tokenizer.load(find_model().path)
    given = work(options, tokenizer)
    modes = options.modes.split(",")
    runs = earlier(options) if options.add else {}
    runs.update({mode: [] for mode in modes if mode not in runs})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_batch(given.known(), folder / "known.jsonl")
        write_batch(given.capped(options.cap), folder / "capped.jsonl")
        (folder / "lengths.json").write_text(json.dumps(given.output_tokens.tolist()))
        for k in range(1 if options.simulate else options.runs):
            for mode in modes if k % 2 == 0 else modes[::-1]:
                if options.simulate:
                    found = one_simulation(mode, given, tokenizer, options)
                else:
                    found = one_run(mode, folder, folder / f"{mode}-{k}.jsonl", options)
                    print(f"run {k} {mode}: {found['duration_s']:.1f} s", file=sys.stderr, flush=True)
                runs[mode] += [found] if found else []
    report({mode: found for mode, found in runs.items() if found}, options)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What makes runs comparable."""
    left_out = ("hidden", "out", "add", "modes", "runs")
    return {name: value for name, value in vars(options).items() if name not in left_out}


def results(options: argparse.Namespace) -> Path:
    """Where the figures go."""
    return Path("out") / ("latency-simulated.json" if options.simulate else "latency.json")


def earlier(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Runs in the file, by mode. Raises ValueError where they had other settings."""
    found = json.loads(results(options).read_text())
    if found["options"] != settings(options):
        raise ValueError(f"{results(options)} is of {found['options']}; --add needs the same settings")
    runs: dict[str, list[dict[str, Any]]] = found["runs"]
    return runs


def report(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Means over runs, and ratios to submission order and to throughput with the same knowledge."""
    rows: dict[str, dict[str, float]] = {}
    for mode, found in runs.items():
        row = rows[mode] = {name: statistics.mean(run[name] for run in found) for name in FIGURES}
        tokens = runs[mode][0]["prompt_tokens"] + runs[mode][0]["output_tokens"]
        row["tokens_per_s"] = statistics.mean(tokens / run["duration_s"] for run in runs[mode])
        row["preemptions"] = statistics.mean(run.get("preemptions", float("nan")) for run in runs[mode])
        row["runs"] = len(found)
    how = "simulated" if options.simulate else "means over runs"
    print(f"{options.requests} requests, prompts x {options.prompt_scale:g}, outputs x {options.output_scale:g}, "
          f"KV {options.kv_tokens} tokens, cap {options.cap}, seed {options.seed}, {how}")  # fmt: skip
    print("mode                 mean s   p50 s   p99 s   tokens/s   preempted   runs   mean / fcfs   tokens/s / blend")
    for mode, row in rows.items():
        mean = row["mean_completion_s"] / rows["fcfs"]["mean_completion_s"] if "fcfs" in rows else float("nan")
        fast = rows.get("blend-estimated" if mode.endswith(ESTIMATED) else "blend")
        speed = row["tokens_per_s"] / fast["tokens_per_s"] if fast else float("nan")
        seconds = "".join(f"{row[name]:8.1f}" for name in FIGURES[:3])
        counts = f"{row['tokens_per_s']:10.0f} {row['preemptions']:11.0f} {row['runs']:6.0f}"
        print(f"{mode:18} {seconds} {counts} {mean:13.3f} {speed:18.3f}")
    target = results(options)
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"options": settings(options), "runs": runs, "means": rows}, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--prompt-scale", type=float, default=0.35)
    parser.add_argument("--output-scale", type=float, default=0.175)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=3584)
    parser.add_argument("--cap", type=int, default=896, help="max_tokens of every request where lengths are estimated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--add", action="store_true", help="keep the runs of the same settings that are in the file")
    parser.add_argument("--hidden", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hidden:
        folder, policy = options.hidden, options.modes.removesuffix(ESTIMATED)
        found = run_estimated(folder / "capped.jsonl", folder / "lengths.json", options.out, policy, options.kv_tokens)
        print(json.dumps(found))
        return
    compare(options)


if __name__ == "__main__":
    main()
