"""Time left and predicted time on the real embedded engine, against the time that a run then takes.

    python benchmarks/eta.py                       # the example, then a BBH + GSM8K + long-output mix in two forms
    python benchmarks/eta.py --only example --runs 2

Each job is planned (``plait plan``), run with ``--progress json``, planned again and run again: the first plan knows
what earlier runs on this machine have shown (nothing with ``--fresh``), the second also this very job's lengths.
``known``: answers as long as recorded ones, with ``ignore_eos``. ``natural``: the model ends them, up to a cap.
Printed for each run: the plan's error; the worst error of elapsed + ETA against the total after the first tenth; ETA
over the true time left at 10, 25, 50, 75 and 90 % of the time. JSON goes to out/eta.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
MARKS = (0.1, 0.25, 0.5, 0.75, 0.9)
WORDS = ("river", "stone", "paper", "garden", "yellow", "seven", "market", "window", "music", "winter", "bread")


def mix(n: int, known: bool, seed: int) -> list[dict[str, Any]]:
    """A third each of BBH, GSM8K and stories of up to 768 tokens, shuffled: bodies with their url."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for source in ("bbh_cot_3shot_15tasks", "gsm8k_8shot"):
        with gzip.open(DATA / "prompts" / f"{source}.jsonl.gz", "rt") as lines:
            found = [json.loads(line) for line in lines]
        for i in rng.choice(len(found), n // 3, replace=False):
            cap = {"max_tokens": min(256, max(1, int(found[i]["output_tokens"]))), "ignore_eos": True}
            ends = cap if known else {"max_tokens": 256, "stop": ["\n\n", "Q:"]}
            rows.append({"url": "/v1/completions", "prompt": found[i]["prompt"], "temperature": 0, **ends})
    with gzip.open(DATA / "traces" / "servegen_deepseek_r1.csv.gz", "rt") as lines:
        trace = np.loadtxt(lines, delimiter=",", skiprows=1, usecols=(0, 1), dtype=np.int64)
    for prompt, output in trace[rng.choice(len(trace), n - len(rows), replace=False)]:
        text = "Write a long story about " + " ".join(rng.choice(WORDS, min(60, int(prompt))))
        cap = {"max_tokens": min(768, max(1, int(output))), "ignore_eos": True} if known else {"max_tokens": 768}
        message = [{"role": "user", "content": text}]
        rows.append({"url": "/v1/chat/completions", "messages": message, "temperature": 0.7, "seed": 1, **cap})
    return [rows[i] for i in rng.permutation(len(rows))]


def write(bodies: list[dict[str, Any]], path: Path) -> Path:
    """As an OpenAI batch file."""
    with path.open("w") as out:
        for i, body in enumerate(bodies):
            url = body.pop("url")
            out.write(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}) + "\n")
    return path


def plait(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One command in a fresh process."""
    command = [sys.executable, "-m", "plait", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def measure(name: str, batch: Path, folder: Path, k: int) -> dict[str, Any]:
    """Plan, run, compare."""
    plan = json.loads(plait("plan", batch, "--json").stdout)
    done = plait("run", batch, "-o", folder / f"{name}-{k}.jsonl", "--progress", "json", "--json")
    total_s = json.loads(done.stdout)["run"]["duration_s"]
    beats = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    at_s = np.array([beat["elapsed_s"] for beat in beats if beat["eta_s"] is not None])
    eta_s = np.array([beat["eta_s"] for beat in beats if beat["eta_s"] is not None])
    late = (at_s >= 0.1 * total_s) & (at_s < total_s)
    error = (at_s + eta_s - total_s) / total_s
    return {
        "job": name,
        "run": k,
        "calibrated": plan["calibrated"],
        "planned_s": plan["policies"][0]["makespan_s"],
        "took_s": total_s,
        "plan_error": plan["policies"][0]["makespan_s"] / total_s - 1,
        "total_error_worst": float(np.abs(error[late]).max(initial=0.0)),
        "total_error_mean": float(np.abs(error[late]).mean()) if late.any() else 0.0,
        "moments": int(late.sum()),
        "eta_over_left": {str(q): float(np.interp(q * total_s, at_s, eta_s) / (total_s * (1 - q))) for q in MARKS},
        "series": np.round(np.stack((at_s, eta_s), axis=1), 2).tolist(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("example", "known", "natural"))
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="Begin with nothing measured or seen on this machine.")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.fresh:
            forget(folder)
        for job in [options.only] if options.only else ["example", "known", "natural"]:
            if job == "example":
                batch = ROOT / "examples" / "requests.jsonl"
            else:
                batch = write(mix(options.requests, job == "known", options.seed), folder / f"{job}.jsonl")
            for k in range(options.runs):
                found.append(measure(job, batch, folder, k))
                show(found[-1])
    out = Path("out")
    out.mkdir(exist_ok=True)
    (out / "eta.json").write_text(json.dumps({"options": vars(options), "runs": found}, indent=1))


def forget(folder: Path) -> None:
    """A cache of its own with the model and the compiled kernels, but nothing learnt."""
    from plait.engine.models import cache_dir

    own = folder / "cache"
    own.mkdir()
    for part in ("models", "numba"):
        if (cache_dir() / part).exists():
            (own / part).symlink_to(cache_dir() / part)
    os.environ["PLAIT_CACHE"] = str(own)


def show(row: dict[str, Any]) -> None:
    """One line."""
    left = " ".join(f"{float(q):.0%} {ratio:.2f}" for q, ratio in row["eta_over_left"].items())
    print(
        f"{row['job']:8} run {row['run']}: planned {row['planned_s']:6.1f} s, took {row['took_s']:6.1f} s "
        f"({row['plan_error']:+.0%}); elapsed + ETA off by at most {row['total_error_worst']:.0%} "
        f"(mean {row['total_error_mean']:.0%}); ETA / time left at {left}",
        flush=True,
    )


if __name__ == "__main__":
    main()
