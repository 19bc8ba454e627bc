"""HTTP/2 against HTTP/1.1, both over TLS to the same Hypercorn server: CPU and wall time of the client a request.

Imported by ``benchmarks/servers.py``. Needs httpx, h2, hypercorn and trustme. Run as a script it is the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from plait.engine.http2 import Http2
from plait.engine.transport import Http1, Transport

BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 1500)
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
IN_FLIGHT = 64


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers at once."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})


@contextlib.contextmanager
def server() -> Iterator[str]:
    """URL of a server whose certificate this process trusts."""
    import trustme

    with tempfile.TemporaryDirectory() as folder:
        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        authority.cert_pem.write_to_path(f"{folder}/ca.pem")
        issued.private_key_pem.write_to_path(f"{folder}/key.pem")
        issued.cert_chain_pems[0].write_to_path(f"{folder}/cert.pem")
        os.environ["SSL_CERT_FILE"] = f"{folder}/ca.pem"
        with subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield f"https://localhost:{process.stdout.readline().strip()}/v1/chat/completions"
            finally:
                process.kill()


async def cost(transport: Transport, url: str, n: int) -> tuple[float, float]:
    """Microseconds of CPU and of wall time a request."""
    await transport.post(url, BODY)
    rows = iter(range(n))

    async def worker() -> None:
        for _ in rows:
            await transport.post(url, BODY)

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    found = (time.process_time() - cpu_s) / n * 1e6, (time.perf_counter() - wall_s) / n * 1e6
    await transport.close()
    return found


def compare(n: int) -> dict[str, float]:
    """Least of three alternating runs."""

    async def one(kind: type[Http1] | type[Http2], url: str) -> tuple[float, float]:
        return await cost(kind(10.0, None), url, n)

    best: dict[str, float] = {}
    with server() as url:
        for _ in range(3):
            for kind in (Http1, Http2):
                cpu_us, wall_us = asyncio.run(one(kind, url))
                for name, value in ((f"{kind.__name__}_cpu_us", cpu_us), (f"{kind.__name__}_wall_us", wall_us)):
                    best[name] = min(best.get(name, value), value)
    best["cpu_ratio"] = best["Http2_cpu_us"] / best["Http1_cpu_us"]
    for name, value in best.items():
        print(f"{name:14} {value:8.1f}")
    return best


def main() -> None:
    """Serve until killed; prints the port first."""
    import hypercorn.asyncio
    import hypercorn.config

    folder = Path(sys.argv[1])
    config = hypercorn.config.Config()
    config.bind, config.keyfile, config.certfile = ["localhost:0"], str(folder / "key.pem"), str(folder / "cert.pem")
    config.loglevel = "CRITICAL"
    config.keep_alive_max_requests = sys.maxsize  # by default it hangs up after 1000, on every stream at once
    sockets = config.create_sockets()
    sockets.secure_sockets[0].listen()  # who comes before the server is there waits
    config.create_sockets = lambda: sockets  # type: ignore[method-assign]
    print(sockets.secure_sockets[0].getsockname()[1], flush=True)
    asyncio.run(hypercorn.asyncio.serve(cast(Any, app), config))


if __name__ == "__main__":
    main()
