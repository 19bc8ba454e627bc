"""Which server a prefix group goes to: the one with least work when it comes, as in the pool, or the one that the
data-parallel partition of the whole job (``plait.partition``) gives it beforehand. Both steal at the tail.

Imported by ``benchmarks/servers.py``. The servers are played: SLOTS requests at once, a cache of the last
CACHED_GROUPS prefixes, one unit of time an output token and PREFILL_TIME a computed prompt token. Routing is the pool's
own code, given requests in the order that is planned for them, POOL_AHEAD times as many as run.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from plait.engine.http import POOL_AHEAD
from plait.engine.http_flight import UNKNOWN_OUTPUT_TOKENS, Flight
from plait.engine.member import Member
from plait.engine.pool import Balancer
from plait.model.cost import Cost
from plait.partition import balanced_cut
from plait.policy.blend import depth_first_long_first
from plait.table import F64, I32, I64
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree

SERVERS, SLOTS, CACHED_GROUPS = 4, 16, 12
PREFILL_TIME = 1 / 16
COST = Cost(token_s=PREFILL_TIME, pair_s=0.0, kv_read_s=1 / 1024)
PREFIX_TOKENS, OWN_TOKENS = 800, 60
REQUESTS, SEEDS = 5000, 3
SPEEDS = {"equal servers": (1.0, 1.0, 1.0, 1.0), "one half as fast": (1.0, 1.0, 1.0, 0.5)}
GROUPS: dict[str, Callable[[np.random.Generator], I64]] = {
    "125 even groups": lambda dice: dice.permutation(np.arange(REQUESTS) % 125),
    "groups of Zipf sizes": lambda dice: np.minimum(dice.zipf(1.3, REQUESTS), 1000).astype(np.int64),
    "half of them alone": lambda dice: np.where(dice.random(REQUESTS) < 0.5, -1, dice.integers(0, 60, REQUESTS)),
}


@dataclass(frozen=True)
class Job:
    """Requests, what is expected of their answers, and what comes."""

    tree: PrefixTree
    prompt_tokens: I64
    expected: F64
    output_tokens: I64
    order: list[int]

    @property
    def group(self) -> I32:
        """Node of each row; 0: it shares nothing."""
        return self.tree.node_of

    @property
    def least_time(self) -> float:
        """Time of all requests one after the other, every prefix computed once."""
        computed = (self.prompt_tokens - self.tree.prefix_tokens[self.group]).sum() + self.tree.segment_tokens.sum()
        return float(PREFILL_TIME * computed + self.output_tokens.sum())


def make(kind: str, seed: int) -> Job:
    """A job whose groups differ in what they answer; each answer is off by a factor."""
    dice = np.random.default_rng(seed)
    group = GROUPS[kind](dice)
    own = dice.integers(OWN_TOKENS // 2, 2 * OWN_TOKENS, REQUESTS)
    prompt = PREFIX_TOKENS + own
    tree = tree_from_groups(prompt, group, np.full(REQUESTS, PREFIX_TOKENS))
    expected = dice.lognormal(4.0, 0.8, group.max() + 2)[group]
    output = np.maximum(1, expected * dice.lognormal(0.0, 0.5, REQUESTS)).astype(np.int64)
    return Job(tree, prompt, expected, output, depth_first_long_first(tree, expected).tolist())


class Assigned(Balancer):
    """Every request has its server from the start."""

    def __init__(self, server_of: I32) -> None:
        super().__init__(SERVERS, prime=True)
        self._server_of = server_of

    def _home(self, flight: Flight) -> Member:
        home: Member = self.members[self._server_of[flight.row]]
        return home


def play(job: Job, balancer: Balancer, streams: Sequence[Sequence[int]], speeds: Sequence[float]) -> tuple[float, int]:
    """Time until the last answer, and prompt tokens computed. ``streams``: rows in order, one list for all servers or
    one for each; the next row comes from the one with fewest rows at the pool."""
    left = [deque(stream) for stream in streams]
    stream_of = {row: index for index, stream in enumerate(streams) for row in stream}
    here = [0] * len(streams)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in speeds]
    events: list[tuple[float, int, bool, Flight]] = []
    serial = itertools.count()
    now = 0.0
    computed = 0

    def hand_over() -> None:
        while sum(here) < POOL_AHEAD * SLOTS * SERVERS and any(left):
            index = min((i for i in range(len(left)) if left[i]), key=here.__getitem__)
            row = left[index].popleft()
            here[index] += 1
            tokens = int(job.prompt_tokens[row])
            group = int(job.group[row]) or -1 - row
            balancer.add(Flight(row, "", "", b"", 0, group, tokens, tokens + UNKNOWN_OUTPUT_TOKENS))

    def start() -> None:
        nonlocal computed
        for index, speed in enumerate(speeds):
            while len(balancer.members[index].in_flight) < SLOTS and (flight := balancer.take(index, SLOTS)):
                node, cache = int(job.group[flight.row]), caches[index]
                shared = int(job.tree.prefix_tokens[node])
                tokens = int(job.prompt_tokens[flight.row]) - (shared if node in cache else 0)
                if node:
                    cache[node] = None
                    cache.move_to_end(node)
                    if len(cache) > CACHED_GROUPS:
                        cache.popitem(last=False)
                computed += tokens
                prefilled = now + PREFILL_TIME * tokens / speed
                heapq.heappush(events, (prefilled, next(serial), False, flight))
                end = prefilled + int(job.output_tokens[flight.row]) / speed
                heapq.heappush(events, (end, next(serial), True, flight))

    while True:
        hand_over()
        start()
        if not events:
            return now, computed
        now, _, ended, flight = heapq.heappop(events)
        if ended:
            balancer.end(flight, answered=True)
            here[stream_of[flight.row]] -= 1
        else:
            balancer.stop_priming(flight)


def compare() -> dict[str, dict[str, float]]:
    """Means over seeds: time over what equal work without waste would take, prompt tokens computed over unique ones."""
    result: dict[str, dict[str, float]] = {}
    for kind, (name, speeds) in itertools.product(GROUPS, SPEEDS.items()):
        found: dict[str, list[tuple[float, float]]] = {"as they come": [], "partition": []}
        for seed in range(SEEDS):
            job = make(kind, seed)
            rank = balanced_cut(job.tree, job.prompt_tokens, job.expected, COST, SERVERS)
            streams = [[row for row in job.order if rank[row] == index] for index in range(SERVERS)]
            unique = int((job.prompt_tokens - job.tree.prefix_tokens[job.group]).sum() + job.tree.segment_tokens.sum())
            ideal = job.least_time / (SLOTS * sum(speeds))
            for way, run in (
                ("as they come", play(job, Balancer(SERVERS, prime=True), [job.order], speeds)),
                ("partition", play(job, Assigned(rank), streams, speeds)),
            ):
                found[way].append((run[0] / ideal, run[1] / unique))
        row: dict[str, float] = {}
        for way, pairs in found.items():
            time, tokens = np.mean(pairs, axis=0)
            row |= {f"{way}: time": float(time), f"{way}: tokens computed": float(tokens)}
        result[f"{kind}, {name}"] = row
        print(f"{kind}, {name}", json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
    return result
