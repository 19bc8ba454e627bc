"""Tables as inputs: CSV, TSV, Parquet."""

from __future__ import annotations

import datetime
import gzip
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plait.data.job import Job, read_job
from tests.data.lines import CHAT, COMPLETIONS, MESSAGES


def parquet(path: Path, **columns: list[Any]) -> Path:
    """Write a Parquet file."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def read(path: Path) -> Job:
    """The job of one table."""
    return read_job([path], path.parent / "work")


def errors(job: Job) -> list[tuple[int, str, str | None]]:
    """(line, code, param) of all errors."""
    return [(p.line, p.code, p.param) for p in job.problems if p.severity == "error"]


def test_csv_rows_become_requests_and_other_columns_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(
        'id,prompt,temperature,max_tokens,stop,note\na,"One,\ntwo",0.5,8,5,n1\nb," x ",,,"[""A"", ""B""]",\n',
        encoding="utf-8-sig",
    )
    with read(path) as job:
        first, second = job.request(0), job.request(1)
        assert errors(job) == []
        assert [job.location(row) for row in range(2)] == [f"{path}:2", f"{path}:4"]
    assert (first.custom_id, first.url, first.metadata) == ("a", COMPLETIONS, {"note": "n1"})
    assert first.body == {"prompt": "One,\ntwo", "temperature": 0.5, "max_tokens": 8, "stop": "5"}
    assert (second.custom_id, second.body) == ("b", {"prompt": " x ", "stop": ["A", "B"]})


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ","), ("x.csv", ";"), ("x.tsv", "\t"), ("X.CSV", ",")])
def test_the_delimiter_is_read_from_the_header(name: str, delimiter: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"prompt{delimiter}note\nhello{delimiter}there\n")
    with read(tmp_path / name) as job:
        assert (job.request(0).body, job.request(0).metadata) == ({"prompt": "hello"}, {"note": "there"})
        assert job.custom_id(0) == "row-1"


def test_a_compressed_csv_file_with_one_column_works(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"prompt\nhello\n\nworld"))
    with read(tmp_path / "x.csv.gz") as job:
        assert [job.request(row).body["prompt"] for row in range(job.n)] == ["hello", "world"]
        assert [job.location(row).rsplit(":", 1)[1] for row in range(2)] == ["2", "4"]


def test_csv_messages_are_json_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""Say ok.""}]"\nnot json\n')
    with read(tmp_path / "x.csv") as job:
        assert (job.request(0).url, job.request(0).body) == (CHAT, {"messages": MESSAGES})
        assert errors(job) == [(3, "invalid_type", "messages")]


def test_each_bad_csv_row_is_a_problem_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"prompt,note\nok,1\na,b,c\nonly\n,2\ncaf\xe9,3\nok,4\n")
    with read(tmp_path / "x.csv") as job:
        assert job.bad.tolist() == [False, True, True, True, True, False]
        assert errors(job) == [
            (3, "invalid_row", None),
            (4, "invalid_row", None),
            (5, "invalid_type", "prompt"),
            (6, "invalid_json_line", None),
        ]
        assert "3 cells, the header has 2" in str(job.problems[0]) and "UTF-8" in str(job.problems[3])


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"question,answer\na,b\n", "missing_required_parameter"),
        (b"prompt,x,x\na,b,c\n", "invalid_value"),
        (b'prompt,x\n"a"b,c\n', "corrupt_file"),
        (b'prompt,x\na,"never closed\n', "corrupt_file"),
        (b"prompt,x\n", "empty_file"),
        (b"\n", "empty_file"),
        (b"", "empty_file"),
        ("prompt\nhello".encode("utf-16"), "unsupported_format"),
        (b"pr\xffmpt,\x1b\na,b\n", "missing_required_parameter"),
    ],
)
def test_a_csv_file_that_cannot_be_used_is_refused(content: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    with read(tmp_path / "x.csv") as job:
        assert [(p.line, p.code) for p in job.problems] == [(0, code)]
        assert str(job.problems[0]).isprintable()


def test_parquet_rows_become_requests_and_other_columns_metadata(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "x.parquet",
        custom_id=["a", "b", "c"],
        prompt=["One", "Two", None],
        temperature=[0.0, None, 0.5],
        day=[datetime.date(2024, 2, 29)] * 3,
        blob=[b"\xff"] * 3,
        score=[1, None, float("nan")],
    )
    with read(path) as job:
        assert job.request(0).body == {"prompt": "One", "temperature": 0.0}
        assert job.request(0).metadata == {"day": "2024-02-29", "blob": "/w==", "score": 1}
        assert job.request(1).body == {"prompt": "Two"}
        assert errors(job) == [(3, "invalid_type", "prompt")]
        assert job.deterministic.tolist() == [True, False, False]
        assert job.bad.tolist() == [False, False, True]


def test_parquet_messages_may_be_structures(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y", "name": "n"}]]
    with read(parquet(tmp_path / "x", messages=messages)) as job:
        assert errors(job) == []
        assert job.request(1).body == {"messages": messages[1]}


def test_parquet_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "x", prompt=["a"] * 100).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-20])
    (tmp_path / "fake").write_bytes(b"PAR1")
    for path, code in [
        (tmp_path / "cut", "corrupt_file"),
        (tmp_path / "fake", "corrupt_file"),
        (parquet(tmp_path / "none", text=["a"]), "missing_required_parameter"),
        (parquet(tmp_path / "zero", prompt=[]), "empty_file"),
    ]:
        with read(path) as job:
            assert [(p.line, p.code) for p in job.problems] == [(0, code)]
