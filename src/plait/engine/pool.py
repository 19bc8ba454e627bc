"""Which request goes to which server next: prefix groups stay together, work stays balanced, nobody idles at the tail.

Pure bookkeeping over servers 0..k-1: no sockets, no clock. Requests of one affinity share a prefix worth caching; the
first of a group on a server primes it there, the others wait for that answer while something else is sent.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from plait.engine.answers import Fault
from plait.events import EngineRequest
from plait.table import NO_LIMIT

SPILL, SPILL_REQUESTS = 0.25, 32
"""A group leaves its home when the home has this share, and this many requests, more work than the least loaded server.
Below that, idle servers help themselves."""
LOOK = 64
"""Requests of a queue that are looked at to find one whose prefix is not just being primed."""
GROUPS = 1 << 16
"""Prefix groups remembered per pool."""
AFFINITY_CHARS = 256
AFFINITY_TOKENS = 64
UNKNOWN_OUTPUT_TOKENS = 256


@dataclass(eq=False, slots=True)
class Flight:
    """One request on its way through the pool, from ``submit`` to its terminal event."""

    row: int
    url: str
    body: bytes
    max_tokens: int
    affinity: int
    prompt_tokens: float
    work: float
    """Tokens it is expected to take: the unit of balance."""
    server: int = -1
    """Where it is in flight; -1 while it waits."""
    avoid: int = -1
    """Server of the last fault: another one is preferred."""
    sent_s: float = 0.0
    attempts: int = 0
    stalls: int = 0
    first_stall_s: float = 0.0
    crashes: int = 0
    """Times a server died while it was in flight there."""
    refusals: int = 0
    refused_s: float = -1.0
    """Time of the first 429; -1 if there was none."""
    unreached: int = 0
    """Times no connection could be made."""
    fault: Fault | None = None
    charge: list[float] | None = None
    """Its entry in the token rate limit."""
    cancelled: bool = False
    primer: bool = False
    """Others of its group wait for its answer on this server."""

    @property
    def reserve_tokens(self) -> float:
        """Tokens it may take at most, as rate limits count them."""
        return self.prompt_tokens + (UNKNOWN_OUTPUT_TOKENS if self.max_tokens >= NO_LIMIT else self.max_tokens)


def affinity_of(request: EngineRequest) -> int:
    """A number equal requests' prefixes share: the driver's own where it set one, else a digest of the first tokens or
    of the first characters of the prompt."""
    if request.affinity >= 0:
        return request.affinity
    if request.token_ids is not None:
        return zlib.crc32(request.token_ids[:AFFINITY_TOKENS].tobytes())
    return zlib.crc32(_opening(request.body).encode("utf-8", "surrogatepass"))


def _opening(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    first: Any = messages[0] if isinstance(messages, list) and messages else body.get("prompt", body.get("input", ""))
    if isinstance(first, dict):
        first = first.get("content", "")
    return (first if isinstance(first, str) else str(first)[: 4 * AFFINITY_CHARS])[:AFFINITY_CHARS]


@dataclass(eq=False, slots=True)
class Member:
    """The pool's view of one server."""

    index: int
    up: bool = True
    queue: deque[Flight] = field(default_factory=deque)
    in_flight: set[Flight] = field(default_factory=set)
    work: float = 0.0
    """Expected tokens queued and in flight."""
    warm: OrderedDict[int, None] = field(default_factory=OrderedDict)
    priming: dict[int, Flight] = field(default_factory=dict)


