"""Which servers of a pool may be used, judged by disconnects, probes and the servers' own metrics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from plait.engine.http_flight import Flight
from plait.engine.pool import Balancer
from plait.engine.servers import Server

WAVE_S = 0.03
"""How long after a first disconnect the others of the same crash are waited for."""
PROBE_S, MAX_PROBE_S = 0.1, 5.0
LOAD_EVERY_S = 0.5


class Health:
    """Ejects servers, probes them, re-admits them, follows their load. Runs in the loop's thread.

    ``spawn`` starts a background task, ``pump`` is called whenever something may be sent that could not be before.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        balancer: Balancer,
        now_s: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        pump: Callable[[], None],
        jitter: random.Random,
    ) -> None:
        self.servers = servers
        self.balancer = balancer
        self.now_s = now_s
        self.spawn = spawn
        self.pump = pump
        self.jitter = jitter
        self.all_down_s = -1.0
        """Since when no server is up; -1 while one is."""

    def cut_off(self, flight: Flight, server: Server) -> None:
        """A flight's connection broke: find out whether it was alone in that. Those cut off together are one fault."""
        if not server.wave:
            server.failures += 1
            server.wave = frozenset(self.balancer.members[server.index].in_flight | {flight})
            server.dropped = set()
            self.spawn(self._judge_wave(server))
        server.dropped.add(flight)

    async def _judge_wave(self, server: Server) -> None:
        """Was it one connection, or the whole server?"""
        await asyncio.sleep(WAVE_S)
        wave, dropped = server.wave, server.dropped  # who is cut off while it is probed begins another wave
        server.wave = frozenset()
        all_cut = len(wave) > 1 and wave <= dropped and not server.transport.shares_connections
        if not all_cut and await server.alive():
            return
        server.window.refused(self.now_s(), self.now_s(), len(wave))
        for flight in dropped:
            flight.crashes += 1
            flight.attempts = max(flight.attempts - 1, 0)
        self.eject(server)

    def eject(self, server: Server) -> None:
        """Stop using a server until a probe reaches it."""
        server.up = False
        if self.balancer.members[server.index].up:
            self._take_out(server)
            self.spawn(self._probe(server))

    def retire(self, server: Server) -> None:
        """Stop using a server for good."""
        if not server.retired:
            server.retired = True
            server.up = False
            if self.balancer.members[server.index].up:
                self._take_out(server)

    def enlist(self, server: Server) -> None:
        """Use a retired server again, once a probe reaches it."""
        if server.retired:
            server.retired = False
            self.spawn(self._probe(server))

    def _take_out(self, server: Server) -> None:
        self.balancer.eject(server.index)
        if not any(s.up for s in self.servers):
            self.all_down_s = self.now_s()
        self.pump()

    async def _probe(self, server: Server) -> None:
        wait_s = PROBE_S
        while True:
            await asyncio.sleep(wait_s * self.jitter.uniform(0.8, 1.2))
            if server.retired:
                return
            if await server.discover():  # anew: another model or cache may have been started there
                break
            wait_s = min(2 * wait_s, MAX_PROBE_S)
        self.watch(server)
        server.up, server.failures, server.progress_s = True, 0, self.now_s()
        self.all_down_s = -1.0
        self.balancer.admit(server.index)
        self.pump()

    def watch(self, server: Server) -> None:
        """Take what was discovered about a server into account, and follow its load."""
        info, member = server.info, self.balancer.members[server.index]
        member.prime = not info.shares_within_a_batch
        member.slots = info.slot_caches
        if member.slots:
            # A request that waits there takes whichever slot gets free, and throws away what that one has cached.
            member.kv_tokens = info.kv_tokens
            server.window.fix(member.slots)
        if info.kind and not server.watched:
            server.watched = True
            self.spawn(self._follow(server))

    async def _follow(self, server: Server) -> None:
        """Follow the server's own metrics; ends where it has none, and when the server is retired."""
        load = await server.load()
        while (load is not None or server.window.measured) and not server.retired:
            if load is not None:
                server.window.load(load.running, load.waiting)
                if load.tokens != server.tokens:
                    server.tokens, server.progress_s = load.tokens, self.now_s()
                self.pump()
            await asyncio.sleep(LOAD_EVERY_S)
            load = await server.load()
        server.watched = False
