"""HTTP/2 against a real HTTP/2 server on loopback, with a certificate of our own."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.engine import http
from plait.engine.health import Health
from plait.engine.http import HttpPool
from plait.engine.servers import Server
from plait.engine.transport import CutOffError, Reply
from plait.errors import EngineError
from plait.events import Finished
from plait.testing_server import Call, answer, models
from tests.engine_http.pools import chat, collect, content, endings, settings

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("httpx", "h2", "hypercorn", "trustme")),
    reason="httpx, h2, hypercorn or trustme is not installed",
)

Seen = list[tuple[str, str]]


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A certificate authority that this process trusts."""
    import trustme

    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


@pytest.fixture
def served(authority: Any, tmp_path: Path) -> Iterator[tuple[str, Seen]]:
    """Base URL of an https server that offers HTTP/2, and (HTTP version, method) of each request it got."""
    import hypercorn.asyncio
    import hypercorn.config

    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    config = hypercorn.config.Config()
    config.bind, config.keyfile, config.certfile = (
        ["localhost:0"],
        str(tmp_path / "key.pem"),
        str(tmp_path / "cert.pem"),
    )
    config.loglevel = "CRITICAL"
    seen: Seen = []
    port: list[int] = []
    sockets = config.create_sockets()
    sockets.secure_sockets[0].listen()  # who comes before the server is there waits
    config.create_sockets = lambda: sockets  # type: ignore[method-assign]
    port.append(sockets.secure_sockets[0].getsockname()[1])
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        await hypercorn.asyncio.serve(application(seen), config, shutdown_trigger=done.wait)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield f"https://localhost:{port[0]}/v1", seen
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def application(seen: Seen) -> Callable[..., Any]:
    """An ASGI application that answers as ``plait.testing_server.echo`` does; a prompt "cut" breaks the stream off."""

    async def app(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[dict[str, Any]], Any]) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen.append((scope["http_version"], scope["method"]))
        call = Call(len(seen), 0.0, scope["method"], scope["path"], {}, body)
        page = models() if scope["method"] == "GET" and scope["path"].endswith("/models") else None
        reply = page or answer(call, call.prompt if scope["method"] == "POST" else "")
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if body and b'"cut"' in body and sum(method == "POST" for _, method in seen) == 1:
            raise RuntimeError("the stream breaks off")
        await send({"type": "http.response.body", "body": reply.body})

    return app


def test_requests_share_a_connection_in_http_2_and_are_answered(served: tuple[str, Seen]) -> None:
    url, seen = served
    pool = HttpPool(settings(url, http2=True))
    pool.submit([chat(row) for row in range(40)])
    ended = endings(collect(pool, 40))
    pool.close()
    assert {row: content(event) for row, event in ended.items()} == {row: f"prompt of row {row}" for row in range(40)}
    assert {version for version, _ in seen} == {"2"}


def test_a_stream_that_breaks_off_is_retried(served: tuple[str, Seen]) -> None:
    url, _ = served
    pool = HttpPool(settings(url, http2=True))
    pool.submit([chat(0, "cut")])
    ended = endings(collect(pool, 1))
    pool.close()
    assert isinstance(ended[0], Finished) and content(ended[0]) == "cut"


class Cutting:
    """A transport that cuts off the first eight requests, all at the same time."""

    shares_connections = True

    def __init__(self, connect_timeout_s: float, api_key: str | None) -> None:
        self.together = asyncio.Barrier(8)
        self.sent = 0

    async def post(self, url: str, body: bytes) -> Reply:
        self.sent += 1
        if self.sent <= 8:
            await self.together.wait()
            raise CutOffError("the connection ended")
        return Reply(200, {}, b"{}")

    async def get(self, url: str, timeout_s: float) -> Reply:
        return Reply(200, {}, b"{}")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("shared", [True, False])
def test_a_connection_that_ends_with_all_its_requests_is_not_a_server_that_died(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ejected: list[str] = []
    eject = Health.eject

    def note(self: Health, server: Server) -> None:
        ejected.append(server.name)
        eject(self, server)

    monkeypatch.setattr(Cutting, "shares_connections", shared)
    monkeypatch.setattr(http, "Http1", Cutting)
    monkeypatch.setattr(Health, "eject", note)
    pool = HttpPool(settings("http://a/v1"))
    pool.submit([chat(row) for row in range(8)])
    ended = endings(collect(pool, 8))
    pool.close()
    assert all(isinstance(event, Finished) for event in ended.values()) and len(ended) == 8
    assert bool(ejected) != shared


def test_without_being_asked_for_https_is_spoken_in_http_1(served: tuple[str, Seen]) -> None:
    url, seen = served
    pool = HttpPool(settings(url))
    pool.submit([chat(0)])
    collect(pool, 1)
    pool.close()
    assert {version for version, _ in seen} == {"1.1"}


@pytest.mark.parametrize("http2", [False, True])
def test_a_certificate_that_nobody_vouches_for_is_refused(
    served: tuple[str, Seen], http2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(EngineError, match=r"no server answers.*(certificate|CERTIFICATE)"):
        HttpPool(settings(served[0], http2=http2))
