"""The embedded engine on a prefix-rich mix: alone with everything submitted at once, and driven by Plait.

    python benchmarks/embedded.py                 # 400 requests, 3 interleaved runs of each
    python benchmarks/embedded.py --mix none      # no sharing at all: what Plait costs where order cannot help

Prompts come from ../shared/data/prompts (BBH, GSM8K, MMLU), shuffled with a fixed seed; answers are as long as the
recorded ones, cut at --max-output, with ``ignore_eos``. All runs use one engine configuration with a KV cache small
enough to bind. Times start when the engine is loaded. JSON goes to out/embedded.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SHARED = Path(__file__).resolve().parents[2] / "shared"
SOURCES = ("bbh_cot_3shot_15tasks", "gsm8k_8shot", "mmlu_5shot_12subjects")
PLAIT_MODES = ("fcfs", "random", "dfs", "default")


def prefix_rich(n: int, max_output: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Completion bodies from the three prompt sets in equal parts, shuffled."""
    rows = []
    for source in SOURCES:
        with gzip.open(SHARED / "data" / "prompts" / f"{source}.jsonl.gz", "rt") as lines:
            rows += list(rng.choice(np.array([json.loads(line) for line in lines], object), -(-n // 3), replace=False))
    picked = [rows[i] for i in rng.permutation(len(rows))[:n]]
    return [_body(row["prompt"], min(max_output, max(1, int(row["output_tokens"])))) for row in picked]


def no_sharing(n: int, max_output: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Completion bodies of random words with lengths from the lmsys trace: nothing to share."""
    with gzip.open(SHARED / "data" / "traces" / "lmsys.csv.gz", "rt") as lines:
        lengths = np.loadtxt(lines, delimiter=",", skiprows=1, dtype=np.int64)
    picked = lengths[rng.permutation(len(lengths))]
    picked = picked[(picked[:, 0] >= 8) & (picked[:, 0] <= 1500)][:n]
    words = ["river", "stone", "paper", "garden", "yellow", "seven", "market", "window", "music", "winter", "bread"]
    return [
        _body(" ".join(rng.choice(words, int(prompt))), min(max_output, max(1, int(output))))
        for prompt, output in picked
    ]


def _body(prompt: str, output_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}


def write_batch(bodies: list[dict[str, Any]], path: Path) -> None:
    """The bodies as an OpenAI batch file."""
    with path.open("w") as out:
        for i, body in enumerate(bodies):
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")


def run_alone(batch: Path, options: argparse.Namespace) -> dict[str, float]:
    """The engine by itself in a fresh process: every request added at once in file order."""
    arguments = [sys.executable, __file__, "--alone", str(batch), "--kv-tokens", str(options.kv_tokens)]
    out = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def alone(batch: Path, kv_tokens: int) -> dict[str, float]:
    """What ``run_alone`` runs: OpenVINO GenAI's own scheduler on the whole file, nothing of ours between."""
    import time

    import openvino as ov
    import openvino_genai as genai

    from plait.engine.machine import EngineSettings, resolve
    from plait.engine.models import find_model

    model = find_model()
    settings = resolve(EngineSettings(kv_tokens=kv_tokens), model)
    config = genai.SchedulerConfig()
    config.num_kv_blocks = settings.kv_blocks
    config.max_num_batched_tokens = settings.max_batched_tokens
    config.max_num_seqs = settings.max_num_seqs
    config.enable_prefix_caching = True
    config.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": settings.threads}
    pipeline = genai.ContinuousBatchingPipeline(str(model.path), config, "CPU", properties)
    tokenizer = pipeline.get_tokenizer()
    bodies = [json.loads(line)["body"] for line in batch.read_text().splitlines()]
    prompts = [tokenizer.encode(body["prompt"], add_special_tokens=False).input_ids.data for body in bodies]
    started = time.perf_counter()
    handles = {}
    for i, (body, ids) in enumerate(zip(bodies, prompts, strict=True)):
        generation = genai.GenerationConfig()
        generation.max_new_tokens, generation.ignore_eos = body["max_tokens"], True
        handles[i] = pipeline.add_request(i, ov.Tensor(np.ascontiguousarray(ids, np.int64)), generation)
    ends, output = [], 0
    while handles:
        pipeline.step()
        for i, handle in list(handles.items()):
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                output += sum(len(sequence.generated_ids) for sequence in handle.read_all())
                ends.append(time.perf_counter() - started)
                del handles[i]
    prompt = sum(ids.shape[1] for ids in prompts)
    p50, p99 = np.percentile(ends, [50, 99])
    return {"duration_s": ends[-1], "mean_completion_s": statistics.mean(ends), "p50_completion_s": float(p50),
            "p99_completion_s": float(p99), "prompt_tokens": prompt, "output_tokens": output}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mix", choices=("prefix", "none"), default="prefix")
    parser.add_argument("--max-output", type=int, default=48)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="alone,fcfs,random,dfs,default")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone, options.kv_tokens)))
        return
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Interleaved runs of every mode; prints and writes a table of ratios."""
    make = prefix_rich if options.mix == "prefix" else no_sharing
    bodies = make(options.requests, options.max_output, np.random.default_rng(options.seed))
    modes = options.modes.split(",")
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder) / "batch.jsonl"
        write_batch(bodies, batch)
        for k in range(options.runs):
            for mode in modes if k % 2 == 0 else modes[::-1]:
                out = Path(folder) / f"{mode}-{k}.jsonl"
                found = run_alone(batch, options) if mode == "alone" else run_plait(batch, out, mode, options)
                runs[mode].append(found)
                print(f"run {k} {mode}: {found['duration_s']:.1f} s", file=sys.stderr, flush=True)
    report(runs, options)


def run_plait(batch: Path, out: Path, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One ``plait run`` in a fresh process; its summary."""
    policy = [] if mode == "default" else ["--policy", mode]
    command = [sys.executable, "-m", "plait", "run", str(batch), "-o", str(out), "--kv-tokens", str(options.kv_tokens)]
    done = subprocess.run([*command, *policy, "--json", "--quiet"], capture_output=True, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return {**summary, **summary["run"]}


def report(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Medians and ratios."""
    rows = {mode: _median(found) for mode, found in runs.items() if found}
    base = rows.get("alone")
    print(f"{options.requests} requests, mix {options.mix}, KV {options.kv_tokens} tokens, seed {options.seed}, "
          f"outputs <= {options.max_output}, medians of {options.runs} interleaved runs")  # fmt: skip
    print("mode      tokens/s   x alone  prompt computed  / unavoidable  mean completion s  driver CPU %")
    for mode, row in rows.items():
        speed = row["tokens_per_s"]
        ratio = f"{speed / base['tokens_per_s']:7.2f}" if base else "      -"
        print(
            f"{mode:8} {speed:9.0f}   {ratio}  {row.get('computed', float('nan')):15.0f}  "
            f"{row.get('of_unavoidable', float('nan')):13.3f}  {row['mean_completion_s']:17.1f}  "
            f"{100 * row.get('driver_cpu_share', float('nan')):12.1f}"
        )
    out = Path("out")
    out.mkdir(exist_ok=True)
    target = out / f"embedded-{options.mix}.json"
    target.write_text(
        json.dumps({"options": {**vars(options), "alone": None}, "runs": runs, "medians": rows}, indent=1)
    )


def _median(found: list[dict[str, Any]]) -> dict[str, float]:
    """Median of every figure over runs."""

    def figures(run: dict[str, Any]) -> dict[str, float]:
        tokens = run["prompt_tokens"] + run["output_tokens"]
        own = {"tokens_per_s": tokens / run["duration_s"], "mean_completion_s": run["mean_completion_s"]}
        if "computed_prompt_tokens" in run:
            own["computed"] = run["computed_prompt_tokens"]
            own["of_unavoidable"] = run["computed_prompt_tokens"] / run["unique_prompt_tokens"]
            own["driver_cpu_share"] = run["driver_cpu_s"] / run["duration_s"]
        return own

    rows = [figures(run) for run in found]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


if __name__ == "__main__":
    main()
