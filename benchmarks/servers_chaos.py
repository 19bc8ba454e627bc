"""Two servers, each a process; one is killed and started again five times while ``plait run`` works, and a tenth of
the requests meets a fault. Counts what became of every request.

Imported by ``benchmarks/servers.py``. Run as a script it is one of the servers.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from plait.testing_server import FAULTS, Call, LoopbackServer, Reply, answer, echo, too_many_requests

ROWS, KILLS, FAULT_SHARE = 500, 5, 0.1
DELAY_S = (0.02, 0.2)
KINDS = sorted(set(FAULTS) - {"429-hour"})
OPTIONS = ["--model", "echo", "--max-concurrency", "12", "--stall-timeout", "2", "--retries", "20", "--quiet"]
LIMIT_S = 300.0


def serve(port: int, kinds: list[str]) -> None:
    """Echo until killed, but for a tenth of the requests; prints the port first."""
    dice = random.Random()
    soon = FAULTS | {"429-seconds": lambda: too_many_requests("0.2")}  # a second for each of them would take minutes

    def behave(call: Call) -> Reply:
        if call.method != "POST":
            return echo(call)
        if dice.random() < FAULT_SHARE:
            return soon[dice.choice(kinds)]()
        return answer(call, call.prompt, delay_s=dice.uniform(*DELAY_S))

    with LoopbackServer(behave, port, keep_calls=False) as server:
        print(server.port, flush=True)
        threading.Event().wait()


def start(kinds: list[str], port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """A server's process and port."""
    command = [sys.executable, __file__, str(port), *kinds]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def once(kinds: list[str]) -> dict[str, int]:
    """One run with faults of these kinds."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("".join(json.dumps(_line(row)) + "\n" for row in range(ROWS)))
        (good, good_port), (bad, bad_port) = start(kinds), start(kinds)
        command = [sys.executable, "-m", "plait", "run", str(source), "-o", str(output), *OPTIONS]
        for port in (good_port, bad_port):
            command += ["--endpoint", f"http://127.0.0.1:{port}/v1"]
        kills, end_s = 0, time.monotonic() + LIMIT_S
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as run:
            while run.poll() is None and time.monotonic() < end_s:
                time.sleep(0.02)
                if kills < KILLS and _recorded(output) > (kills + 1) * ROWS / (KILLS + 2):
                    kills += 1
                    bad.kill()
                    bad.wait()
                    bad, _ = start(kinds, bad_port)
            run.kill()
        for server in (good, bad):
            server.kill()
            server.wait()
        return _count(output) | {"kills": kills, "exit_code": run.returncode}


def _line(row: int) -> dict[str, Any]:
    body = {"model": "echo", "messages": [{"role": "user", "content": f"question {row}"}], "max_tokens": 8}
    return {"custom_id": str(row), "method": "POST", "url": "/v1/chat/completions", "body": body}


def _recorded(output: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return output.with_name("out.live.jsonl").read_bytes().count(b"\n") - 1
    return 0


def _count(output: Path) -> dict[str, int]:
    """Rows that were answered, answered with another row's text, recorded as failed, lost, and there twice."""
    found: Counter[str] = Counter()
    wrong = failed = 0
    for path in (output, output.with_name("out.errors.jsonl")):
        for line in map(json.loads, path.open() if path.exists() else ()):
            found[line["custom_id"]] += 1
            if path == output:
                text = line["response"]["body"]["choices"][0]["message"]["content"]
                wrong += text != f"question {line['custom_id']}"
            else:
                failed += 1
    twice = sum(times > 1 for times in found.values())
    answered = sum(found.values()) - failed
    return {"answered": answered, "wrong": wrong, "failed": failed, "lost": ROWS - len(found), "twice": twice}


def chaos() -> dict[str, dict[str, int]]:
    """All kinds of faults together, then each alone."""
    result = {}
    for name, kinds in {"all": KINDS, **{kind: [kind] for kind in KINDS}}.items():
        result[name] = once(kinds)
        print(f"{name:16}", result[name], flush=True)
    return result


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
