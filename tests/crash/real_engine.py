"""Kills real runs of the command line at random moments and goes on with each until it is done.

    python tests/crash/real_engine.py --kills 20                      # the embedded engine on examples/requests.jsonl
    python tests/crash/real_engine.py --command "plait run {input} -o {output} --endpoint http://localhost:8000/v1"

One undisturbed run says how long the job takes and which rows it answers. Then the same command is started again and
again on a second output and killed (SIGKILL, the whole process group) after a random time; every kill is followed by a
look at the live file. When enough kills have hit, the command runs to its end. Wrong is: a row answered twice in the
live file, an answer that a later run does not have any more or has with other bytes, rows missing or doubled in the
final files. Says how far it is after every round; prints one JSON object; exit 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "requests.jsonl"
COMMAND = "{python} -m plait run {input} -o {output} --quiet"


def command_line(template: str, source: Path, output: Path) -> list[str]:
    """The command with its files filled in."""
    return [part.format(python=sys.executable, input=source, output=output) for part in shlex.split(template)]


def run_for(command: list[str], seconds: float | None) -> tuple[int, str]:
    """Run a command; after so many seconds kill it and all it started. Its return code, negative if it was killed, and
    what it said on standard error."""
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
    return process.returncode, said


def answers(live: Path) -> list[tuple[str, str]]:
    """(custom_id, output line) of every whole answer in a live file."""
    if not live.exists():
        return []
    found = []
    for raw in live.read_text().split("\n")[1:-1]:
        line = json.loads(raw)
        if line.pop("plait")["ok"]:
            found.append((line["custom_id"], json.dumps(line, sort_keys=True)))
    return found


def final_ids(output: Path) -> list[str | None]:
    """custom_ids of both final files."""
    errors = output.with_name(output.stem + ".errors.jsonl")
    return [
        json.loads(raw)["custom_id"]
        for path in (output, errors)
        if path.exists()
        for raw in path.read_text().split("\n")[:-1]
    ]


def check_kept(live: Path, kept: dict[str, str], wrong: list[str]) -> None:
    """Add what a look at the live file shows to be wrong; ``kept`` then holds its answers."""
    now = answers(live)
    if len(dict(now)) != len(now):
        wrong.append(f"{len(now) - len(dict(now))} rows were answered twice")
    for custom_id, line in kept.items():
        if dict(now).get(custom_id) != line:
            wrong.append(f"the answer of {custom_id} was lost or changed")
    kept.update(now)


def main() -> int:
    """Parse, run, kill, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=EXAMPLE)
    parser.add_argument("--command", default=COMMAND)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--earliest", type=float, default=0.05, help="Share of the job's time before the first kill.")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    wrong: list[str] = []
    kills = fruitful = rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.jsonl"
        began_s = time.monotonic()
        code, said = run_for(command_line(options.command, options.input, whole), None)
        if code not in (0, 1) or not whole.exists():
            sys.exit(f"the undisturbed run ended with exit code {code}: {said}")
        took_s = time.monotonic() - began_s
        while kills < options.kills:
            rounds += 1
            output = Path(folder) / f"killed{rounds}.jsonl"
            command, live = command_line(options.command, options.input, output), output.with_suffix(".live.jsonl")
            kept: dict[str, str] = {}
            while kills < options.kills:
                began_s = time.monotonic()
                code, said = run_for(command, chance.uniform(options.earliest, 1.0) * took_s)
                if code != -signal.SIGKILL:
                    if not kept:  # a whole run: the one that was measured may have been on a machine that stalled
                        took_s = min(took_s, time.monotonic() - began_s)
                    break
                kills += 1
                before = len(kept)
                check_kept(live, kept, wrong)
                fruitful += len(kept) > before
            code, said = run_for(command, None)
            check_kept(live, kept, wrong)
            if code not in (0, 1) or sorted(final_ids(output), key=str) != sorted(final_ids(whole), key=str):
                wrong.append(f"round {rounds}: exit code {code}, {len(final_ids(output))} final rows; {said}")
            print(f"round {rounds}: {kills} kills, {fruitful} after new answers, wrong: {wrong}", file=sys.stderr)
    figures = {"undisturbed_s": round(took_s, 1), "kills": kills, "kills_after_new_answers": fruitful, "wrong": wrong}
    print(json.dumps(figures))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
