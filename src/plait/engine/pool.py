"""Which request goes to which server next: prefix groups stay together, work stays balanced, nobody idles at the tail.

Pure bookkeeping over servers 0..k-1: no sockets, no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from plait.engine.http_flight import Flight
from plait.engine.member import GROUPS, Member

SPILL, SPILL_REQUESTS = 0.25, 32
"""A group leaves its home when the home has this share, and this many requests, more work than the least loaded server.
Below that, idle servers help themselves."""


class Balancer:
    """Queues of the servers. Every flight added leaves exactly once, by ``take`` or ``remove``."""

    def __init__(self, n_servers: int, prime: bool) -> None:
        self.members = [Member(index, prime) for index in range(n_servers)]
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
        else:
            member.enter(flight, front)

    def take(self, index: int, places: int) -> Flight | None:
        """The next flight for a server where ``places`` may be in flight, now in flight there; None if it should get
        none now."""
        member = self.members[index]
        flight = self._own(member, places) or self._stolen(member)
        if flight is not None:
            member.start(flight)
        return flight

    def start(self, flight: Flight, index: int) -> None:
        """Mark a flight that is in no queue as in flight at a server."""
        self.members[index].start(flight)

    def end(self, flight: Flight, answered: bool) -> None:
        """A flight came back from its server; ``answered`` leaves its prefix cached there."""
        self.members[flight.server].end(flight, answered)

    def stop_priming(self, flight: Flight) -> None:
        """The prefix of a primer in flight is cached by now: the rest of its group may go."""
        if flight.primer:
            self.members[flight.server].primed(flight, True)

    def remove(self, flight: Flight) -> bool:
        """Take a waiting flight out of its queue; False if it is in none."""
        if flight in self.orphans:
            self.orphans.remove(flight)
            return True
        for member in self.members:
            if flight in member.queue:
                member.leave(member.queue.index(flight))
                return True
        return False

    def eject(self, index: int) -> None:
        """A server is gone: its queue goes to the others, its cache is forgotten."""
        self._requeue(self.members[index].forget())

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
        if len(self.members) == 1:
            return self.members[0] if self.members[0].up else None
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
        self.homes[flight.affinity] = home.index
        self.homes.move_to_end(flight.affinity)
        if len(self.homes) > GROUPS:
            self.homes.popitem(last=False)
        return home

    def _own(self, member: Member, places: int) -> Flight | None:
        place = member.next_place(places)
        if place < 0 or not member.has_kv_for(member.queue[place]):
            return None
        return member.leave(place)

    def _stolen(self, thief: Member) -> Flight | None:
        """The last flight of the longest other queue, if that evens out the load."""
        victim = max((m for m in self.members if m is not thief and m.queue), key=lambda m: m.work, default=None)
        if victim is None or not thief.up:
            return None
        flight = victim.queue[-1]
        if victim.work - flight.work < thief.work + flight.work or flight.affinity in thief.priming:
            return None
        return victim.leave(len(victim.queue) - 1) if thief.has_kv_for(flight) else None