class Balancer:
    """Queues of the servers. Every flight added leaves exactly once, by ``take`` or ``remove``."""

    def __init__(self, n_servers: int, prime: bool) -> None:
        self.members = [Member(index) for index in range(n_servers)]
        self.prime = prime
        self.homes: OrderedDict[int, int] = OrderedDict()
        self.orphans: deque[Flight] = deque()
        """Flights queued while no server is up."""

    @property
    def queued(self) -> int:
        """Flights that wait."""
        return len(self.orphans) + sum(len(member.queue) for member in self.members)

    @property
    def in_flight(self) -> int:
        """Flights at a server."""
        return sum(len(member.in_flight) for member in self.members)

    def add(self, flight: Flight, front: bool = False) -> None:
        """Queue a flight at the home of its group, or at the least loaded server if the home has too much."""
        member = self._home(flight)
        if member is None:
            self.orphans.append(flight)
            return
        member.work += flight.work
        if front:
            member.queue.appendleft(flight)
        else:
            member.queue.append(flight)

    def take(self, index: int) -> Flight | None:
        """The next flight for a server with room, now in flight there; None if it should get none now."""
        member = self.members[index]
        flight = self._own(member) or self._stolen(member)
        if flight is None:
            return None
        self.start(flight, index)
        return flight

    def start(self, flight: Flight, index: int) -> None:
        """Mark a flight that is in no queue as in flight at a server."""
        member = self.members[index]
        flight.server = index
        member.in_flight.add(flight)
        member.work += flight.work
        if self.prime and flight.affinity not in member.warm and flight.affinity not in member.priming:
            member.priming[flight.affinity] = flight
            flight.primer = True

    def end(self, flight: Flight, answered: bool) -> None:
        """A flight came back from its server; ``answered`` leaves its prefix cached there."""
        member = self.members[flight.server]
        member.in_flight.discard(flight)
        member.work -= flight.work
        if flight.primer:
            member.priming.pop(flight.affinity, None)
            flight.primer = False
        if answered and self.prime:
            _remember(member.warm, flight.affinity, None)
        flight.server = -1

    def stop_priming(self, flight: Flight) -> None:
        """The rest of a primer's group need not wait for it any longer."""
        if flight.primer:
            member = self.members[flight.server]
            member.priming.pop(flight.affinity, None)
            _remember(member.warm, flight.affinity, None)
            flight.primer = False

    def remove(self, flight: Flight) -> bool:
        """Take a waiting flight out of its queue; False if it is in none."""
        for queue, member in [(self.orphans, None), *((member.queue, member) for member in self.members)]:
            if flight in queue:
                queue.remove(flight)
                if member is not None:
                    member.work -= flight.work
                return True
        return False

    def eject(self, index: int) -> None:
        """A server is gone: its queue goes to the others, its cache is forgotten."""
        member = self.members[index]
        member.up = False
        member.warm.clear()
        waiting, member.queue = member.queue, deque()
        member.work = sum(flight.work for flight in member.in_flight)
        self._requeue(waiting)

    def admit(self, index: int) -> None:
        """A server is back."""
        self.members[index].up = True
        waiting, self.orphans = self.orphans, deque()
        self._requeue(waiting)

    def waiting(self) -> list[Flight]:
        """All queued flights."""
        return [*self.orphans, *(flight for member in self.members for flight in member.queue)]

    def _requeue(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self.add(flight)

    def _home(self, flight: Flight) -> Member | None:
        up = [member for member in self.members if member.up]
        if not up:
            return None
        least = min(up, key=lambda member: (member.index == flight.avoid, member.work))
        home = self.members[self.homes.get(flight.affinity, least.index)]
        if (
            not home.up
            or home.index == flight.avoid
            or home.work > least.work * (1 + SPILL) + SPILL_REQUESTS * flight.work
        ):
            home = least
        _remember(self.homes, flight.affinity, home.index)
        return home

    def _own(self, member: Member) -> Flight | None:
        """First queued flight whose prefix is not just being primed here."""
        for place in range(min(len(member.queue), LOOK)):
            flight = member.queue[place]
            if flight.affinity not in member.priming:
                del member.queue[place]
                member.work -= flight.work
                return flight
        return None

    def _stolen(self, thief: Member) -> Flight | None:
        """The last flight of the longest other queue, if that evens out the load."""
        victim = max((m for m in self.members if m is not thief and m.queue), key=lambda m: m.work, default=None)
        if victim is None or not thief.up:
            return None
        flight = victim.queue[-1]
        if victim.work - flight.work < thief.work + flight.work or flight.affinity in thief.priming:
            return None
        victim.queue.pop()
        victim.work -= flight.work
        return flight


def _remember(table: OrderedDict[int, Any], key: int, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > GROUPS:
        table.popitem(last=False)


def flight_of(request: EngineRequest, body: bytes, bytes_per_token: float) -> Flight:
    """A flight with its expected work: prompt tokens (from bytes where the job was not tokenised) plus output."""
    prompt = len(body) / bytes_per_token if request.token_ids is None else float(len(request.token_ids))
    work = prompt + min(request.max_tokens, UNKNOWN_OUTPUT_TOKENS)
    return Flight(request.row, request.url, body, request.max_tokens, affinity_of(request), prompt, work)
