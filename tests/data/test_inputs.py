"""Files as people have them: compressed, piped, with byte-order marks, broken, of the wrong kind."""

from __future__ import annotations

import gzip
import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from plait.data import inputs
from plait.data.inputs import prepare, read_lines
from plait.data.job import read_job
from plait.data.problems import FileError
from plait.errors import JournalError
from tests.data.lines import batch, chat, encoded

TWO = encoded(chat("a"), chat("b"))


def lines_of(path: Path, workdir: Path) -> list[tuple[int, bytes]]:
    """(line number, text) of each line of an input, read by offset as well."""
    source = prepare(path, workdir, 0)
    with source.path.open("rb") as stream:
        found = list(read_lines(source, stream))
    whole = source.path.read_bytes()
    assert all(whole[offset : offset + length].strip() == raw for _, offset, raw, length in found)
    return [(number, raw) for number, _, raw, _ in found]


def ids_of(path: Path | str, workdir: Path) -> list[str | None]:
    """custom_ids of a file in which every line is good."""
    with read_job([path], workdir) as job:
        assert [str(p) for p in job.problems if p.severity == "error"] == []
        return [job.request(row).custom_id for row in range(job.n)]


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(TWO),
        gzip.compress(TWO[:50]) + gzip.compress(TWO[50:]),
        zstandard.compress(TWO),
        zstandard.compress(TWO[:50]) + zstandard.compress(TWO[50:]),
        zstandard.ZstdCompressor(write_checksum=True).compress(TWO),
    ],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x"])
def test_compressed_files_are_known_by_their_first_bytes_not_their_name(
    packed: bytes, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(packed)
    assert ids_of(path, tmp_path / "work") == ["a", "b"]
    assert path.read_bytes() == packed


def test_a_plain_file_with_a_compressed_name_is_read_as_it_is(tmp_path: Path) -> None:
    assert ids_of(batch(tmp_path / "x.jsonl.gz", chat("a")), tmp_path / "work") == ["a"]
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("packed", [gzip.compress(TWO), zstandard.compress(TWO)])
@pytest.mark.parametrize("cut", [5, 20, -1])
def test_a_compressed_file_that_is_cut_short_is_refused(packed: bytes, cut: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(packed[:cut])
    with pytest.raises(FileError) as refused:
        prepare(tmp_path / "x", tmp_path / "work", 0)
    assert refused.value.problem.code == "corrupt_file"


@pytest.mark.parametrize(
    "junk", [b"\x1f\x8bnot gzip at all", b"\x28\xb5\x2f\xfdnot zstd at all", zstandard.compress(TWO) + b"x"]
)
def test_a_compressed_file_that_is_damaged_is_refused(junk: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(junk)
    with pytest.raises(FileError, match="corrupt_file"):
        prepare(tmp_path / "x", tmp_path / "work", 0)


def test_standard_input_and_pipes_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(TWO))))
    assert ids_of("-", tmp_path / "work") == ["a", "b"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(TWO))
    writer.start()
    assert ids_of(pipe, tmp_path / "work") == ["a", "b"]
    writer.join()


