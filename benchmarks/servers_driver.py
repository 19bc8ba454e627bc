"""What driving a server costs this process: HTTP libraries, the leanest client, and the pool with its journal.

Imported by ``benchmarks/servers.py``. Run as a script it is one contestant in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import yarl

from plait.engine.http import HttpPool, HttpSettings
from plait.events import EngineRequest, Finished
from plait.run.journal import Header, Journal, Record
from plait.run.lines import LineWriter

IN_FLIGHT = 64
DRIVER_RUNS = 10
PROMPT_BYTES = 1500
URL = "/v1/chat/completions"
HEADERS = {"Content-Type": "application/json"}


def on_core(choose: Callable[[set[int]], int]) -> None:
    """Keep this process, or one that is just being started, to one of the cores it may use."""
    os.sched_setaffinity(0, {choose(os.sched_getaffinity(0))})


@contextlib.contextmanager
def instant_server() -> Iterator[str]:
    """Base URL of a fake server that answers every request at once."""
    command = [sys.executable, "-m", "plait.testing_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: on_core(max)) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.kill()


def write_requests(path: Path, n: int) -> None:
    """A batch file of n chat requests of about 1.6 KB."""
    with path.open("wb") as file:
        for row in range(n):
            message = {"role": "user", "content": f"{row} ".ljust(PROMPT_BYTES, "x")}
            body = {"model": "m", "messages": [message], "max_tokens": 8}
            line = {"custom_id": f"request-{row}", "method": "POST", "url": URL, "body": body}
            file.write(msgspec.json.encode(line) + b"\n")


# ---- the libraries


async def with_aiohttp(url: str, body: bytes) -> Callable[[], Awaitable[object]]:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())

    async def one() -> object:
        async with session.post(url, data=body, headers=HEADERS) as reply:
            return await reply.read()

    return one


async def with_httpx(url: str, body: bytes) -> Callable[[], Awaitable[object]]:
    import httpx

    session = httpx.AsyncClient(limits=httpx.Limits(max_connections=IN_FLIGHT))

    async def one() -> object:
        return (await session.post(url, content=body, headers=HEADERS)).content

    return one


async def with_niquests(url: str, body: bytes) -> Callable[[], Awaitable[object]]:
    import niquests  # type: ignore[import-not-found,unused-ignore]

    session = niquests.AsyncSession(pool_maxsize=IN_FLIGHT)

    async def one() -> object:
        return (await session.post(url, data=body, headers=HEADERS)).content

    return one


async def with_pyreqwest(url: str, body: bytes) -> Callable[[], Awaitable[object]]:
    from pyreqwest.client import ClientBuilder  # type: ignore[import-not-found,unused-ignore]

    session = ClientBuilder().build()

    async def one() -> object:
        request = session.post(url).body_bytes(body).header("Content-Type", "application/json").build()
        return await (await request.send()).bytes()

    return one


CLIENTS = {"aiohttp": with_aiohttp, "httpx": with_httpx, "niquests": with_niquests, "pyreqwest": with_pyreqwest}


async def cpu_of(name: str, url: str, n: int) -> float:
    """CPU seconds a request."""
    body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * PROMPT_BYTES)
    one = await CLIENTS[name](url + URL[3:], body)
    await one()
    rows = iter(range(n))

    async def worker() -> None:
        for _ in rows:
            await one()

    start_s = time.process_time()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return (time.process_time() - start_s) / n


def clients(n: int) -> dict[str, float]:
    """Microseconds of CPU a request, least of three, for each installed library."""
    installed = [name for name in CLIENTS if importlib.util.find_spec(name)]
    best: dict[str, float] = dict.fromkeys(installed, float("inf"))
    with instant_server() as url:
        for _ in range(3):
            for name in installed:
                command = [sys.executable, __file__, "client", name, url, str(n)]
                took = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                best[name] = min(best[name], took * 1e6)
    for name, took in sorted(best.items(), key=lambda item: item[1]):
        print(f"{name:12} {took:7.1f} us of CPU a request")
    return best


# ---- the driver's cost


def leanest(path: Path, url: str, out: Path) -> None:
    """What nobody can do without: read lines, send bodies, write answers."""

    async def main() -> None:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=HEADERS,
        )
        target = yarl.URL(url + URL[3:])
        with path.open("rb") as lines, out.open("wb") as answers:

            async def worker() -> None:
                for line in lines:
                    request = msgspec.json.decode(line)
                    body = msgspec.json.encode(request["body"])
                    async with session.post(target, data=body, allow_redirects=False) as reply:
                        answer = msgspec.Raw(await reply.read())
                        output = {"custom_id": request["custom_id"], "status": reply.status, "body": answer}
                        answers.write(msgspec.json.encode(output) + b"\n")

            await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
        await session.close()

    asyncio.run(main())


def pooled(path: Path, url: str, out: Path) -> None:
    """The same through the pool and the journal."""
    n = sum(1 for _ in path.open("rb"))
    Journal.create(out, Header(1, "benchmark", n, {}, {}))
    journal = Journal(out, n)
    writer = LineWriter("benchmark")
    pool = HttpPool(HttpSettings((url,)))
    ids: dict[int, str] = {}
    done = 0
    with path.open("rb") as lines:
        rows = enumerate(lines)
        while done < n:
            batch = []
            while len(ids) < 4 * IN_FLIGHT and (item := next(rows, None)) is not None:
                request = msgspec.json.decode(item[1])
                ids[item[0]] = request["custom_id"]
                batch.append(EngineRequest(item[0], request["url"], request["body"], None, 8))
            if batch:
                pool.submit(batch)
            for event in pool.poll(1.0):
                if isinstance(event, Finished):
                    line = writer.answer(event.row, ids.pop(event.row), {}, event.status_code, event.body)
                    journal.append(line, Record(event.row, True, t=event.t_s, prompt=event.prompt_tokens))
                    done += 1
            journal.tick()
    pool.close()
    journal.close()


RUNNERS = {"leanest": leanest, "pooled": pooled}


def run_once(name: str, path: Path, url: str) -> dict[str, float]:
    """One run in a fresh process: CPU and wall seconds, peak memory."""
    command = [sys.executable, __file__, "run", name, str(path), url]
    result: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def driver(n: int) -> dict[str, float]:
    """Pool + journal against the leanest client, in many short runs: others use the machine too."""
    with tempfile.TemporaryDirectory() as folder, instant_server() as url:
        path = Path(folder) / "requests.jsonl"
        write_requests(path, n)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in RUNNERS}
        for _ in range(DRIVER_RUNS):
            for name in RUNNERS:
                runs[name].append(run_once(name, path, url))
    pairs = zip(runs["pooled"], runs["leanest"], strict=True)
    cpu = {name: min(run["cpu_s"] for run in found) / n for name, found in runs.items()}
    wall = min(run["wall_s"] for run in runs["pooled"]) / n
    result = {f"{name}_us": cpu[name] * 1e6 for name in cpu}
    result |= {
        "ratio": cpu["pooled"] / cpu["leanest"],
        "ratio_median_of_pairs": statistics.median(ours["cpu_s"] / lean["cpu_s"] for ours, lean in pairs),
        "requests_per_cpu_s": 1 / cpu["pooled"],
        "requests_per_s": 1 / wall,
    }
    print(json.dumps(result, indent=1))
    return result


def memory(n: int) -> dict[str, float]:
    """Peak memory of a small and a large run."""
    result = {}
    with tempfile.TemporaryDirectory() as folder, instant_server() as url:
        for rows in (10_000, n):
            path = Path(folder) / "requests.jsonl"
            write_requests(path, rows)
            result[f"peak_mb_{rows}"] = run_once("pooled", path, url)["peak_mb"]
    print(json.dumps(result, indent=1))
    return result


def main() -> None:
    """``client NAME URL N``: CPU seconds a request; ``run NAME FILE URL``: CPU, time and memory of a whole run."""
    on_core(min)
    kind, name, *rest = sys.argv[1:]
    if kind == "client":
        url, n = rest
        print(asyncio.run(cpu_of(name, url, int(n))))
        return
    path, url = Path(rest[0]), rest[1]
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    RUNNERS[name](path, url, path.with_suffix(f".{name}"))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
    print(json.dumps(times | {"peak_mb": peak_mb}))


if __name__ == "__main__":
    main()
