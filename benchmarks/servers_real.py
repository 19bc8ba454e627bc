"""``plait run`` through HTTP against the same requests all at once in file order, on real servers whose KV cache binds.

Imported by ``benchmarks/servers.py``. Every run finds a server with nothing cached: a new llama.cpp, without its cache
of prompts in host memory, or a vLLM (see ``servers_vllm``) whose prefix cache was cleared. Times are of the whole
command, start-up, planning and final files included.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from plait.data.tokenize import Tokenizer
from plait.engine.models import find_model
from plait.testing_llama import llama_server
from servers_vllm import vllm_server

URL = "/v1/chat/completions"
PROMPTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"
SLOTS, KV_TOKENS = 4, 6144
THREADS = len(os.sched_getaffinity(0))
GROUPS = 8
SHORT_TOKENS, LONG_TOKENS, LONG_SHARE = 8, 96, 0.25
WARM_UP = 2
"""Requests of the first pass, which is discarded."""


@contextlib.contextmanager
def llama() -> Iterator[Callable[[], str]]:
    """A function that starts llama.cpp anew, in place of the one before, and returns its base URL."""
    with contextlib.ExitStack() as present:

        def fresh() -> str:
            present.close()
            return present.enter_context(llama_server(find_model().path, SLOTS, KV_TOKENS, THREADS))

        yield fresh


Fresh = Callable[[], AbstractContextManager[Callable[[], str]]]
KINDS: dict[str, tuple[Fresh, int]] = {
    "llama": (llama, 1),
    "vllm": (lambda: vllm_server(str(find_model().path), KV_TOKENS), 128),
}
"""How to get a server with nothing cached, and tokens in a block of its prefix cache."""


@dataclass(frozen=True)
class Run:
    """What one contestant did."""

    wall_s: float
    mean_s: float
    """Mean time from the start of the command until an answer was there."""
    asked: int
    """Prompt tokens."""
    cached: int
    output: int


def requests(n: int, goal: str, seed: int) -> list[dict[str, Any]]:
    """Bodies of n shuffled requests, ``n / 8`` of each of eight groups of BBH and GSM8K with few-shot prefixes. All
    answers are short, or for the goal ``latency`` a quarter of them long."""
    long_share = LONG_SHARE if goal == "latency" else 0.0
    found: dict[str, list[str]] = {}
    for name in ("bbh_cot_3shot_15tasks.jsonl.gz", "gsm8k_8shot.jsonl.gz"):
        with gzip.open(PROMPTS / name, "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                found.setdefault(row["group"], []).append(row["prompt"])
    dice = random.Random(seed)
    groups = sorted(found, key=lambda group: len(found[group][0]))[:GROUPS]
    prompts = [prompt for group in groups for prompt in dice.sample(found[group], n // GROUPS)]
    dice.shuffle(prompts)
    return [
        {
            "model": str(find_model().path),  # as the server calls it
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": LONG_TOKENS if dice.random() < long_share else SHORT_TOKENS,
            "temperature": 0,
        }
        for prompt in prompts
    ]


def best_share(bodies: list[dict[str, Any]], block_tokens: int) -> float:
    """Share of the prompt tokens that depth-first order with an unlimited cache of whole blocks need not compute. The
    last token of a prompt is always computed."""
    tokenizer = Tokenizer.load(find_model().path)
    seen: set[int] = set()
    asked = cached = 0
    for each in tokenizer.encode_many([(URL, body) for body in bodies]):
        ids, key = np.asarray(each, np.int32), 0
        asked += len(ids)
        for start in range(0, len(ids) - block_tokens, block_tokens):
            key = hash((key, ids[start : start + block_tokens].tobytes()))
            cached += block_tokens * (key in seen)
            seen.add(key)
    return cached / asked


def all_at_once(url: str, bodies: list[dict[str, Any]]) -> Run:
    """What ``run_batch`` and most scripts do."""
    ended: list[float] = []

    async def main() -> list[dict[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def one(body: dict[str, Any]) -> dict[str, Any]:
                async with session.post(url + URL[3:], json=body) as reply:
                    answer: dict[str, Any] = await reply.json()
                    ended.append(time.perf_counter() - start_s)
                    return answer

            return await asyncio.gather(*(one(body) for body in bodies))

    start_s = time.perf_counter()
    answers = asyncio.run(main())
    return _run(max(ended), sum(ended) / len(ended), answers)


def through_plait(url: str, bodies: list[dict[str, Any]], goal: str) -> Run:
    """``plait run --endpoint``, as a command."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with source.open("w") as file:
            for row, body in enumerate(bodies):
                line = {"custom_id": str(row), "method": "POST", "url": URL, "body": body}
                file.write(json.dumps(line) + "\n")
        command = [sys.executable, "-m", "plait", "run", str(source), "-o", str(output), "--endpoint", url]
        command += ["--tokenizer", str(find_model().path), "--goal", goal, "--quiet", "--stall-timeout", "900"]
        start_s = time.perf_counter()
        subprocess.run(command, check=True)
        wall_s = time.perf_counter() - start_s
        answers = [json.loads(line)["response"]["body"] for line in output.open()]
        live = output.with_name("out.live.jsonl").open()
        ended = [record["t"] for line in live if (record := json.loads(line)["plait"]).get("row") is not None]
    late_s = wall_s - max(ended)  # the engine's clock starts later than the command
    return _run(wall_s, sum(ended) / len(ended) + late_s, answers)


def _run(wall_s: float, mean_s: float, answers: list[dict[str, Any]]) -> Run:
    usage = [answer["usage"] for answer in answers]
    cached = sum(entry["prompt_tokens_details"]["cached_tokens"] for entry in usage)
    asked, output = (sum(entry[key] for entry in usage) for key in ("prompt_tokens", "completion_tokens"))
    return Run(wall_s, mean_s, asked, cached, output)


def compare(kind: str, n: int, repeats: int, goal: str) -> dict[str, float]:
    """Interleaved runs of each; a short first one is discarded, the fastest of the rest counts."""
    bodies = requests(n, goal, seed=1)
    served, block_tokens = KINDS[kind]
    runs: dict[str, list[Run]] = {"all at once": [], "plait": []}
    with served() as fresh:
        for repeat in range(repeats + 1):
            for name, done in runs.items():
                url, asked = fresh(), bodies if repeat else bodies[:WARM_UP]
                run = all_at_once(url, asked) if name == "all at once" else through_plait(url, asked, goal)
                if repeat:
                    done.append(run)
                print(f"{kind} {goal} {name:12} {run}", flush=True)
    base, ours = (min(done, key=lambda run: run.wall_s) for done in runs.values())
    best = best_share(bodies, block_tokens)
    result = {
        "time_ratio": ours.wall_s / base.wall_s,
        "mean_completion_ratio": ours.mean_s / base.mean_s,
        "computed_ratio": (ours.asked - ours.cached) / (base.asked - base.cached),
        "cached_share": ours.cached / ours.asked,
        "cached_share_all_at_once": base.cached / base.asked,
        "cached_share_depth_first_unlimited": best,
        "cached_of_depth_first": ours.cached / ours.asked / best,
    }
    print(json.dumps(result, indent=1))
    return result
