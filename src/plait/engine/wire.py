"""What the embedded engine's two processes say to each other: MessagePack frames behind a 4-byte length, no pickle."""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from plait.events import Event, Failed, Finished, Preempted, Progress, Started, Step

_LENGTH = struct.Struct("<I")


class Sampling(msgspec.Struct, omit_defaults=True):
    """Generation settings of one request, resolved from its body. Defaults are the OpenAI endpoints'."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: list[str] = []
    include_stop: bool = False
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none wanted; 0: of the chosen tokens; 1: and of the most likely ones (greedy only: they are the same)."""
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None


class Setup(msgspec.Struct, tag=True):
    """First message to the child."""

    model_path: str
    model_name: str
    threads: int
    kv_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    prefix_caching: bool
    start_s: float
    """The parent's ``time.perf_counter`` at the engine's second 0 (one clock for all processes of a machine)."""


class Submit(msgspec.Struct, tag=True):
    """Run this request."""

    row: int
    chat: bool
    token_ids: bytes
    """int32, little-endian."""
    sampling: Sampling


class Cancel(msgspec.Struct, tag=True):
    """Drop these rows."""

    rows: list[int]


class Go(msgspec.Struct, tag=True):
    """The parent has decided on the last batch: nothing more comes in return."""


class Ready(msgspec.Struct, tag=True):
    """First message from the child: the model is loaded."""

    load_s: float


class Refused(msgspec.Struct, tag=True):
    """The only message of a child that could not load the model."""

    message: str


class Batch(msgspec.Struct, tag=True):
    """What happened in a step."""

    started: list[Started] = []
    progress: list[Progress] = []
    preempted: list[Preempted] = []
    finished: list[Finished] = []
    failed: list[Failed] = []
    steps: list[Step] = []

    @property
    def asks(self) -> bool:
        """Whether a request began or ended, so that the parent may have others to send: the child waits for Go."""
        return bool(self.started or self.preempted or self.finished or self.failed)

    def events(self) -> list[Event]:
        """In an order that is true: a request starts before it moves and moves before it ends."""
        return [*self.started, *self.progress, *self.preempted, *self.steps, *self.finished, *self.failed]


ToChild: TypeAlias = Setup | Submit | Cancel | Go
FromChild: TypeAlias = Ready | Refused | Batch

to_child = msgspec.msgpack.Decoder(ToChild).decode
from_child = msgspec.msgpack.Decoder(FromChild).decode
_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over the socket."""
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


def frames(buffer: bytearray) -> list[bytes]:
    """Whole messages at the start of ``buffer``, which keeps the rest."""
    found, at = [], 0
    while at + _LENGTH.size <= len(buffer):
        (length,) = _LENGTH.unpack_from(buffer, at)
        end = at + _LENGTH.size + length
        if end > len(buffer):
            break
        found.append(bytes(buffer[at + _LENGTH.size : end]))
        at = end
    del buffer[:at]
    return found
