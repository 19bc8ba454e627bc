"""One server of a pool as seen over HTTP: discovery, health probe, load, one exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from plait.engine.answers import Fault, Outcome, excerpt, read_reply
from plait.engine.http_flight import Flight
from plait.engine.http_settings import endpoint_name, server_root, target
from plait.engine.server_metrics import (
    Load,
    ServerInfo,
    parse_metrics,
    read_load,
    with_metrics,
    with_models,
    with_props,
    with_server_info,
)
from plait.engine.transport import Transport, TransportError
from plait.engine.window import Window

PROBE_TIMEOUT_S = 15.0
"""Long: a server whose CPUs are busy answers late, and is alive."""


@dataclass(eq=False)
class Server:
    """State of one server. ``index`` is its place in the pool."""

    index: int
    endpoint: str
    transport: Transport
    secret: bytes = b""
    info: ServerInfo = field(default_factory=ServerInfo)
    window: Window = field(default_factory=Window)
    up: bool = True
    failures: int = 0
    """Faults since the last answer."""
    progress_s: float = 0.0
    """When anything last moved here."""
    tokens: float = 0.0
    """The server's own token counter at the last reading."""
    paused_until_s: float = 0.0
    pause: Fault | None = None
    """The refusal that asked for the pause."""
    dropped: set[Flight] = field(default_factory=set)
    """Flights cut off since the present wave of disconnects began."""
    wave: frozenset[Flight] = frozenset()
    """All flights that were here when it began; empty when there is none."""
    last_error: str = ""
    last_status: int = 0
    """Of the last probe."""
    watched: bool = False
    """Its metrics are being followed."""
    retired: bool = False
    """It is not to be used any more."""

    def __post_init__(self) -> None:
        self.name = endpoint_name(self.endpoint)
        self.root = server_root(self.endpoint)
        self.targets: dict[str, str] = {}

    async def exchange(self, flight: Flight) -> Outcome:
        """Send one request and judge what comes back; a transport error is a Fault, never raised."""
        url = self.targets.get(flight.url)
        if url is None:
            url = self.targets[flight.url] = target(self.endpoint, flight.url)
        try:
            status, headers, body = await self.transport.post(url, flight.body)
        except TransportError as error:
            return Fault(error.code, f"{self.name}: {error}")
        if self.secret and self.secret in body:
            body = body.replace(self.secret, b"***")
        return read_reply(status, headers.get("Content-Type"), headers, body)

    async def alive(self) -> bool:
        """True if the server answers at all; ``last_error`` says why not."""
        try:
            status, _, body = await self.transport.get(f"{self.endpoint.rstrip('/')}/models", PROBE_TIMEOUT_S)
        except TransportError as error:
            self.last_error = str(error)
            return False
        self.last_status = status
        if status >= 500:
            self.last_error = f"status {status}: {excerpt(body)}"
        return status < 500

    async def discover(self) -> bool:
        """Read what the server says about itself; False if it does not answer. Pages a server lacks are no fault."""
        if not await self.alive():
            return False
        info = with_models(ServerInfo(), await self._page(f"{self.endpoint.rstrip('/')}/models"))
        info = with_metrics(info, parse_metrics(await self._text(f"{self.root}/metrics")))
        if info.kind in ("", "llama.cpp"):
            info = with_props(info, await self._page(f"{self.root}/props"))
        if info.kind in ("sglang", "tgi"):
            info = with_server_info(info, await self._page(f"{self.root}/{SERVER_INFO[info.kind]}"))
        self.info = info
        return True

    async def load(self) -> Load | None:
        """The server's present load, if it has metrics we know."""
        return read_load(parse_metrics(await self._text(f"{self.root}/metrics")))

    async def _text(self, url: str) -> str:
        try:
            status, _, body = await self.transport.get(url, PROBE_TIMEOUT_S)
        except TransportError:
            return ""
        return body.decode("utf-8", "replace") if status == 200 else ""

    async def _page(self, url: str) -> Mapping[str, Any]:
        try:
            page = msgspec.json.decode((await self._text(url)).encode())
        except msgspec.DecodeError:
            return {}
        return page if isinstance(page, dict) else {}


SERVER_INFO = {"sglang": "get_server_info", "tgi": "info"}
