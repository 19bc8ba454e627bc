"""What Plait and its vLLM process say to each other, in the frames of ``plait.engine.wire``."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from plait.engine.wire import Batch, Cancel


class Load(msgspec.Struct, tag=True):
    """First message to the child."""

    model: str
    arguments: list[str]
    """As on the command line of ``vllm serve``."""
    start_s: float
    """The parent's ``time.perf_counter`` at the engine's second 0 (one clock for all processes of a machine)."""


class Call(msgspec.Struct, tag=True):
    """Answer this request."""

    row: int
    url: str
    body: bytes


class Encode(msgspec.Struct, tag=True):
    """Count these prompts: (url, body)."""

    requests: list[tuple[str, bytes]]


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded, and this is what it can hold; see ``plait.events.Capacity``."""

    models: list[str]
    kv_tokens: int
    block_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    max_context_tokens: int


class BadArguments(msgspec.Struct, tag=True):
    """vLLM does not take the arguments."""

    message: str


class Encoded(msgspec.Struct, tag=True):
    """Token ids (int32, little-endian) of each prompt; empty where vLLM does not say."""

    ids: list[bytes]


class EngineDead(msgspec.Struct, tag=True):
    """vLLM's engine process is gone; nothing more will be answered."""


ToChild: TypeAlias = Load | Call | Encode | Cancel
FromChild: TypeAlias = Loaded | BadArguments | Encoded | EngineDead | Batch

to_child = msgspec.msgpack.Decoder(ToChild).decode
from_child = msgspec.msgpack.Decoder(FromChild).decode
