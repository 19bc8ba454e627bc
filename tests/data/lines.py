"""Builders of batch lines for the tests of the input side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say ok."}]


def chat(custom_id: str = "a", /, **body: Any) -> dict[str, Any]:
    """A good chat line; keywords replace or add body keys."""
    content = {"model": "m", "messages": MESSAGES, "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": content}


def completion(custom_id: str = "a", /, **body: Any) -> dict[str, Any]:
    """A good completions line."""
    content = {"model": "m", "prompt": "One, two,", "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": content}


def encoded(*lines: object) -> bytes:
    """Lines as JSONL; bytes are taken as they are."""
    parts = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    return b"".join(part + b"\n" for part in parts)


def batch(path: Path, *lines: object) -> Path:
    """Write lines to ``path`` and return it."""
    path.write_bytes(encoded(*lines))
    return path


def case(shared: Path, case_id: str) -> dict[str, Any]:
    """One case of the shared collection of real bug reports."""
    with (shared / "cases" / "cases.jsonl").open(encoding="utf-8") as lines:
        found: dict[str, Any] = next(c for c in map(json.loads, lines) if c["id"] == case_id)
        return found
