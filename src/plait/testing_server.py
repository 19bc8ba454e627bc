"""A loopback HTTP server that misbehaves on command: for tests of clients of OpenAI-compatible servers.

``LoopbackServer(behaviour)`` calls ``behaviour(call)`` for every request and sends the ``Reply`` it returns: late, cut
in the middle, never, or as a proxy's error page. ``FAULTS`` names the usual ones; ``echo`` is an honest chat server;
``plait.testing_model`` has slots, a prefix cache and metrics. ``python -m plait.testing_server`` answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import email.utils
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

HELD_POLL_S = 0.01
HTML_PAGE = b"<html><head><title>504 Gateway Time-out</title></head><body>nginx</body></html>"


@dataclass
class Call:
    """One request as the server saw it."""

    index: int
    """Arrival number at this server, from 0."""
    t_s: float
    """Arrival, ``time.monotonic()``."""
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    """The body, byte for byte."""

    @cached_property
    def body(self) -> dict[str, Any]:
        """The body as an object; empty where there was none."""
        loaded: dict[str, Any] = json.loads(self.raw) if self.raw else {}
        return loaded

    @property
    def prompt(self) -> str:
        """Text of the last message, or of ``prompt``/``input``."""
        messages = self.body.get("messages")
        return str(messages[-1]["content"] if messages else self.body.get("prompt", self.body.get("input", "")))


@dataclass(frozen=True)
class Reply:
    """What to send back, and how badly."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"
    delay_s: float = 0.0
    held: threading.Event | None = None
    """The delay begins when this is set: for answers that must not come before something else has happened."""
    cut_at: int | None = None
    """Send the head and this many bytes of the body, then close the connection."""
    silent: bool = False
    """Send nothing and keep the connection open."""
    kill: bool = False
    """The server process dies of this request: it stops listening and drops every connection."""


Behaviour = Callable[[Call], Reply]


