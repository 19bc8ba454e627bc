"""Small helpers of the pool's tests: requests, a driver that counts endings, quick settings."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from plait.engine.http import HttpPool, HttpSettings
from plait.events import EngineRequest, Event, Failed, Finished, Preempted

TERMINAL = (Finished, Failed, Preempted)
LIMIT_S = 300.0
"""Only guards against waiting for ever."""


def chat(row: int, prompt: str | None = None, max_tokens: int = 8, affinity: int = -1, **extra: Any) -> EngineRequest:
    """A chat request whose prompt names its row."""
    text = f"prompt of row {row}" if prompt is None else prompt
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **extra}
    return EngineRequest(row, "/v1/chat/completions", body, None, max_tokens, affinity)


def settings(*urls: str, **changes: Any) -> HttpSettings:
    """Settings with short pauses, and with patience: what a test waits for must not fail because a machine stalls."""
    quick: dict[str, Any] = {"backoff_s": 0.02, "max_backoff_s": 0.2, "stall_timeout_s": 120.0, "patience_s": 120.0}
    return HttpSettings(urls, **(quick | changes))


def collect(pool: HttpPool, n: int, limit_s: float = LIMIT_S) -> list[Event]:
    """All events until n requests have ended; fails the test when that takes longer than ``limit_s``."""
    events: list[Event] = []
    ended = 0
    until_s = time.monotonic() + limit_s
    while ended < n:
        assert time.monotonic() < until_s, f"{ended} of {n} ended after {limit_s} s"
        new = pool.poll(0.2)
        ended += sum(isinstance(event, TERMINAL) for event in new)
        events += new
    return events


def run(requests: Sequence[EngineRequest], limits: HttpSettings, limit_s: float = LIMIT_S) -> dict[int, Event]:
    """Submit everything, wait for the end, and return each row's one terminal event."""
    pool = HttpPool(limits)
    try:
        pool.submit(requests)
        return endings(collect(pool, len(requests), limit_s))
    finally:
        pool.close()


def endings(events: Sequence[Event]) -> dict[int, Event]:
    """Row -> its terminal event; a row that ended twice fails the test."""
    found: dict[int, Event] = {}
    for event in events:
        if isinstance(event, TERMINAL):
            assert event.row not in found, f"row {event.row} ended twice: {found[event.row]} and {event}"
            found[event.row] = event
    return found


def content(event: Event) -> str:
    """Text of an answered row."""
    assert isinstance(event, Finished) and event.status_code == 200, event
    text: str = json.loads(event.body)["choices"][0]["message"]["content"]
    return text
