"""What a scheduler asks of an engine and what an engine reports: plain data and one protocol.

Everything that runs requests (the simulator, the embedded engine, an HTTP pool, vLLM) satisfies ``Engine``; everything
that decides (``plait.scheduler.Scheduler``) sees only these events. Rows are indices into the request table, never a
user's ``custom_id``. Times are seconds on the engine's own monotonic clock, starting at 0 when the engine is created.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold. Zero means "not limited" for the last three fields."""

    kv_tokens: int
    """KV cache size in tokens (blocks x block_tokens)."""
    block_tokens: int = 1
    """Granularity of KV allocation and of prefix reuse, in tokens."""
    max_num_seqs: int = 0
    """Sequences that may run at once."""
    max_batched_tokens: int = 0
    """Tokens (prefill + decode) one step may take."""
    max_context_tokens: int = 0
    """Longest prompt + output of one request."""
    prefix_lookup_at_submit: bool = False
    """True where a request only reuses prefixes that are cached when it is submitted (OpenVINO, llama.cpp, HTTP
    servers): the scheduler then sends one request of a prefix group first and the rest after its prefill. False where
    requests of one batch share (the simulator, vLLM)."""
    takes_prefill_budget: bool = False
    """True if the engine honours ``Decision.prefill_budget_tokens`` for its next step."""
    preempts_on_request: bool = False
    """True if ``Engine.cancel`` may be used to preempt a request that is submitted again later."""
    queued_seqs: int = 0
    """Sequences that the engine holds beyond those that run (a server's own queue; prefix groups that a pool chooses
    from): they are handed over early, and run no sooner for it. Counts where ``max_num_seqs`` does."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as handed to an engine."""

    row: int
    url: str
    body: dict[str, Any]
    token_ids: npt.NDArray[np.int32] | None
    """Prompt token ids, int32 [prompt_tokens], where the job was tokenised; None where the engine tokenises itself."""
    max_tokens: int
    """Cap on generated tokens per sequence, resolved (never missing)."""
    affinity: int = -1
    """Requests with equal numbers share a prefix worth caching (a tree node below the root); engines of several servers
    keep them together. -1: not known."""
    name: str = ""
    """What messages call it (a user's custom_id); never used as an id."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request's prefill is complete: its prefix is in the cache now, and its first token exists."""

    row: int
    t_s: float
    cached_tokens: int = 0
    """Prompt tokens that were reused instead of computed (0 if the engine cannot tell)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens generated so far (not since the last event), summed over the request's sequences."""

    row: int
    t_s: float
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """The engine threw the request's KV away (on its own or because it was told to). ``requeue``: submit it again."""

    row: int
    t_s: float
    lost_tokens: int = 0
    requeue: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The endpoint's answer. Any HTTP status is possible; 200 means answered."""

    row: int
    t_s: float
    status_code: int
    body: bytes
    """JSON object exactly as the endpoint would return it, UTF-8, one line."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has no answer. ``retryable``: the fault was the server's or the transport's, not the request's."""

    row: int
    t_s: float
    code: str
    message: str
    param: str | None = None
    status_code: int | None = None
    body: bytes | None = None
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step, for engines that have visible ones: the raw material of live calibration."""

    t_s: float
    duration_s: float
    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    """KV tokens held at the end of the step."""
    prefill_context_tokens: int = 0
    """Sum over prefilled tokens of the context each one attends to."""
    decode_context_tokens: int = 0
    """Sum over decoding sequences of the KV tokens each one reads."""


Event: TypeAlias = Started | Progress | Preempted | Finished | Failed | Step


@dataclass(frozen=True, slots=True)
class Decision:
    """What the scheduler wants now."""

    admit: npt.NDArray[np.int64]  # [k] rows, in order
    preempt: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [j] rows
    prefill_budget_tokens: int | None = None
    """Prefill tokens the next step should take, for engines with ``takes_prefill_budget``; None = the engine's own."""


class Engine(Protocol):
    """Runs requests. Not thread-safe: one driver calls it from one thread."""

    @property
    def capacity(self) -> Capacity:
        """Constant after construction."""

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """Queue requests in the given order; never blocks on their execution. A request that the engine refuses comes
        back as ``Failed``: nothing is raised for one request's sake. Raises EngineError if the engine is gone."""

    def cancel(self, rows: Sequence[int]) -> None:
        """Drop requests; each one that had not finished comes back as ``Preempted(requeue=True)``. Unknown rows are
        ignored."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call, oldest first; waits up to ``timeout_s`` for the first one. Every submitted
        request ends in exactly one of Finished, Failed, Preempted(requeue=True). Raises EngineError if it died."""

    def now_s(self) -> float:
        """The engine's clock."""

    def close(self) -> None:
        """Release everything (processes, sockets). Idempotent; safe in any state."""
