"""One request on its way through a pool of servers, and which prefix group it belongs to."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from plait.engine.answers import Fault
from plait.events import EngineRequest
from plait.table import NO_LIMIT

AFFINITY_CHARS = 256
AFFINITY_TOKENS = 64
UNKNOWN_OUTPUT_TOKENS = 256


@dataclass(eq=False, slots=True)
class Flight:
    """One request on its way through the pool, from ``submit`` to its terminal event."""

    row: int
    name: str
    """What messages call it."""
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
    """Others of its group wait on this server until its prefix is there."""

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


def flight_of(request: EngineRequest, body: bytes, bytes_per_token: float) -> Flight:
    """A flight with its expected work: prompt tokens (from bytes where the job was not tokenised) plus output."""
    prompt = len(body) / bytes_per_token if request.token_ids is None else float(len(request.token_ids))
    work = prompt + min(request.max_tokens, UNKNOWN_OUTPUT_TOKENS)
    name = request.name or f"row {request.row}"
    return Flight(request.row, name, request.url, body, request.max_tokens, affinity_of(request), prompt, work)
