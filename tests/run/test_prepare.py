"""Rows of a job -> planning data: caps, overflow, what cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.problems import Fault
from plait.events import Capacity
from plait.run.prepare import LEAST_SHARED_TOKENS, Prepared, asked_tokens, prepare, with_cap
from plait.table import I32
from tests.builders import batch_line, job_of

CAPACITY = Capacity(kv_tokens=256, block_tokens=16, max_context_tokens=200)


class Letters:
    """A token is a letter of the prompt; "?" cannot be read."""

    def encode_many(self, requests: list[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """Code points, or a fault."""
        texts = [body["messages"][0]["content"] for _, body in requests]
        return [
            Fault("bad", "unreadable") if "?" in text else np.array(list(map(ord, text)), np.int32) for text in texts
        ]


def prepared(folder: Path, *lines: str, **options: Any) -> Prepared:
    """All lines prepared."""
    with job_of(folder, lines) as job:
        return prepare(job, np.arange(job.n), Letters(), CAPACITY, **options)


def test_tokens_of_all_rows_lie_one_after_another(tmp_path: Path) -> None:
    ready = prepared(tmp_path, batch_line("a", "abc"), batch_line("b", "?"), batch_line("c", "de"))
    assert ready.rows.tolist() == [0, 2] and set(ready.faults) == {1}
    assert ready.table.tokens is not None and ready.table.offsets is not None
    assert bytes(ready.table.tokens.astype(np.uint8)) == b"abcde" and ready.table.offsets.tolist() == [0, 3, 5]


@pytest.mark.parametrize(("on_overflow", "code"), [("error", "context_length_exceeded"), ("skip", "skipped")])
def test_a_request_that_cannot_fit_is_refused_with_the_numbers(tmp_path: Path, on_overflow: Any, code: str) -> None:
    ready = prepared(tmp_path, batch_line("a", "x" * 150, max_tokens=51), on_overflow=on_overflow)
    fault = ready.faults[0]
    assert fault.code == code and not len(ready.rows)
    assert "150 tokens" in fault.message and "max_tokens is 51" in fault.message and "200 tokens" in fault.message


def test_clamping_lowers_the_cap_to_the_room_and_notes_it(tmp_path: Path) -> None:
    lines = [batch_line("a", "x" * 150, max_tokens=51), batch_line("b", "x" * 250), batch_line("c", "x")]
    ready = prepared(tmp_path, *lines, on_overflow="clamp")
    assert ready.rows.tolist() == [0, 2] and ready.table.max_tokens.tolist() == [50, 16]
    assert ready.notes() == {0: {"max_tokens_clamped_from": 51}} and set(ready.faults) == {1}


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"ignore_eos": True}, 16),
        ({"ignore_eos": True, "n": 2}, 32),
        ({"ignore_eos": True, "stop": ["."]}, 0),
        ({"ignore_eos": False, "min_tokens": 4}, 4),
        ({"min_tokens": 99}, 16),
        ({}, 0),
    ],
)
def test_an_answer_that_nothing_ends_is_known_to_be_as_long_as_its_cap(
    tmp_path: Path, settings: dict[str, Any], least: int
) -> None:
    table = prepared(tmp_path, batch_line("a", "x", max_tokens=16, **settings)).table
    assert table.min_tokens.tolist() == [least]


def test_rows_that_are_refused_beforehand_are_not_tokenised(tmp_path: Path) -> None:
    ready = prepared(tmp_path, batch_line("a", "x"), batch_line("b", "y"), refused={0: Fault("no", "not served")})
    assert ready.rows.tolist() == [1] and ready.faults[0].code == "no"


def test_a_request_without_a_cap_gets_the_default_or_all_the_room(tmp_path: Path) -> None:
    line = batch_line("a", "x" * 10, max_tokens=None)
    assert prepared(tmp_path, line).table.max_tokens.tolist() == [190]
    assert prepared(tmp_path, line, default_max_tokens=7).table.max_tokens.tolist() == [7]
    assert prepared(tmp_path, batch_line("a", "xx", n=3)).table.max_tokens.tolist() == [48]


def test_a_few_equal_first_tokens_are_no_group(tmp_path: Path) -> None:
    few, enough = "a" * (LEAST_SHARED_TOKENS - 1), "b" * 2 * LEAST_SHARED_TOKENS
    ready = prepared(
        tmp_path, *[batch_line(f"{start[0]}{i}", f"{start}{i}") for start in (few, enough) for i in range(3)]
    )
    nodes = ready.tree.node_of
    assert set(nodes[:3].tolist()) == {0} and len(set(nodes[3:].tolist())) == 1 and nodes[3] != 0


@given(most=st.none() | st.integers(1, 99), completion=st.none() | st.integers(1, 99), cap=st.integers(1, 99))
def test_a_cap_is_found_where_it_was_put(most: int | None, completion: int | None, cap: int) -> None:
    body = {"max_tokens": most, "max_completion_tokens": completion}
    assert asked_tokens(body) == (most if completion is None else completion)
    assert asked_tokens(with_cap(body, cap)) == cap


def test_nothing_to_prepare_is_an_empty_table(tmp_path: Path) -> None:
    assert prepared(tmp_path, batch_line("a", "?")).table.n == 0
