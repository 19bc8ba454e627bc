"""``vllm serve MODEL --scheduler-cls plait.vllm.Scheduler`` on loopback; see test_plugin.py for what is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

MODEL = os.environ.get("PLAIT_VLLM_MODEL", "")
if not MODEL:
    pytest.skip("PLAIT_VLLM_MODEL names no model", allow_module_level=True)
pytest.importorskip("vllm")

LOAD_S = 1000.0
"""With the scheduler's first compilation, on a busy core."""
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3 * LOAD_S)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. One request runs at a time, so that answers come in the order in which requests were taken."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--scheduler-cls", "plait.vllm.Scheduler", "--max-num-seqs", "1"]
    command += ["--max-model-len", "1024", "--enforce-eager", "--num-gpu-blocks-override", "24"]
    command += ["--gpu-memory-utilization", "0.2", "--dtype", "float32"]
    command += ["--enable-prompt-tokens-details", "--served-model-name", "m"]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, process_group=0)
    try:
        wait_up(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
        assert "plait: waiting requests are served by policy blend" in log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(LOAD_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + LOAD_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return


def prompts(seed: int, groups: int, each: int) -> list[list[int]]:
    dice = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [dice.randrange(1000, 40000) for _ in range(n)]

    found = [opening + tokens(8) for opening in (tokens(140) for _ in range(groups)) for _ in range(each)]
    dice.shuffle(found)
    return found


def test_prefix_groups_are_answered_one_by_one_though_clients_send_at_random(server: str) -> None:
    rows = prompts(1, groups=5, each=5)
    ended: list[int] = []
    cached = 0

    async def ask(session: aiohttp.ClientSession, index: int, prompt: list[int], max_tokens: int) -> None:
        nonlocal cached
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        async with session.post(f"{server}/v1/completions", json=body) as response:
            assert response.status == 200
            usage = (await response.json())["usage"]
        ended.append(index)
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def all_of_them() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            first = asyncio.create_task(ask(session, -1, [999] * 10, 200))  # holds the only place meanwhile
            await asyncio.sleep(1.0)
            await asyncio.gather(first, *(ask(session, index, prompt, 1) for index, prompt in enumerate(rows)))

    asyncio.run(all_of_them())
    assert ended[0] == -1 and sorted(ended[1:]) == list(range(len(rows)))
    openings = [tuple(rows[index][:140]) for index in ended[1:]]
    assert sum(a != b for a, b in pairwise(openings)) == 5 - 1, "one group after the other"
    assert cached == 128 * (25 - 5)


def test_plait_run_through_the_server_answers_each_request_once(server: str, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 2}}
        for i, prompt in enumerate(prompts(2, groups=4, each=4))
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "plait", "run", "in.jsonl", "-o", "out.jsonl", "--endpoint", f"{server}/v1"]
    done = subprocess.run(
        [*command, "--model", "m", "--quiet"], cwd=tmp_path, capture_output=True, text=True, timeout=LOAD_S
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [f"r{i}" for i in range(16)]
    assert all(line["response"]["status_code"] == 200 for line in found)
