"""A pool of OpenAI-compatible servers behind the synchronous engine protocol: one event loop in one thread."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections import deque
from collections.abc import Sequence

import aiohttp
import msgspec

from plait.engine.dispatch import Dispatcher
from plait.engine.http_settings import HttpSettings
from plait.engine.pool import flight_of
from plait.engine.servers import Server
from plait.errors import EngineError
from plait.events import Capacity, EngineRequest, Event

__all__ = ["HttpPool", "HttpSettings"]

KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection: a request must not meet a closing one."""
UNKNOWN_SEQS = 512
"""Requests per server the driver may hand over where nothing is known about it."""
UNKNOWN_KV_TOKENS = 1 << 40
SPARE_FILES = 128


class HttpPool:
    """Satisfies ``plait.events.Engine``. Bodies go out as they are but for ``settings.model``, to any POST URL.

    Raises UsageError for settings that cannot work, EngineError if no server answers.
    """

    def __init__(self, settings: HttpSettings) -> None:
        settings.check()
        self.settings = settings
        self._key = settings.api_key()
        self._start_s = time.perf_counter()
        self._events: deque[Event] = deque()
        self._ready = threading.Event()
        self._signalled = False
        self._error: BaseException | None = None
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="plait-http", daemon=True)
        self._thread.start()
        try:
            self._dispatcher = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self._end_thread()
            raise
        self._capacity = self._find_capacity()

    @property
    def capacity(self) -> Capacity:
        """Of the whole pool. Servers that do not tell their KV size are limited by count instead."""
        return self._capacity

    @property
    def models(self) -> frozenset[str]:
        """Models the servers offer; empty where they do not tell."""
        return frozenset(model for server in self._dispatcher.servers for model in server.info.models)

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """See ``Engine``. The prefill budget is the servers' own business."""
        self._raise_if_gone()
        ratio = self._dispatcher.bytes_per_token
        flights = [flight_of(request, self._encode(request), ratio) for request in requests]
        self._loop.call_soon_threadsafe(self._dispatcher.submit, flights)

    def cancel(self, rows: Sequence[int]) -> None:
        """See ``Engine``."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._dispatcher.cancel, list(rows))

    def poll(self, timeout_s: float) -> list[Event]:
        """See ``Engine``."""
        if not self._events:
            self._ready.wait(max(timeout_s, 0.0))
        self._ready.clear()  # before reading: what comes later sets it again
        events = [self._events.popleft() for _ in range(len(self._events))]
        if not events:
            self._raise_if_gone()
        return events

    def now_s(self) -> float:
        """Seconds since the pool was opened."""
        return time.perf_counter() - self._start_s

    def close(self) -> None:
        """Cut off what is in flight and end the thread."""
        if self._closed:
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._end_thread()

    # ---- in the loop's thread

    async def _open(self) -> Dispatcher:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        secret = self._key.encode() if self._key else b""
        servers = [Server(i, endpoint, session, secret) for i, endpoint in enumerate(self.settings.endpoints)]
        found = await asyncio.gather(*(server.discover() for server in servers))
        for server, up in zip(servers, found, strict=True):
            server.up = up
            server.window.ceiling = _open_files() // len(servers)
        locked = [server.name for server in servers if server.last_status in (401, 403)]
        if locked or not any(found):
            await session.close()
        if locked:
            got = f"the key in {self.settings.api_key_env}" if self._key else "a request without a key"
            raise EngineError(f"{', '.join(locked)} refused {got}; name the right variable with --api-key-env")
        if not any(found):
            faults = "; ".join(f"{server.name}: {server.last_error}" for server in servers)
            raise EngineError(
                f"no server answers ({faults}). Start it or check --endpoint, then run the same command again."
            )
        self._session = session
        dispatcher = Dispatcher(self.settings, servers, self.now_s, self._emit, self._stop)
        dispatcher.run()
        return dispatcher

    async def _shut(self) -> None:
        await self._dispatcher.close()
        await self._session.close()

    def _emit(self, event: Event) -> None:
        """Hand an event over; the driver's thread is woken once for all events of one turn of the loop."""
        self._events.append(event)
        if not self._signalled:
            self._signalled = True
            self._loop.call_soon(self._signal)

    def _signal(self) -> None:
        self._signalled = False
        self._ready.set()

    def _stop(self, error: BaseException) -> None:
        """The run cannot go on: the next ``poll`` that has no events left raises ``error``."""
        if self._error is None:
            self._error = error
        self._ready.set()

    # ---- small things

    def _encode(self, request: EngineRequest) -> bytes:
        model = self.settings.model
        return msgspec.json.encode(request.body if model is None else {**request.body, "model": model})

    def _find_capacity(self) -> Capacity:
        infos = [server.info for server in self._dispatcher.servers if server.up]
        settings = self.settings
        kv_tokens = settings.kv_tokens or (sum(i.kv_tokens for i in infos) if all(i.kv_tokens for i in infos) else 0)
        seqs = sum(2 * info.max_num_seqs or UNKNOWN_SEQS for info in infos)
        if settings.max_concurrency:
            seqs = min(seqs, 2 * settings.max_concurrency)
        contexts = [info.max_context_tokens for info in infos if info.max_context_tokens]
        return Capacity(
            kv_tokens=kv_tokens or UNKNOWN_KV_TOKENS,
            block_tokens=settings.block_tokens or max(max(info.block_tokens for info in infos), 1),
            max_num_seqs=seqs,
            max_context_tokens=settings.max_context_tokens or min(contexts, default=0),
            prefix_lookup_at_submit=not all(info.shares_within_a_batch for info in infos),
        )

    def _raise_if_gone(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineError("the server pool is closed")

    def _end_thread(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _open_files() -> int:
    """Sockets this process may open; raises its soft limit to the hard one, as thousands in flight need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if 0 < soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(min(soft, 1 << 16) - SPARE_FILES, 1)
