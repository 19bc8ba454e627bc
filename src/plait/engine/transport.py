"""How bytes reach servers: HTTP/1.1 over keep-alive connections, and three ways in which that can fail."""

from __future__ import annotations

import io
import ssl
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import aiohttp
from yarl import URL

KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection: a request must not meet a closing one."""
LARGE_BODY_BYTES = 1 << 20


class Reply(NamedTuple):
    """A whole reply."""

    status: int
    headers: Mapping[str, str]
    """Names in any case."""
    body: bytes


class TransportError(Exception):
    """No whole reply came; the message says why."""

    code = "transport_error"


class UnreachedError(TransportError):
    """No connection could be made: the server has not seen the request."""

    code = "connection_failed"


class CutOffError(TransportError):
    """The connection broke before the reply was complete."""

    code = "disconnected"


class Transport(Protocol):
    """All methods raise TransportError and nothing else; redirects are not followed."""

    shares_connections: bool
    """Requests in flight at a server share a connection: that they are all cut off together says nothing of it."""

    async def post(self, url: str, body: bytes) -> Reply:
        """Send a JSON body and wait for the reply as long as it takes."""

    async def get(self, url: str, timeout_s: float) -> Reply:
        """Fetch a page."""

    async def close(self) -> None:
        """Cut every connection off."""


def json_headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


class Http1:
    """HTTP/1.1 with as many kept connections as there are requests in flight. Make it inside the loop."""

    shares_connections = False

    def __init__(self, connect_timeout_s: float, api_key: str | None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=json_headers(api_key),
        )
        self._targets: dict[str, tuple[URL, ssl.SSLContext | bool]] = {}
        self._tls: ssl.SSLContext | None = None

    async def post(self, url: str, body: bytes) -> Reply:
        """See ``Transport``."""
        parsed, tls = self._targets.get(url) or self._target(url)
        data = body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)
        try:
            async with self._session.post(parsed, data=data, allow_redirects=False, ssl=tls) as reply:
                return Reply(reply.status, reply.headers, await reply.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(error) from error

    async def get(self, url: str, timeout_s: float) -> Reply:
        """See ``Transport``."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        parsed, tls = self._target(url)
        try:
            async with self._session.get(parsed, timeout=timeout, allow_redirects=False, ssl=tls) as reply:
                return Reply(reply.status, reply.headers, await reply.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(error) from error

    def _target(self, url: str) -> tuple[URL, ssl.SSLContext | bool]:
        """A URL, parsed once, and what its certificate is checked with: reading the system's takes a while."""
        parsed = URL(url)
        if parsed.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        found = self._targets[url] = (parsed, self._tls or True)
        return found

    async def close(self) -> None:
        """See ``Transport``."""
        await self._session.close()


def _translated(error: Exception) -> TransportError:
    text = str(error) or type(error).__name__
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ServerTimeoutError() | TimeoutError():
            return UnreachedError(text)
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | aiohttp.ClientPayloadError():
            return CutOffError(text)
        case _:
            return TransportError(f"{type(error).__name__}: {text}")
