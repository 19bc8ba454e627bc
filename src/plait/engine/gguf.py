"""Metadata of a GGUF file, read without its tensors (format: ggml's docs/gguf.md, versions 2 and 3)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, TypeAlias

from plait.errors import InputError

Value: TypeAlias = int | float | bool | str | None

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> struct format. 8 is a string, 9 an array."""
_STRING, _ARRAY = 8, 9
_LONGEST_BYTES = 1 << 26
"""Of a text; a damaged length must not ask for all memory."""


def read_metadata(path: Path) -> dict[str, Value]:
    """Scalars and strings of the header by key; arrays are skipped and given as None. Raises InputError."""
    try:
        with path.open("rb") as file:
            magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise InputError(f"{path} is not a GGUF file of version 2 or 3")
            return dict(_entry(file) for _ in range(count))
    except (OSError, EOFError, OverflowError, RecursionError, ValueError, KeyError, struct.error) as error:
        raise InputError(f"{path} cannot be read as a GGUF file: {error}") from None


def _entry(file: BinaryIO) -> tuple[str, Value]:
    key = _string(file)
    return key, _value(file, _number(file, "I"))


def _number(file: BinaryIO, code: str) -> int:
    return int(struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0])


def _string(file: BinaryIO) -> str:
    length = _number(file, "Q")
    data = file.read(min(length, _LONGEST_BYTES))
    if len(data) < length:
        raise EOFError("it ends inside a text")
    return data.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        _skip_array(file)
        return None
    code = "<" + _SCALARS[kind]
    value: Value = struct.unpack(code, file.read(struct.calcsize(code)))[0]
    return value


def _skip_array(file: BinaryIO) -> None:
    kind, count = _number(file, "I"), _number(file, "Q")
    if kind in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[kind]), 1)
        return
    for _ in range(count):
        if kind == _STRING:
            file.seek(_number(file, "Q"), 1)
        else:
            _skip_array(file)
