"""How fast and how small is reading a job? ``python benchmarks/reading.py [--lines 1000000]``

Writes a batch file (seeded; bodies of mixed lengths), then reads it, interleaved, with ``json.loads`` line by line (the
yardstick) and with ``open_job``, which also validates and digests; repeats and takes minima of CPU time. Memory is the
growth of a fresh process's resident size: while it holds the job, and at its peak. Prints a table with ratios and
writes out/reading.json.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plait.data.job import open_job

SEED = 7
SENTENCE = "the harbour heats its old quarter with sea water and three pumps stand in a former fish hall beside"
WORDS = SENTENCE.split()


def write_batch(path: Path, lines: int) -> None:
    """A chat batch: one of eight system prompts, a question of 5 to 120 words, settings as people write them."""
    rng = random.Random(SEED)
    systems = [" ".join(rng.choices(WORDS, k=40)) for _ in range(8)]
    with path.open("w", encoding="utf-8") as out:
        for i in range(lines):
            messages = [
                {"role": "system", "content": rng.choice(systems)},
                {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(5, 120)))},
            ]
            body = {"model": "m", "messages": messages, "max_tokens": rng.randint(1, 512), "temperature": 0}
            line = {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(json.dumps(line) + "\n")


def seconds_json(path: Path) -> float:
    """Parse each line with the standard library and drop it."""
    started = time.process_time()
    with path.open("rb") as stream:
        for line in stream:
            json.loads(line)
    return time.process_time() - started


def seconds_job(path: Path, workdir: str) -> float:
    """Index, validate and digest each line."""
    started = time.process_time()
    with open_job([path], workdir) as job:
        assert not job.bad.any()
        return time.process_time() - started


def seconds_requests(path: Path, workdir: str, rows: int) -> float:
    """Read ``rows`` requests again, spread over the file."""
    with open_job([path], workdir) as job:
        chosen = random.Random(SEED).sample(range(job.n), rows)
        started = time.process_time()
        for row in chosen:
            job.request(row)
        return time.process_time() - started


def memory(path: Path) -> dict[str, float]:
    """Resident bytes a row in this (fresh) process: held, and at the peak of reading."""
    page = resource.getpagesize()
    with tempfile.TemporaryDirectory() as workdir:
        small = Path(workdir) / "small.jsonl"
        write_batch(small, 100)
        open_job([small], workdir).close()  # imports and decoders are not the job's
        before = _resident(page)
        job = open_job([path], workdir)
        held, peak = _resident(page), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"held_bytes_per_row": (held - before) / job.n, "peak_bytes_per_row": (peak - before) / job.n}


def _resident(page_bytes: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(memory(options.memory_of)))
        return
    with tempfile.TemporaryDirectory() as workdir:
        path = Path(workdir) / "batch.jsonl"
        write_batch(path, options.lines)
        pairs = [(seconds_json(path), seconds_job(path, workdir)) for _ in range(options.repeats)]
        json_s, job_s = (min(times) for times in zip(*pairs, strict=True))
        rows = min(options.lines, 20_000)
        request_s = min(seconds_requests(path, workdir, rows) for _ in range(options.repeats)) / rows
        command = [sys.executable, __file__, "--memory-of", str(path)]
        used = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        report = {
            "lines": options.lines,
            "bytes_per_line": path.stat().st_size / options.lines,
            "json_loads_lines_per_s": options.lines / json_s,
            "open_job_lines_per_s": options.lines / job_s,
            "open_job_over_json_loads_time": job_s / json_s,
            "request_us": request_s * 1e6,
            **used,
        }
    for name, value in report.items():
        print(f"{name:32} {value:14.2f}")
    out = Path("out")
    out.mkdir(exist_ok=True)
    (out / "reading.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
