"""A pool of OpenAI-compatible servers behind the synchronous engine protocol: one event loop in one thread."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from plait.engine.dispatch import Dispatcher
from plait.engine.http2 import Http2, check_installed
from plait.engine.http_flight import flight_of
from plait.engine.http_settings import HttpSettings, endpoint_name
from plait.engine.servers import Server
from plait.engine.transport import Http1, Transport
from plait.errors import EngineError, UsageError
from plait.events import Capacity, EngineRequest, Event

__all__ = ["HttpPool", "HttpSettings"]

UNKNOWN_SEQS = 256
"""Requests that a server of which nothing is known is assumed to run at once."""
AHEAD, POOL_AHEAD, SLOT_AHEAD = 2, 4, 16
"""Requests handed to the pool for each one that can run: at one server, at each of several, and for each slot of
llama.cpp. Several must have prefix groups of their own before they have to cut those of others, and slots run groups
side by side; more would leave less of the order open to what is learned meanwhile."""
UNKNOWN_KV_TOKENS = 1 << 40
SPARE_FILES = 128
WAKE_S = 0.003
"""The driver's thread gets the events of this long together: two threads that take turns for each answer cost more."""


class HttpPool:
    """Satisfies ``plait.events.Engine``. Bodies go out as they are but for ``settings.model``, to any POST URL.

    Raises UsageError for settings that cannot work, EngineError if no server answers.
    """

    def __init__(self, settings: HttpSettings) -> None:
        settings.check()
        if settings.http2:
            check_installed()
        self.settings = settings
        listed = settings.endpoint_list()
        self._endpoints = tuple(dict.fromkeys([*settings.endpoints, *(listed.read() if listed else ())]))
        if not self._endpoints:
            raise UsageError(f"--endpoints-file {settings.endpoints_file}: no endpoint in it")
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
        self._transports: list[Transport] = []
        opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            self._dispatcher = opening.result()
        except BaseException:  # an interrupt too, while a server lets us wait
            opening.cancel()
            asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result()
            self._end_thread()
            raise
        self._capacity = self._find_capacity()

    @property
    def capacity(self) -> Capacity:
        """Of the whole pool. Servers that do not tell their KV size are limited by count instead. Where prefixes must
        be primed the pool does it: the scheduler need not wait."""
        return self._capacity

    @property
    def name(self) -> str:
        """The servers, for messages."""
        return ", ".join(endpoint_name(endpoint) for endpoint in self._endpoints)

    @property
    def models(self) -> frozenset[str]:
        """Models that every server offers; empty where they do not tell. Raises UsageError if they have none in common:
        any request may go to any server."""
        told = [server for server in self._dispatcher.servers if server.info.models]
        common = frozenset.intersection(*(frozenset(server.info.models) for server in told)) if told else frozenset()
        if told and not common:
            each = "; ".join(f"{server.name}: {', '.join(server.info.models)}" for server in told)
            raise UsageError(f"the servers have no model in common ({each}); run a job for each model, on its servers")
        return common

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Servers that do not answer now, and why."""
        return tuple(f"{server.name}: {server.last_error}" for server in self._dispatcher.servers if not server.up)

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """See ``Engine``. The prefill budget is the servers' own business."""
        self._raise_if_gone()
        ratio = self._dispatcher.pace.bytes_per_token
        flights = [flight_of(request, self._encode(request), ratio) for request in requests]
        self._loop.call_soon_threadsafe(self._dispatcher.submit, flights)

    def cancel(self, rows: Sequence[int]) -> None:
        """See ``Engine``."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._dispatcher.cancel, list(rows))

    def poll(self, timeout_s: float) -> list[Event]:
        """See ``Engine``."""
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
        settings = self.settings
        self._http1: Transport = Http1(settings.connect_timeout_s, self._key)
        self._http2: Transport | None = Http2(settings.connect_timeout_s, self._key) if settings.http2 else None
        self._transports += [self._http1, *([self._http2] if self._http2 else [])]
        servers = [self._new_server(index, endpoint) for index, endpoint in enumerate(self._endpoints)]
        found = await asyncio.gather(*(server.discover() for server in servers))
        for server, up in zip(servers, found, strict=True):
            server.up = up
        locked = [server.name for server in servers if server.last_status in (401, 403)]
        if locked:
            got = f"the key in {self.settings.api_key_env}" if self._key else "a request without a key"
            raise EngineError(f"{', '.join(locked)} refused {got}; name the right variable with --api-key-env")
        if not any(found):
            faults = "; ".join(f"{server.name}: {server.last_error}" for server in servers)
            raise EngineError(
                f"no server answers ({faults}). Start it or check --endpoint, then run the same command again."
            )
        dispatcher = Dispatcher(settings, servers, self.now_s, self._emit, self._stop, self._new_server)
        dispatcher.run()
        return dispatcher

    def _new_server(self, index: int, endpoint: str) -> Server:
        http2 = self._http2 if endpoint.startswith("https:") else None
        server = Server(index, endpoint, http2 or self._http1, self._key.encode() if self._key else b"")
        server.window.ceiling = _open_files() // max(len(self._endpoints), index + 1)
        return server

    async def _shut(self) -> None:
        await self._dispatcher.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
        for transport in self._transports:
            await transport.close()

    def _emit(self, event: Event) -> None:
        """Hand an event over; the driver's thread is woken once for those of ``WAKE_S``."""
        self._events.append(event)
        if not self._signalled:
            self._signalled = True
            self._loop.call_later(WAKE_S, self._signal)

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
        # Slots share nothing, and servers may be added: there, the pool itself keeps to what each server holds.
        countable = all(i.kv_tokens and not i.slot_caches for i in infos) and settings.endpoints_file is None
        kv_tokens = settings.kv_tokens or (sum(info.kv_tokens for info in infos) if countable else 0)
        seqs = sum(info.max_num_seqs or UNKNOWN_SEQS for info in infos)
        if settings.endpoints_file is not None:
            seqs = max(seqs, UNKNOWN_SEQS)
        if settings.max_concurrency:
            seqs = min(seqs, settings.max_concurrency)
        ahead = AHEAD if len(self._endpoints) == 1 and settings.endpoints_file is None else POOL_AHEAD
        if all(info.slot_caches for info in infos):
            ahead = SLOT_AHEAD
        contexts = [info.max_context_tokens for info in infos if info.max_context_tokens]
        return Capacity(
            kv_tokens=kv_tokens or UNKNOWN_KV_TOKENS,
            block_tokens=settings.block_tokens or max(max(info.block_tokens for info in infos), 1),
            max_num_seqs=seqs,
            max_context_tokens=settings.max_context_tokens or min(contexts, default=0),
            queued_seqs=(ahead - 1) * seqs,
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
