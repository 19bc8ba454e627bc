"""What a pool knows of one server: its queue, what is in flight there, which prefixes its cache holds.

Requests of one affinity are a group: they share a prefix worth caching. Where requests only reuse what is cached when
they start, the first of a group primes it while the others wait, and a group is opened only when those that are open
cannot fill the server: each takes its part of the cache. Where each slot caches what it ran last (llama.cpp), groups
run side by side, one request each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice

from plait.engine.http_flight import Flight

LOOK = 256
"""Requests of a queue that are looked at to find one that may go."""
SPLIT_REQUESTS = 8
"""A group takes a second slot, and computes its prefix there too, if this many of it wait and no other group does."""
GROUPS = 1 << 16
"""Prefix groups remembered per server."""


@dataclass(eq=False, slots=True)
class Member:
    """The pool's view of one server."""

    index: int
    prime: bool = True
    """Whether a prefix has to be computed before others can share it."""
    slots: int = 0
    """Slots that each cache what they ran last; 0: one cache for all."""
    kv_tokens: int = 0
    """What the slots may hold together; 0: not known."""
    up: bool = True
    queue: deque[Flight] = field(default_factory=deque)
    in_flight: set[Flight] = field(default_factory=set)
    work: float = 0.0
    """Expected tokens queued and in flight."""
    reserved: float = 0.0
    """Tokens that those in flight may take at most."""
    queued_of: dict[int, int] = field(default_factory=dict)
    """Group -> flights in the queue."""
    flying_of: dict[int, int] = field(default_factory=dict)
    """Group -> flights in flight."""
    warm: OrderedDict[int, None] = field(default_factory=OrderedDict)
    priming: dict[int, Flight] = field(default_factory=dict)
    held: dict[int, None] = field(default_factory=dict)
    """Groups that the slots ran last, oldest first."""
    offered: int = 0
    """Flights in the queue whose group is open: warm or being primed."""

    def open(self, group: int) -> bool:
        """Whether the group's prefix is in the server's cache, or about to be."""
        return group in self.warm or group in self.priming

    def enter(self, flight: Flight, front: bool = False) -> None:
        """Queue a flight."""
        if front:
            self.queue.appendleft(flight)
        else:
            self.queue.append(flight)
        self.work += flight.work
        self.queued_of[flight.affinity] = self.queued_of.get(flight.affinity, 0) + 1
        self.offered += self.open(flight.affinity)

    def leave(self, place: int) -> Flight:
        """Take the flight at a place out of the queue."""
        flight = self.queue[place]
        del self.queue[place]
        self.work -= flight.work
        _count_down(self.queued_of, flight.affinity)
        self.offered -= self.open(flight.affinity)
        return flight

    def start(self, flight: Flight) -> None:
        """A flight that is in no queue is in flight here; the first of its group primes it."""
        flight.server = self.index
        self.in_flight.add(flight)
        self.flying_of[flight.affinity] = self.flying_of.get(flight.affinity, 0) + 1
        self.work += flight.work
        self.reserved += flight.reserve_tokens
        if self.slots:
            self._hold(flight.affinity)
        elif self.prime and not self.open(flight.affinity):
            self.priming[flight.affinity] = flight
            self.offered += self.queued_of.get(flight.affinity, 0)
            flight.primer = True

    def end(self, flight: Flight, answered: bool) -> None:
        """A flight came back; ``answered`` leaves its prefix cached here."""
        flight.server = -1
        self.in_flight.discard(flight)
        _count_down(self.flying_of, flight.affinity)
        self.work -= flight.work
        self.reserved -= flight.reserve_tokens
        if flight.primer:
            self.primed(flight, answered)

    def primed(self, flight: Flight, cached: bool) -> None:
        """A primer's group need not wait for it any longer; ``cached``: its prefix is there now."""
        flight.primer = False
        if self.priming.get(flight.affinity) is not flight:  # the server died meanwhile
            return
        del self.priming[flight.affinity]
        if cached:
            self.warm[flight.affinity] = None
            if len(self.warm) > GROUPS:
                self.offered -= self.queued_of.get(self.warm.popitem(last=False)[0], 0)
        else:
            self.offered -= self.queued_of.get(flight.affinity, 0)

    def forget(self) -> deque[Flight]:
        """The server is gone, and its cache with it. Returns what was queued."""
        waiting, self.queue = self.queue, deque()
        self.up = False
        self.warm.clear()
        self.priming.clear()
        self.held.clear()
        self.queued_of.clear()
        self.offered = 0
        self.work = sum(flight.work for flight in self.in_flight)
        return waiting

    def next_place(self, places: int) -> int:
        """Place in the queue of the flight that should go next where ``places`` requests may be in flight; or -1."""
        if self.slots:
            return self._next_of_slots()
        enough = self.offered >= places
        ahead = 0 < self.offered < places and not self.priming  # the open groups run dry: prime the next one now
        ready = fresh = -1
        for place, flight in enumerate(islice(self.queue, LOOK)):
            group = flight.affinity
            if group in self.priming:
                continue
            if self.prime and group not in self.warm and self.queued_of[group] > 1:
                fresh = place if fresh < 0 else fresh
            else:
                ready = place if ready < 0 else ready
            if fresh >= 0 if ahead else ready >= 0 or (fresh >= 0 and not enough):
                break
        if ready < 0 or (ahead and fresh >= 0):
            return fresh if not (enough and self.priming) else -1
        return ready

    def _hold(self, group: int) -> None:
        """A slot runs the group now, and another group is out of its slot."""
        self.held.pop(group, None)
        self.held[group] = None
        if len(self.held) > self.slots:
            idle = next((old for old in self.held if old not in self.flying_of), group)
            del self.held[idle]

    def _next_of_slots(self) -> int:
        """The first flight that a free slot holds the prefix of; else the first whose group is not running; else one of
        a group long enough to be worth a second slot."""
        other = split = -1
        for place, flight in enumerate(islice(self.queue, LOOK)):
            if flight.affinity not in self.flying_of:
                if flight.affinity in self.held:
                    return place
                other = place if other < 0 else other
            elif split < 0 and self.queued_of[flight.affinity] >= SPLIT_REQUESTS:
                split = place
        return other if other >= 0 else split

    def has_kv_for(self, flight: Flight) -> bool:
        """Whether it fits beside what is in flight. One alone is the server's to judge."""
        return not (self.kv_tokens and self.in_flight and self.reserved + flight.reserve_tokens > self.kv_tokens)


def _count_down(counts: dict[int, int], group: int) -> None:
    left = counts[group] - 1
    if left:
        counts[group] = left
    else:
        del counts[group]
