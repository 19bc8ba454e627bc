"""Planning without a tokenizer: four bytes of prompt text stand for a token.

Sharing is then known to within one unit. How many tokens prompts really are is learned from ``usage`` where it matters:
by the pool of servers (``plait.engine.pace``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from plait.table import I32, I64

UNIT_BYTES = 4
"""About what a token of English text takes with common vocabularies."""
_PLAN_NOTHING = frozenset(
    {"model", "max_tokens", "max_completion_tokens", "temperature", "seed", "stream", "user", "n"}
)
_encode = msgspec.json.Encoder(order="sorted").encode


def prompt_bytes(body: dict[str, Any]) -> bytes:
    """The part of a request's body that becomes its prompt, in the order in which a server would read it: tools and
    messages of a chat, ``prompt`` of a completion, ``input`` of embeddings and responses, else all but the settings."""
    messages = body.get("messages")
    if isinstance(messages, list):
        tools = [_encode(body["tools"])] if body.get("tools") else []
        return b"\x1e".join(tools + [_message(message) for message in messages])
    for name in ("prompt", "input", "query"):
        if name in body:
            lead = [_text(body["instructions"])] if body.get("instructions") else []
            return b"\x1e".join([*lead, _text(body[name])])
    return _encode({key: value for key, value in body.items() if key not in _PLAN_NOTHING})


def pseudo_tokens(prompts: Iterable[bytes]) -> tuple[I32, I64]:
    """Token columns of ``RequestTable``: int32 [offsets[-1]] of four bytes each (the last one filled up with zeros; an
    empty prompt has one unit), and offsets, int64 [n + 1]."""
    padded = bytearray()
    ends = [0]
    for prompt in prompts:
        padded += prompt
        padded += bytes(-len(prompt) % UNIT_BYTES if prompt else UNIT_BYTES)
        ends.append(len(padded) // UNIT_BYTES)
    return np.frombuffer(bytes(padded), "<i4").astype(np.int32), np.array(ends, np.int64)


def _message(message: object) -> bytes:
    if not isinstance(message, dict):
        return _text(message)
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    parts = [str(message.get("role", "")).encode("utf-8", "surrogatepass"), _text(message.get("content", ""))]
    return b"\x1f".join(parts + ([_encode(rest)] if rest else []))


def _text(value: object) -> bytes:
    """Strings as they are; lists of parts or token ids as JSON."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _encode(value)
