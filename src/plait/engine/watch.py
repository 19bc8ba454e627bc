"""What a pool must notice by itself, on a timer: stuck requests, pauses without end, servers that never return, servers
that were added or taken away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING

from plait.engine.answers import Fault
from plait.engine.http_flight import Flight
from plait.engine.member import Member
from plait.engine.servers import Server

if TYPE_CHECKING:
    from plait.engine.dispatch import Dispatcher

SWEEP_S = 1.0
HALTS = 16
"""Times the process stood still that are remembered: the latest."""


class Watch:
    """Looks after a dispatcher's flights and servers."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.settings = dispatcher.settings
        self._halts: deque[tuple[float, float]] = deque(maxlen=HALTS)
        """When this process was found to have stood still, and for how long."""

    async def run(self) -> None:
        """Sweep until the pool stops."""
        endpoints, now_s = self.settings.endpoint_list(), self.dispatcher.now_s
        nap_s = min(SWEEP_S, self.settings.stall_timeout_s / 4, self.settings.patience_s / 4)
        while not self.dispatcher.stopped:
            due_s = now_s() + nap_s
            await asyncio.sleep(nap_s)
            if now_s() - due_s > nap_s:
                self._halts.append((now_s(), now_s() - due_s))
            if endpoints is not None and (listed := endpoints.changed()) is not None:
                self.use({*self.settings.endpoints, *listed})
            self.sweep(now_s())

    def use(self, endpoints: Set[str]) -> None:
        """From now on these servers, and no others, get requests; what is in flight elsewhere may finish."""
        pool = self.dispatcher
        for server in pool.servers:
            if server.endpoint in endpoints:
                pool.health.enlist(server)
            else:
                pool.health.retire(server)
        for endpoint in sorted(endpoints - {server.endpoint for server in pool.servers}):
            server = pool.new_server(len(pool.servers), endpoint)
            pool.servers.append(server)
            pool.balancer.members.append(Member(server.index))
            pool.health.eject(server)  # until a probe reaches it

    def sweep(self, now_s: float) -> None:
        """Look at everything once."""
        pool = self.dispatcher
        gone_s = self._awake_s(pool.health.all_down_s, now_s)
        if pool.health.all_down_s >= 0 and pool.flights and gone_s > self.settings.patience_s:
            faults = "; ".join(f"{server.name}: {server.last_error}" for server in pool.servers)
            pool.give_up(f"no server has answered for {gone_s:.0f} s: {faults}")
        self._fail_hopeless(now_s)
        for server in pool.servers:
            for flight in list(pool.balancer.members[server.index].in_flight):
                if flight.primer and now_s - flight.sent_s > pool.pace.prefill_s(flight):
                    pool.balancer.stop_priming(flight)
                if self._stuck(flight, server, now_s):
                    self._unstick(flight, server, now_s)
        pool.pump()

    def _fail_hopeless(self, now_s: float) -> None:
        """Flights that no server will take within ``max_wait_s`` are not held back silently."""
        pool = self.dispatcher
        up = [server for server in pool.servers if server.up]
        if not up or any(server.paused_until_s - now_s <= self.settings.max_wait_s for server in up):
            return
        for flight in [*pool.balancer.waiting(), *pool.suspects]:
            pool.forget(flight)
            pool.fail(flight, up[0].pause or Fault("rate_limited", "the server asked for a pause", 429))

    def _awake_s(self, since_s: float, now_s: float) -> float:
        """Time since then, less what this process stood still for (a machine that was suspended, a Ctrl-Z): nothing
        could be heard meanwhile, and nobody is to blame for it."""
        return now_s - since_s - sum(halt_s for end_s, halt_s in self._halts if end_s > since_s)

    def _stuck(self, flight: Flight, server: Server, now_s: float) -> bool:
        """Nothing moves here, or this one takes ten times what its tokens usually do. A server without metrics moves
        unseen while it generates: a long answer gets the time its tokens usually take on top."""
        usual_s = self.dispatcher.pace.usual_s(flight)
        quiet_s = self._awake_s(max(flight.sent_s, server.progress_s), now_s)
        unseen_s = 0.0 if server.window.measured else 2 * usual_s
        timeout_s = self.settings.stall_timeout_s
        return quiet_s > timeout_s + unseen_s or self._awake_s(flight.sent_s, now_s) > timeout_s + 10 * usual_s

    def _unstick(self, flight: Flight, server: Server, now_s: float) -> None:
        """Cut it off, to be tried again; if nothing at all has moved since its first stall, the run stops."""
        pool = self.dispatcher
        still_s = self._awake_s(max(server.progress_s, flight.sent_s, pool.last_answer_s), now_s)
        message = f"{server.name} has sent nothing for {self._awake_s(flight.sent_s, now_s):.0f} s ({flight.name})"
        flight.stalls += 1
        if flight.stalls == 1:
            flight.first_stall_s = now_s
        elif pool.last_answer_s < flight.first_stall_s:
            pool.give_up(f"nothing has moved for {still_s:.0f} s: {message}")
            return
        flight.fault = Fault("stall_timeout", message)
        pool.cut(flight)
