"""Calls a web application in this process: a request without a socket, a server or a port (ASGI 3, HTTP)."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[Any]]


@dataclass(slots=True)
class Reply:
    """What the application sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""


async def call(app: App, method: str, path: str, body: bytes = b"", hang_up: asyncio.Event | None = None) -> Reply:
    """The application's reply to a JSON request; ``hang_up``, once set, is the client's leaving before it has it. An
    error that the application does not handle is a reply of status 500, as behind any server."""
    reply = Reply()
    sent, gone = False, hang_up or asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await gone.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message.get("headers", ())}
        elif message["type"] == "http.response.body":
            reply.body += message.get("body", b"")

    work = asyncio.ensure_future(app(_scope(method, path, len(body)), receive, send))
    await asyncio.wait({work})
    error = work.exception()
    if error is not None:
        traceback.print_exception(error)
        if not reply.status:
            message = {"error": {"message": f"{type(error).__name__}: {error}", "type": "InternalServerError"}}
            return Reply(500, {"content-type": "application/json"}, msgspec.json.encode(message))
    return reply


def _scope(method: str, path: str, length: int) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"plait"),
            (b"content-type", b"application/json"),
            (b"content-length", str(length).encode()),
        ],
        "client": ("plait", 0),
        "server": ("plait", 80),
    }
