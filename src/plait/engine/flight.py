"""The embedded engine's own account of its requests: who is in prefill, who decodes, what a step did.

The engine tells which tokens came and how many requests a step scheduled. The rest follows from how it schedules:
first one token for every decoding sequence, then prompts in the order they were added, up to the step's token limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plait.engine.chat import Generated
from plait.engine.shadow import BLOCK_TOKENS, PrefixShadow, chain
from plait.engine.wire import Sampling
from plait.table import I32


@dataclass(eq=False, slots=True)
class Flight:
    """One request inside the engine."""

    row: int
    chat: bool
    ids: I32
    sampling: Sampling
    keys: list[int]
    """Full prompt blocks."""
    cached_tokens: int
    computed_tokens: int
    """Tokens in the KV cache so far while in prefill, reused ones among them."""
    target_tokens: int
    """Tokens to compute before the next one is generated: the prompt, and what was lost to a preemption."""
    held: list[int]
    """Blocks this request uses."""
    handle: Any = None
    outputs: dict[int, Generated] = field(default_factory=dict)
    decoding: bool = False

    @property
    def streams(self) -> bool:
        """The engine hands tokens of several sequences over only when all have ended."""
        return self.sampling.n == 1

    @property
    def output_tokens(self) -> int:
        """Generated so far, over all sequences."""
        return sum(len(output.ids) for output in self.outputs.values())

    @property
    def context_tokens(self) -> int:
        """Prompt and what was generated."""
        return len(self.ids) + self.output_tokens


@dataclass(slots=True)
class StepWork:
    """What one step did, and whose state it changed."""

    prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    decode_seqs: int = 0
    decode_context_tokens: int = 0
    began: list[Flight] = field(default_factory=list)
    preempted: list[Flight] = field(default_factory=list)


class Account:
    """Flights by row, in the order they were added."""

    def __init__(self, kv_blocks: int, max_batched_tokens: int) -> None:
        self.flights: dict[int, Flight] = {}
        self._shadow = PrefixShadow(kv_blocks)
        self._max_batched_tokens = max_batched_tokens

    def add(self, row: int, chat: bool, ids: I32, sampling: Sampling) -> Flight:
        """A request as it is given to the engine: this is when it looks for cached prefixes."""
        keys = chain(ids)
        matched = self._shadow.match(keys)
        cached = min(matched * BLOCK_TOKENS, len(ids) - 1)  # the last token is always computed
        flight = Flight(row, chat, ids, sampling, keys, cached, cached, len(ids), keys[:matched])
        self.flights[row] = flight
        return flight

    def remove(self, flight: Flight) -> None:
        """The request ended; blocks that its output filled can be found by others from now on."""
        del self.flights[flight.row]
        if flight.decoding and flight.streams and flight.outputs:
            generated = np.asarray(flight.outputs[min(flight.outputs)].ids, np.int32)
            whole = chain(np.concatenate((flight.ids, generated[:-1])))  # the last token was never computed
            self._shadow.fill(whole[len(flight.held) :])
            flight.held = whole
        self._shadow.release(flight.held)

    def after_step(self, moved: set[Flight], scheduled: int, used_blocks: int) -> StepWork:
        """Book a step. ``moved``: flights that handed tokens over, already in their outputs; ``scheduled``: requests
        that the engine says it ran; ``used_blocks``: KV blocks it holds for running requests."""
        work = StepWork()
        waiting = [flight for flight in self.flights.values() if not flight.decoding]
        for flight in self.flights.values():
            if flight.decoding and (flight in moved or not flight.streams):
                work.decode_seqs += flight.sampling.n
                work.decode_context_tokens += flight.context_tokens
                scheduled -= 1
            elif flight.decoding:
                self._preempt(flight, work)
        self._prefill(waiting, moved, scheduled, work)
        self._shadow.shrink(used_blocks)
        return work

    def _preempt(self, flight: Flight, work: StepWork) -> None:
        """A decoding sequence that got no token: the engine took its KV away and will compute it again."""
        flight.decoding = False
        flight.computed_tokens, flight.target_tokens = 0, flight.context_tokens
        self._shadow.release(flight.held)
        flight.held = []
        work.preempted.append(flight)

    def _prefill(self, waiting: Iterable[Flight], moved: set[Flight], scheduled: int, work: StepWork) -> None:
        """Share the step's remaining tokens among prompts, in order. A flight with its first token is certain."""
        scheduled -= sum(flight in moved for flight in waiting)
        for flight in waiting:
            remaining = flight.target_tokens - flight.computed_tokens
            if flight in moved:
                chunk = remaining
            elif scheduled > 0:
                scheduled -= 1
                left = self._max_batched_tokens - work.prefill_tokens - work.decode_seqs
                chunk = max(0, min(remaining - flight.streams, left))
            else:
                continue
            work.prefill_tokens += chunk
            work.prefill_context_tokens += chunk * flight.computed_tokens + chunk * (chunk + 1) // 2
            flight.computed_tokens += chunk
            blocks = flight.keys[len(flight.held) : flight.computed_tokens // BLOCK_TOKENS]
            self._shadow.fill(blocks)
            flight.held += blocks
            if flight.computed_tokens == flight.target_tokens:
                flight.decoding = True
                work.began.append(flight)