def test_closed_standard_input_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(FileError, match="standard input is closed"):
        prepare("-", tmp_path, 0)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    texts = [f"a{c}b" for c in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"]
    lines = [chat(str(i), messages=[{"role": "user", "content": text}]) for i, text in enumerate(texts)]
    with read_job([batch(tmp_path / "x", *lines)], tmp_path) as job:
        assert job.n == len(texts) and not job.bad.any()
        assert [job.request(i).body["messages"][0]["content"] for i in range(job.n)] == texts


def test_crlf_blank_lines_and_a_missing_last_newline_keep_physical_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\n  \t\r\n" + b"\r\n".join([b"A", b"", b" B ", b"", b"", b"C"]))
    assert lines_of(path, tmp_path) == [(3, b"A"), (5, b"B"), (8, b"C")]


def test_byte_order_marks_are_skipped_also_where_files_were_joined(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfA\n\xef\xbb\xbfB\n\xef\xbb\xbf\n\xef\xbb\xbf")
    assert lines_of(path, tmp_path) == [(1, b"A"), (2, b"B")]
    assert prepare(path, tmp_path, 0).has_byte_order_mark


def test_a_line_too_long_to_hold_is_skipped_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 100)
    path = tmp_path / "x"
    path.write_bytes(b"A\n" + b"b" * 101 + b"\n" + b"c" * 1000 + b"\nD\n" + b"e" * 100 + b"\n" + b"f" * 150)
    source = prepare(path, tmp_path, 0)
    with path.open("rb") as stream:
        found = [(number, offset, raw, length) for number, offset, raw, length in read_lines(source, stream)]
    assert [(number, raw, length) for number, _, raw, length in found] == [
        *((1, b"A", 2), (2, b"", 102), (3, b"", 1001), (4, b"D", 2), (5, b"", 101), (6, b"", 150))
    ]
    assert [offset for _, offset, _, _ in found] == [0, 2, 104, 1105, 1107, 1208]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "empty_file", "empty"),
        (b"\n \r\n\n", "empty_file", "blank"),
        (b"\xef\xbb\xbf", "empty_file", "blank"),
        (gzip.compress(b""), "empty_file", "empty"),
        (TWO.decode().encode("utf-16"), "unsupported_format", "UTF-16"),
        (b'[\n  {"custom_id": "a"},\n]\n', "unsupported_format", "many lines"),
        (b'\n{\r\n  "custom_id": "a"\n}\n', "unsupported_format", "many lines"),
        (b'{"key":"a","request":{"contents":[]}}\n', "unsupported_format", "Gemini"),
        (b'{"custom_id":"a","params":{"max_tokens":1,"messages":[]}}\n', "unsupported_format", "Anthropic"),
        (b'\n\n{"custom_id":"a","response":{},"error":null}\n', "unsupported_format", "output file"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_as_a_whole_with_one_sentence(
    content: bytes, code: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(content)
    with read_job([tmp_path / "x"], tmp_path / "work") as job:
        (problem,) = [p for p in job.problems if p.severity == "error"]
    assert (problem.row, problem.line, problem.code) == (-1, 0, code)
    assert words in str(problem) and str(problem).startswith(f"{tmp_path / 'x'}: ")


def test_one_stray_bracket_at_the_start_stops_nothing(tmp_path: Path) -> None:
    with read_job([batch(tmp_path / "x", b"{", chat("a"))], tmp_path) as job:
        assert job.bad.tolist() == [True, False]


def test_missing_folders_and_unreadable_files_are_named(tmp_path: Path) -> None:
    cases = [(tmp_path / "no", "file_not_found"), (tmp_path, "unreadable_file"), (Path("a\0b"), "unreadable_file")]
    for path, code in cases:
        with pytest.raises(FileError) as refused:
            prepare(path, tmp_path, 0)
        assert refused.value.problem.code == code
    secret = batch(tmp_path / "secret", chat())
    secret.chmod(0)
    if not os.access(secret, os.R_OK):
        with pytest.raises(FileError, match="permission denied"):
            prepare(secret, tmp_path, 0)


def test_a_full_disk_is_not_blamed_on_the_input(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(TWO * 10_000))
    work = tmp_path / "work"
    work.mkdir()
    (work / "input-0.unpacked").symlink_to("/dev/full")
    with pytest.raises(JournalError, match="cannot be written: No space left"):
        prepare(tmp_path / "x", work, 0)


@given(
    st.lists(st.sampled_from([b"A", b"{}", b"", b" ", b"\xef\xbb\xbf", b"\xff", b"x" * 40]), max_size=12), st.booleans()
)
def test_every_line_that_is_not_blank_comes_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], crlf: bool
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "x").write_bytes(b"#\n" + (b"\r\n" if crlf else b"\n").join(parts))
    expected = [
        (number, part.removeprefix(b"\xef\xbb\xbf"))
        for number, part in enumerate(parts, start=2)
        if part.strip() and part != b"\xef\xbb\xbf"
    ]
    assert lines_of(folder / "x", folder) == [(1, b"#"), *expected]
