"""An order for requests that wait in a live server: what vLLM's waiting queue becomes under ``plait.vllm``.

No clock and no engine: time is counted in requests taken and in work served, so the bounds on waiting are exact.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass, field, replace

GOALS = ("throughput", "latency")
SLACK_POPS = 256
GROUP_TOKENS = 64
"""Requests that agree on this many tokens are expected to answer at similar length."""
GROUPS = 1 << 14
OUTPUT_WORK = 4.0
"""A generated token weighs as much as this many prefilled ones: it re-reads the weights, in company."""
UNKNOWN_OUTPUT_TOKENS = 128.0
AGEING = 0.05
"""Share of the work served while a request waits that counts for it."""


@dataclass(eq=False, slots=True)
class Waiting:
    """One waiting request."""

    key: object
    """The engine's own handle."""
    tokens: bytes
    """Prompt token ids, big-endian int32: bytes sort as token sequences do."""
    max_tokens: int = 1 << 30
    priority: int = 0
    """Lower first; nobody overtakes a lower number."""
    serial: int = 0
    due_pops: int = 0
    """Count of requests taken at which it may no longer be passed over."""
    rank: float = 0.0
    gone: bool = False

    @property
    def group(self) -> bytes:
        """What its output length is learned under."""
        return self.tokens[: 4 * GROUP_TOKENS]


@dataclass
class OutputLengths:
    """Mean output tokens per prompt opening, shrunk towards the mean of all."""

    mean: float = UNKNOWN_OUTPUT_TOKENS
    count: int = 0
    groups: dict[bytes, tuple[float, int]] = field(default_factory=dict)

    def observe(self, group: bytes, output_tokens: int) -> None:
        """A request of the group ended by itself."""
        self.count += 1
        self.mean += (output_tokens - self.mean) / min(self.count, 1000)
        mean, count = self.groups.pop(group, (self.mean, 0))
        self.groups[group] = (mean + (output_tokens - mean) / min(count + 1, 100), count + 1)
        if len(self.groups) > GROUPS:
            del self.groups[next(iter(self.groups))]

    def expected(self, group: bytes, max_tokens: int) -> float:
        """Output tokens expected of the next request of the group."""
        mean, count = self.groups.get(group, (self.mean, 0))
        return min((mean * count + self.mean) / (count + 1), float(max_tokens))


class WaitingOrder:
    """A queue that is served in the order of a goal.

    ``throughput``: depth-first through the prefix tree of what waits: after a request comes the one that follows it in
    token order, around and around. A request is passed over by at most about twice as many requests as waited when it
    came, plus a constant. ``latency``: least work first, less a share of the work served since it came: only arrivals
    within ``work / AGEING`` of its own can overtake it.
    """

    def __init__(self, goal: str = "throughput", lengths: OutputLengths | None = None) -> None:
        if goal not in GOALS:
            raise ValueError(f"goal is '{goal}'; known: {', '.join(GOALS)}")
        self.goal = goal
        self.lengths = lengths or OutputLengths()
        self.items: dict[object, Waiting] = {}
        self.front: list[Waiting] = []
        """Requests that were put back, the next one last."""
        self._sorted: dict[int, list[tuple[bytes, int, Waiting]]] = {}
        self._due: dict[int, list[tuple[int, int, int, Waiting]]] = {}
        self._ranked: list[tuple[int, float, int, int, Waiting]] = []
        self._cursor: tuple[bytes, int] = (b"", -1)
        self._serial = self._entries = 0
        self._pops = 0
        self._served = 0.0
        self._chosen: Waiting | None = None

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: Waiting) -> None:
        """A new request."""
        self._serial += 1
        item.serial = self._serial
        item.due_pops = self._pops + 2 * len(self.items) + SLACK_POPS
        item.rank = AGEING * self._served + self.work(item)
        self._insert(item)

    def add_again(self, item: Waiting) -> None:
        """A request that was taken goes back to its place: it keeps its age."""
        self._insert(replace(item, gone=False))  # heaps still hold the old one, marked as gone

    def _insert(self, item: Waiting) -> None:
        self._chosen = None
        self._entries += 1
        self.items[item.key] = item
        if self.goal == "latency":
            heapq.heappush(self._ranked, (item.priority, item.rank, item.serial, self._entries, item))
            return
        bisect.insort(self._sorted.setdefault(item.priority, []), (item.tokens, item.serial, item))
        heapq.heappush(self._due.setdefault(item.priority, []), (item.due_pops, item.serial, self._entries, item))

    def put_back(self, item: Waiting) -> None:
        """A request that was taken (or preempted) comes first again."""
        self._chosen = None
        self.items[item.key] = item
        item.gone = False
        self.front.append(item)

    def peek(self) -> Waiting:
        """The request ``pop`` will take. Raises IndexError if none waits."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def pop(self) -> Waiting:
        """Take the next request. Raises IndexError if none waits."""
        item = self.peek()
        if item in self.front:
            self.front.remove(item)
            del self.items[item.key]
            item.gone = True
            self._chosen = None
        else:
            self.remove(item.key)
            self._cursor = (item.tokens, item.serial)
            self._served += self.work(item)
        self._pops += 1
        return item

    def remove(self, key: object) -> bool:
        """Drop a request; False if it does not wait."""
        item = self.items.pop(key, None)
        if item is None:
            return False
        self._chosen = None
        item.gone = True
        if item in self.front:
            self.front.remove(item)
        elif self.goal == "throughput":
            queue = self._sorted[item.priority]
            del queue[bisect.bisect_left(queue, (item.tokens, item.serial))]
            if not queue:
                del self._sorted[item.priority], self._due[item.priority]
        return True

    def in_order(self) -> list[Waiting]:
        """Everything that waits, roughly in the order it would be taken now."""
        rest = [item for item in self.items.values() if item not in self.front]
        if self.goal == "latency":
            rest.sort(key=lambda item: (item.priority, item.rank, item.serial))
        else:
            start = self._cursor
            rest.sort(key=lambda item: (item.priority, (item.tokens, item.serial) <= start, item.tokens, item.serial))
        return self.front[::-1] + rest

    def work(self, item: Waiting) -> float:
        """Expected work in prefilled tokens."""
        return len(item.tokens) / 4 + OUTPUT_WORK * self.lengths.expected(item.group, item.max_tokens)

    def _choose(self) -> Waiting:
        if self.front:
            return self.front[-1]
        if not self.items:
            raise IndexError("nothing waits")
        if self.goal == "latency":
            while self._ranked[0][-1].gone:
                heapq.heappop(self._ranked)
            return self._ranked[0][-1]
        priority = min(self._sorted)
        due = self._due[priority]
        while due[0][-1].gone:
            heapq.heappop(due)
        if due[0][0] <= self._pops:
            return due[0][-1]
        queue = self._sorted[priority]
        place = bisect.bisect_right(queue, self._cursor, key=lambda entry: entry[:2])
        return queue[place % len(queue)][2]
