"""HTTP/2 to https servers that offer it: all requests over few connections. Needs ``pip install 'plait[http2]'``.

Used only where it is asked for: behind gateways that allow few connections.
"""

from __future__ import annotations

import importlib.util
import ssl

from plait.engine.transport import CutOffError, Reply, TransportError, UnreachedError, json_headers
from plait.errors import UsageError

NEEDED = ("httpx", "h2")


def check_installed() -> None:
    """Raise UsageError where the packages are missing."""
    if not all(importlib.util.find_spec(name) for name in NEEDED):
        raise UsageError("--http2 needs two more packages; install them with: pip install 'plait[http2]'")


class Http2:
    """See ``Transport``. A server that does not offer HTTP/2 is spoken to in HTTP/1.1. Make it inside the loop."""

    shares_connections = True

    def __init__(self, connect_timeout_s: float, api_key: str | None) -> None:
        import httpx

        self._httpx, self._connect_timeout_s = httpx, connect_timeout_s
        self._client = httpx.AsyncClient(
            http2=True,
            verify=ssl.create_default_context(),
            headers=json_headers(api_key),
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
        )

    async def post(self, url: str, body: bytes) -> Reply:
        """See ``Transport``."""
        try:
            reply = await self._client.post(url, content=body)
        except self._httpx.HTTPError as error:
            raise self._translated(error) from error
        return Reply(reply.status_code, reply.headers, reply.content)

    async def get(self, url: str, timeout_s: float) -> Reply:
        """See ``Transport``."""
        try:
            reply = await self._client.get(url, timeout=self._httpx.Timeout(timeout_s, connect=self._connect_timeout_s))
        except self._httpx.HTTPError as error:
            raise self._translated(error) from error
        return Reply(reply.status_code, reply.headers, reply.content)

    async def close(self) -> None:
        """See ``Transport``."""
        await self._client.aclose()

    def _translated(self, error: Exception) -> TransportError:
        text = str(error) or type(error).__name__
        if isinstance(error, self._httpx.ConnectError | self._httpx.TimeoutException):
            return UnreachedError(text)
        if isinstance(error, self._httpx.NetworkError | self._httpx.RemoteProtocolError):
            return CutOffError(text)
        return TransportError(f"{type(error).__name__}: {text}")
