"""Driving servers over HTTP: what it costs, and what order is worth.

    python benchmarks/servers.py --clients            CPU a request of the HTTP libraries that are installed
    python benchmarks/servers.py --driver             pool + journal against the leanest client, instant fake server
    python benchmarks/servers.py --memory [--rows N]  peak memory of runs of 10 000 and N (100 000) requests
    python benchmarks/servers.py --http2              HTTP/2 against HTTP/1.1, over TLS
    python benchmarks/servers.py --chaos              two servers, one killed five times, a tenth of all requests faulty
    python benchmarks/servers.py --routing            groups to the least loaded server, or by the partition of the job
    python benchmarks/servers.py --llama [--rows 96]  llama.cpp: all at once in file order against ``plait run``
    python benchmarks/servers.py --vllm [--rows 96]   the same with a plain vLLM server (see servers_vllm.py)

Servers run in processes of their own, on a core of their own where there are two. CPU is of a process on one core
(user + system), the least of several repetitions that alternate between the contestants. Results also go to
out/servers-*.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OUT = Path("out")


def run(module: str, function: str, *arguments: object) -> Any:
    """A function of another file of this folder, which is only read where it is needed."""
    return getattr(importlib.import_module(module), function)(*arguments)


def real(kind: str, n: int, repeats: int, goals: list[str]) -> dict[str, float]:
    """Each goal on one kind of server."""
    found = {goal: run("servers_real", "compare", kind, n, repeats, goal) for goal in goals}
    return {f"{goal}_{name}": value for goal, result in found.items() for name, value in result.items()}


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("clients", "driver", "memory", "http2", "chaos", "routing", "llama", "vllm"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--goal", action="append", help="throughput or latency, for --llama and --vllm (repeatable)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with us
    options.goal = options.goal or ["throughput", "latency"]
    jobs: dict[str, Callable[[], Mapping[str, object]]] = {
        "clients": lambda: run("servers_driver", "clients", options.rows or 4000),
        "driver": lambda: run("servers_driver", "driver", options.rows or 3000),
        "memory": lambda: run("servers_driver", "memory", options.rows or 100_000),
        "http2": lambda: run("servers_http2", "compare", options.rows or 2000),
        "chaos": lambda: run("servers_chaos", "chaos"),
        "routing": lambda: run("servers_routing", "compare"),
        "llama": lambda: real("llama", options.rows or 96, options.repeats, options.goal),
        "vllm": lambda: real("vllm", options.rows or 96, options.repeats, options.goal),
    }
    chosen = [name for name in jobs if getattr(options, name)] or ["clients", "driver", "memory"]
    OUT.mkdir(exist_ok=True)
    for name in chosen:
        (OUT / f"servers-{name}.json").write_text(json.dumps(jobs[name](), indent=1))


if __name__ == "__main__":
    main()
