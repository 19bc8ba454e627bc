"""Metadata of GGUF files, whole and broken."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.engine.gguf import read_metadata
from plait.errors import InputError
from tests.engine.gguf_files import LLAMA, write_gguf

one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@one_file
@given(
    st.dictionaries(
        st.text("abc.", max_size=8), st.booleans() | st.integers(0, 2**32 - 1) | st.floats(allow_nan=False) | st.text()
    ),
    st.sampled_from([2, 3]),
)
def test_what_was_written_is_read(tmp_path: Path, entries: dict[str, int | float | bool | str], version: int) -> None:
    assert read_metadata(write_gguf(tmp_path / "m.gguf", entries, version)) == entries


def test_arrays_are_skipped(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"tokens": ["a", "", "ccc"], "after": 7})
    assert read_metadata(path) == {"tokens": None, "after": 7}


@one_file
@given(st.data())
def test_a_broken_file_is_an_input_error_or_other_values_and_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {**LLAMA, "tokens": ["a", "b"]}).read_bytes()
    broken = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(0, max(len(broken) - 1, 0)), max_size=4)) if broken else []:
        broken[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "broken.gguf"
    path.write_bytes(broken)
    try:
        read_metadata(path)
    except InputError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\x03\x04" + bytes(40), struct.pack("<4sIQQ", b"GGUF", 1, 0, 0)])
def test_another_format_or_version_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"model\.gguf .*GGUF file"):
        read_metadata(path)