def answer(call: Call, content: str, cached_tokens: int = 0, output_tokens: int = 1, delay_s: float = 0.0) -> Reply:
    """A complete chat answer with usage; prompt tokens are counted as four bytes each."""
    prompt_tokens = max(len(call.raw) // 4, 1)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    model = call.body.get("model", "echo")
    body = {"id": f"chatcmpl-{call.index}", "object": "chat.completion", "model": model, "choices": [choice]}
    return Reply(body=json.dumps(body | {"usage": usage}).encode(), delay_s=delay_s)


def error(status: int, message: str, code: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    """An error object as OpenAI-compatible servers send it."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return Reply(status=status, body=json.dumps(body).encode(), headers=headers)


def echo(call: Call) -> Reply:
    """Answers every POST with its own prompt, and GET /v1/models with one model."""
    if call.method == "GET":
        return models() if call.path.endswith("/models") else error(404, f"no route {call.path}")
    return answer(call, call.prompt)


def models(name: str = "echo", max_model_len: int = 8192) -> Reply:
    """The answer to GET /v1/models."""
    body = {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": max_model_len}]}
    return Reply(body=json.dumps(body).encode())


def too_many_requests(retry_after: str | None) -> Reply:
    """429, with a Retry-After header where one is given."""
    return error(
        429, "rate limit reached", "rate_limit_exceeded", (("Retry-After", retry_after),) if retry_after else ()
    )


def http_date(in_s: float) -> str:
    """An HTTP date ``in_s`` seconds from now (rounded up to a whole second, as the format has no fractions)."""
    return email.utils.formatdate(int(time.time() + in_s + 0.999), usegmt=True)


WHOLE = b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"cut"},"finish_reason":"stop"}]}'

FAULTS: dict[str, Callable[[], Reply]] = {
    "429-seconds": lambda: too_many_requests("1"),
    "429-date": lambda: too_many_requests(http_date(1.0)),
    "429-bare": lambda: too_many_requests(None),
    "429-hour": lambda: too_many_requests("3600"),
    "500": lambda: error(500, "internal error"),
    "503": lambda: error(503, "overloaded"),
    "504-html": lambda: Reply(504, HTML_PAGE, content_type="text/html"),
    "502-empty": lambda: Reply(502, b"", content_type="text/plain"),
    "200-html": lambda: Reply(200, HTML_PAGE, content_type="text/html"),
    "truncated-json": lambda: Reply(200, WHOLE[: len(WHOLE) // 2]),
    "disconnect": lambda: Reply(200, WHOLE, cut_at=len(WHOLE) // 2),
    "reset": lambda: Reply(200, b"", cut_at=-1),
    "stall": lambda: Reply(silent=True),
    "context-length": lambda: error(400, "maximum context length is 8192 tokens", "context_length_exceeded"),
    "unknown-model": lambda: error(404, "The model `nope` does not exist.", "model_not_found"),
}
"""Fault by name. The last two are the request's own fault: a client must record them and not ask again."""

PERMANENT = frozenset({"context-length", "unknown-model"})


class LoopbackServer:
    """HTTP/1.1 with keep-alive on 127.0.0.1, in a thread of its own; can die and come back on the same port."""

    def __init__(self, behaviour: Behaviour = echo, port: int = 0, keep_calls: bool = True) -> None:
        self.behaviour = behaviour
        self.calls: list[Call] = []
        """POST requests in order of arrival (empty with ``keep_calls=False``)."""
        self.in_flight = 0
        self.max_in_flight = 0
        self.accepted = 0
        """Connections accepted so far."""
        self.keep_calls = keep_calls
        self.count = 0
        self.connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="loopback-server")
        self._thread.start()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            self.port: int = probe.getsockname()[1]
        self.revive()

    @property
    def url(self) -> str:
        """Base URL, ending in /v1."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def listening(self) -> bool:
        """False between ``kill`` and ``revive``."""
        return self._server is not None

    def revive(self) -> None:
        """Listen (again). No-op while it listens and after ``close``."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def kill(self) -> None:
        """Stop listening and drop every connection, as a dying process does."""
        asyncio.run_coroutine_threadsafe(self._die(), self._loop).result()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await self._loop.create_server(
                lambda: _Connection(self), "127.0.0.1", self.port, reuse_address=True, backlog=4096
            )

    async def _die(self) -> None:
        self.die()
        await asyncio.sleep(0.005)  # lets the connections end

    def die(self) -> None:
        """``kill`` from inside the server's own loop."""
        if self._server is not None:
            for listener in self._server.sockets:
                self._loop.remove_reader(listener.fileno())
            self._loop.call_soon(
                self._server.close
            )  # after the connections that were just accepted: asyncio drops those
            self._server = None
        for connection in list(self.connections):
            connection.abort()

    def close(self) -> None:
        """Kill the server and end its thread. Idempotent."""
        if self._thread.is_alive():
            self.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LoopbackServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(eq=False)
class _Connection(asyncio.Protocol):
    """Parses requests with Content-Length bodies and writes replies in order."""

    server: LoopbackServer
    buffer: bytearray = field(default_factory=bytearray)
    transport: asyncio.Transport | None = None
    head: tuple[int, str, str, dict[str, str], int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.add(self)
        self.server.accepted += 1
        if not self.server.listening:  # it was just being accepted when the server died
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self.transport = None

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        for call in self._calls():
            server = self.server
            if call.method == "POST":
                server.in_flight += 1
                server.max_in_flight = max(server.max_in_flight, server.in_flight)
                if server.keep_calls:
                    server.calls.append(call)
            self._reply(call, server.behaviour(call))

    def _reply(self, call: Call, reply: Reply) -> None:
        """Send a reply once it is due."""
        if reply.held is not None and not reply.held.is_set():
            asyncio.get_running_loop().call_later(HELD_POLL_S, self._reply, call, reply)
        elif reply.delay_s > 0:
            asyncio.get_running_loop().call_later(reply.delay_s, self._send, call, reply)
        else:
            self._send(call, reply)

    def _calls(self) -> Iterator[Call]:
        """Complete requests at the front of the buffer."""
        while True:
            if self.head is None:
                end = self.buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                lines = self.buffer[:end].decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
                self.head = (end + 4, method, path, headers, int(headers.get("content-length", 0)))
            start, method, path, headers, length = self.head
            if len(self.buffer) < start + length:
                return
            raw = bytes(self.buffer[start : start + length])
            del self.buffer[: start + length]
            self.head = None
            index = self.server.count
            self.server.count += method == "POST"
            yield Call(index, time.monotonic(), method, path, headers, raw)

    def _send(self, call: Call, reply: Reply) -> None:
        if call.method == "POST" and not reply.silent:
            self.server.in_flight -= 1
        if reply.kill:
            self.server.die()
        if self.transport is None or reply.silent or reply.kill:
            return
        if reply.cut_at is not None and reply.cut_at < 0:
            self.transport.abort()
            return
        extra = "".join(f"{key}: {value}\r\n" for key, value in reply.headers)
        head = (
            f"HTTP/1.1 {reply.status} X\r\nContent-Type: {reply.content_type}\r\n"
            f"Content-Length: {len(reply.body)}\r\n{extra}\r\n"
        )
        self.transport.write(head.encode("latin-1") + reply.body[: reply.cut_at])
        if reply.cut_at is not None:
            self.transport.close()


def main() -> None:
    """Serve `an instant answer on a port until killed; prints the port once it listens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    fixed = Reply(body=answer(Call(0, 0.0, "POST", "/", {}, b""), "ok").body)
    with LoopbackServer(lambda call: fixed if call.method == "POST" else models(), options.port, False) as server:
        print(server.port, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
