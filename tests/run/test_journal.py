"""The journal: what survives, what is repaired, what is refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import JournalError
from plait.run import journal as module
from plait.run.journal import ANSWERED, FAILED, FAULTED, NONE, Header, Journal, Record, sealed, unseal

ROWS = 6


def line(row: int) -> bytes:
    return b'{"id":"x","custom_id":"row %d","response":null,"error":null}' % row


def made(folder: Path, rows: range = range(ROWS)) -> Path:
    path = folder / "out.live.jsonl"
    Journal.create(path, Header(1, "job", ROWS, {}, {}))
    journal = Journal(path, ROWS)
    for row in rows:
        journal.append(line(row), Record(row, True, prompt=10, cached=4, output=3, finish=("stop",)))
    journal.close()
    return path


def recorded(path: Path) -> list[int]:
    journal = Journal(path, ROWS)
    rows = [row for row in range(ROWS) if journal.state.status[row] != NONE]
    assert all(journal.line(row) == line(row) for row in rows)
    journal.close()
    return rows


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = made(tmp_path)
    journal = Journal(path, ROWS)
    assert recorded(path) == list(range(ROWS))
    assert journal.header == Header(1, "job", ROWS, {}, {})
    state = journal.state
    assert (state.prompt_tokens, state.cached_tokens, state.output_tokens) == (60, 24, 18)
    assert state.finish_reasons == {"stop": 6}
    journal.close()


def test_the_last_record_of_a_row_holds(tmp_path: Path) -> None:
    journal = Journal(made(tmp_path, range(0)), ROWS)
    journal.append(line(0), Record(0, False, retry=True))
    journal.append(line(1), Record(1, False))
    assert journal.state.status[:3].tolist() == [FAULTED, FAILED, NONE]
    journal.append(line(0), Record(0, True))
    assert journal.state.status[0] == ANSWERED
    journal.close()


def test_a_journal_cut_at_any_byte_keeps_every_whole_record(tmp_path: Path) -> None:
    whole = made(tmp_path).read_bytes()
    first = whole.index(b"\n") + 1
    path = tmp_path / "cut.live.jsonl"
    for end in range(first, len(whole) + 1):
        path.write_bytes(whole[:end])
        complete = whole[first:end].count(b"\n") + (whole[end : end + 1] == b"\n")
        assert recorded(path) == list(range(complete)), end
        repaired = path.read_bytes()
        assert repaired.endswith(b"\n") and repaired == whole[: len(repaired)]


def test_a_repaired_journal_can_be_appended_to(tmp_path: Path) -> None:
    path = made(tmp_path, range(3))
    path.write_bytes(path.read_bytes()[:-20])
    journal = Journal(path, ROWS)
    for row in (2, 3):
        journal.append(line(row), Record(row, True))
    journal.close()
    assert recorded(path) == [0, 1, 2, 3]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_changed_byte_is_never_taken_for_an_answer(tmp_path: Path, at: int, flip: int) -> None:
    whole = bytearray(made(tmp_path).read_bytes())
    at %= len(whole)
    whole[at] ^= flip
    path = tmp_path / "bad.live.jsonl"
    path.write_bytes(whole)
    last = whole[:-1].rindex(b"\n") + 1
    try:
        assert recorded(path) == list(range(ROWS if at == len(whole) - 1 else ROWS - 1))
        assert at >= last - 1
    except JournalError as error:
        assert "damaged" in str(error) or "not a journal" in str(error)
        assert at < last


def test_damage_in_the_middle_names_its_place(tmp_path: Path) -> None:
    path = made(tmp_path)
    content = path.read_bytes()
    at = content.index(b"row 2")
    path.write_bytes(content.replace(b"row 2", b"row 9", 1))
    with pytest.raises(JournalError, match=f"byte {content.rindex(b'{', 0, at)} is damaged"):
        Journal(path, ROWS)


@pytest.mark.parametrize("content", [b"", b"notes\n", b'{"plait":{"journal":1,', b'{"custom_id":"a"}\n' * 3])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.live.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="not a journal of Plait"):
        Journal(path, ROWS)
    assert path.read_bytes() == content


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.live.jsonl"
    Journal.create(path, Header(2, "job", ROWS, {}, {}))
    with pytest.raises(JournalError, match="newer Plait"):
        Journal(path, ROWS)


def test_records_reach_the_disk_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = made(tmp_path, range(0)), list[int]()
    journal = Journal(path, ROWS)
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(module, "SYNC_RECORDS", 3)
    monkeypatch.setattr(module, "SYNC_S", 3600.0)
    for row in range(ROWS):
        journal.append(line(row), Record(row, True))
    assert len(synced) == 2
    journal.append(line(0), Record(0, True))
    journal.tick()
    assert len(synced) == 2, "not yet"
    monkeypatch.setattr(module, "SYNC_S", 0.0)
    journal.tick()
    journal.tick()
    assert len(synced) == 3
    journal.close()


def test_a_disk_that_fills_up_in_a_batch_of_records_keeps_those_that_fit_whole(tmp_path: Path) -> None:
    path = made(tmp_path, range(1))
    journal = Journal(path, ROWS)
    size, record = path.stat().st_size, len(sealed(line(1), Record(1, True)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 2 * record + record // 2, limits[1]))
    try:
        for row in range(1, ROWS):
            journal.append(line(row), Record(row, True))
        assert path.stat().st_size == size, "the batch goes to the kernel as a whole"
        with pytest.raises(JournalError, match="Every answer recorded so far is kept"):
            journal.tick()
        assert path.stat().st_size == size + 2 * record
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close()
    assert recorded(path) == [0, 1, 2]


def test_a_body_that_imitates_the_journals_own_key_does_not_confuse_it(tmp_path: Path) -> None:
    path = made(tmp_path, range(0))
    journal = Journal(path, ROWS)
    sly = b'{"id":"x","custom_id":"a","response":{"body":{"a":1,"plait":{"row":5,"ok":false}}},"error":null}'
    journal.append(sly, Record(2, True))
    journal.close()
    journal = Journal(path, ROWS)
    assert journal.line(2) == sly and journal.state.status.tolist() == [0, 0, 1, 0, 0, 0]
    journal.close()
    assert unseal(sly) is None
