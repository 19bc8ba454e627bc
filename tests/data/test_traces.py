"""Length traces in every format people have, and what is said about those that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.traces import Trace, is_mooncake, read_trace, require_fit
from plait.errors import CapacityError, InputError
from plait.table import RequestTable
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import sharing_ratio

CSV = "prompt_tokens,output_tokens,arrival_s,group,shared_tokens\n10,5,0,a,8\n20,6,0.5,,0\n12,7,1.25,a,8\n"


def written(path: Path, text: str) -> Path:
    """The file, compressed if its name says so."""
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def check(trace: Trace) -> None:
    """It is the trace of CSV."""
    assert trace.table.prompt_tokens.tolist() == [10, 20, 12]
    assert trace.output_tokens.tolist() == [5, 6, 7]
    assert trace.table.arrival_s.tolist() == [0, 0.5, 1.25]
    assert sharing_ratio(trace.tree, trace.table.prompt_tokens) == pytest.approx(8 / 42)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_csv_with_groups_is_read(tmp_path: Path, name: str) -> None:
    check(read_trace(written(tmp_path / name, CSV)))


def test_a_byte_order_mark_crlf_extra_columns_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    text = "\ufeffmodel,prompt_tokens, output_tokens\r\nx,10,5\r\n\r\ny,20,6.0\r\n"
    trace = read_trace(written(tmp_path / "t.csv", text))
    assert trace.table.prompt_tokens.tolist() == [10, 20] and trace.output_tokens.tolist() == [5, 6]
    assert trace.tree.n_nodes == 1


@pytest.mark.parametrize("name", ["t.parquet", "t.parquet.gz"])
def test_parquet_is_read(tmp_path: Path, name: str) -> None:
    columns = {
        "prompt_tokens": [10, 20, 12],
        "output_tokens": [5, 6, 7],
        "arrival_s": [0, 0.5, 1.25],
        "group": ["a", None, "a"],
        "shared_tokens": [8, 0, 8],
    }
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table(columns), plain)
    path = tmp_path / name
    path.write_bytes(gzip.compress(plain.read_bytes()) if name.endswith(".gz") else plain.read_bytes())
    check(read_trace(path))


HEAD = "prompt_tokens,output_tokens\n"
GROUPS = "prompt_tokens,output_tokens,group,shared_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; a header line"),
        ("prompt_tokens\n5\n", "no column output_tokens; got prompt_tokens"),
        (HEAD, "no requests below the header"),
        (HEAD + "5,5\n5\n", r"t\.csv:3: 1 values, the header has 2"),
        (HEAD + "5,5\nmany,5\n", r"t\.csv:3: prompt_tokens is 'many'; a finite number"),
        (HEAD + "5,5\n,5\n", r"t\.csv:3: prompt_tokens is ''"),
        (HEAD + "5,nan\n", r"t\.csv:2: output_tokens is 'nan'"),
        (HEAD + "inf,5\n", r"t\.csv:2: prompt_tokens is 'inf'"),
        (HEAD + "5,0\n", r"t\.csv:2: output_tokens is '0'; a whole number from 1"),
        (HEAD + "-3,5\n", r"t\.csv:2: prompt_tokens is '-3'"),
        (HEAD + "5,5\n2.5,5\n", r"t\.csv:3: prompt_tokens is '2\.5'; a whole number"),
        (HEAD + "1e300,5\n", "whole number from 1 to 1,000,000,000"),
        (HEAD + "0,5\n0,5\n", r"2 of 2 rows are bad"),
        (HEAD + '"5,5\n', r"t\.csv:\d+: not CSV"),
        ("prompt_tokens,output_tokens,arrival_s\n5,5,-1\n", r"t\.csv:2: arrival_s is '-1'; a number of seconds >= 0"),
        ("prompt_tokens,output_tokens,group\n5,5,a\n", "group and shared_tokens come together"),
        (GROUPS + "5,5,a,6\n", r"t\.csv:2: shared_tokens is '6'; at most the row's prompt_tokens"),
        (GROUPS + "5,5,a,-1\n", r"t\.csv:2: shared_tokens is '-1'"),
    ],
)
def test_a_bad_csv_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_trace(written(tmp_path / "t.csv", text))


def test_files_that_are_not_what_they_say_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_text(CSV)
    with pytest.raises(InputError, match="is not gzip"):
        read_trace(tmp_path / "t.csv.gz")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(CSV.encode())[:-12])
    with pytest.raises(InputError, match="cut off"):
        read_trace(tmp_path / "cut.csv.gz")
    (tmp_path / "t.parquet").write_text(CSV)
    with pytest.raises(InputError, match="not a Parquet file"):
        read_trace(tmp_path / "t.parquet")
    (tmp_path / "latin.csv").write_bytes("prompt_tokens,output_tokens,é\n".encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8"):
        read_trace(tmp_path / "latin.csv")
    with pytest.raises(InputError, match="not a trace"):
        read_trace(tmp_path / "t.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt_tokens": [1, None], "output_tokens": [1, 1]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"t\.parquet: row 2: prompt_tokens is None"):
        read_trace(tmp_path / "t.parquet")


def mooncake(rows: list[tuple[int, int, int, list[int]]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)


def test_mooncake_blocks_become_a_prefix_tree(tmp_path: Path) -> None:
    text = mooncake([(500, 1500, 5, [1, 2, 3]), (700, 1100, 6, [1, 2, 4]), (900, 600, 7, [9, 2])])
    path = written(tmp_path / "t.jsonl.gz", text)
    trace = read_trace(path)
    assert is_mooncake(path)
    assert trace.table.arrival_s.tolist() == pytest.approx([0, 0.2, 0.4])
    assert sharing_ratio(trace.tree, trace.table.prompt_tokens) == pytest.approx(1024 / 3200)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; Mooncake rows"),
        ("{\n", r"t\.jsonl:1: not JSON"),
        ('\n{"timestamp": 1}\n', r"t\.jsonl:2: not a Mooncake row"),
        (mooncake([(0, 0, 5, [])]), r"t\.jsonl:1: input_length is 0"),
        (mooncake([(0, 600, 5, [1])]), r"t\.jsonl:1: hash_ids must be a list of 2 whole numbers"),
        (mooncake([(0, 5, 5, [1]), (-1, 5, 5, [1])]), r"t\.jsonl:2: timestamp is -1"),
    ],
)
def test_a_bad_mooncake_row_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_trace(written(tmp_path / "t.jsonl", text))


def test_a_batch_of_requests_is_no_mooncake_trace(tmp_path: Path) -> None:
    assert not is_mooncake(written(tmp_path / "r.jsonl", '{"custom_id": "a", "body": {}}\n'))


def test_a_request_that_can_never_fit_is_named() -> None:
    table = RequestTable.of([10, 900])
    trace = Trace("t.csv", table, PrefixTree.without_sharing(2), np.array([5, 200]))
    require_fit(trace, 1100)
    with pytest.raises(
        CapacityError, match=r"t\.csv: request 1 \(0-based\) needs 1,100 KV tokens.*the cache holds 1,099"
    ):
        require_fit(trace, 1099)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=30))
def test_lengths_survive_csv(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]) -> None:
    text = HEAD + "".join(f"{p},{d}\n" for p, d in rows)
    trace = read_trace(written(tmp_path_factory.mktemp("t") / "t.csv", text))
    assert list(zip(trace.table.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) == rows


@pytest.mark.parametrize(
    ("name", "n", "sharing"),
    [
        ("mooncake_conversation_tail.jsonl.gz", 4031, 0.328),
        ("mooncake_synthetic.jsonl.gz", 3993, 0.651),
        ("azure_conv_2023.csv.gz", 19366, 0.0),
        ("servegen_deepseek_r1.csv.gz", 19984, 0.0),
    ],
)
def test_real_traces_have_the_sharing_measured_elsewhere(shared: Path, name: str, n: int, sharing: float) -> None:
    trace = read_trace(shared / "data/traces" / name)
    assert trace.table.n == n
    assert sharing_ratio(trace.tree, trace.table.prompt_tokens) == pytest.approx(sharing, abs=5e-4)


def test_the_failed_request_of_burstgpt_is_named(shared: Path) -> None:
    with pytest.raises(InputError, match=r"burstgpt_head30\.csv:22: prompt_tokens is '0'"):
        read_trace(shared / "data/traces/burstgpt_head30.csv")
