"""Deadlines and priorities as users write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.job import read_job
from plait.data.urgency import deadline_s, duration_s, priority, settings
from tests.builders import batch_line, write_batch


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("3600", 3600.0),
        ("90s", 90.0),
        ("30m", 1800.0),
        ("1.5 h", 5400.0),
        ("1d", 86400.0),
        ("1970-01-01T01:00:00Z", 2600.0),
        ("1970-01-01T03:00:00+02:00", 2600.0),
        ("1970-01-01T00:00:00Z", -1000.0),
    ],
)
def test_a_deadline_is_seconds_a_duration_or_a_point_in_time(value: Any, seconds: float) -> None:
    assert deadline_s(value, 1000.0) == seconds


@pytest.mark.parametrize(
    "value", [0, -1, True, "soon", "", "2 weeks", [], {}, 1_900_000_000, "1900000000", float("nan"), float("inf"), "٣"]
)
def test_anything_else_is_no_deadline(value: Any) -> None:
    assert deadline_s(value, 0.0) is None


@given(st.text(), st.integers())
def test_text_and_numbers_of_any_kind_are_read_or_refused(text: str, number: int) -> None:
    for value in (text, number, str(number)):
        deadline_s(value, 0.0)
        priority(value)
    assert duration_s(text) is None or duration_s(text) > 0  # type: ignore[operator]


def test_a_priority_is_a_whole_number_or_its_digits() -> None:
    assert [priority(value) for value in (3, "-2", 0)] == [3, -2, 0]
    assert [priority(value) for value in ("high", 1.5, True, 2**40, None)] == [None] * 5


def test_the_metadata_of_the_body_says_more_than_keys_of_the_row() -> None:
    found = settings({"priority": 1, "deadline": "5m", "other": 2}, {"metadata": {"priority": "7"}})
    assert found == {"priority": "7", "deadline": "5m"}
    assert settings({"metadata": {"deadline": 9}}, {"priority": 4}) == {"deadline": 9}


def test_what_cannot_be_read_is_a_problem_at_its_line(tmp_path: Path) -> None:
    row = json.dumps({"id": "d", "prompt": "x", "priority": "high"})
    lines = [
        batch_line("a", "x", metadata={"deadline": "30m", "priority": "2"}),
        batch_line("b", "x", metadata={"deadline": "soon"}),
        batch_line("c", "x", metadata={"note": "plain"}),
        row,
    ]
    with read_job([write_batch(tmp_path, lines)], tmp_path) as job:
        assert job.bad.tolist() == [False, True, False, True]
        said = [str(problem) for problem in job.problems if problem.severity == "error"]
    assert len(said) == 2
    assert ":2 (custom_id" in said[0] and '"soon"' in said[0] and "ISO 8601" in said[0]
    assert ":4 (custom_id" in said[1] and '"high"' in said[1] and "higher goes first" in said[1]
