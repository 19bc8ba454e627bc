"""Hand-made GGUF files: a header without tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = int | float | bool | str | list[str]

LLAMA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.context_length": 2048,
    "llama.block_count": 4,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
}


def write_gguf(path: Path, entries: Mapping[str, Value], version: int = 3) -> Path:
    """A file with these metadata."""
    data = struct.pack("<4sIQQ", b"GGUF", version, 0, len(entries))
    for key, value in entries.items():
        data += _text(key) + _value(value)
    path.write_bytes(data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
