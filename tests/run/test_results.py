"""Reading result files of any writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import InputError
from plait.run.results import read_results, top_errors


def case(shared: Path, name: str) -> dict[str, object]:
    for raw in (shared / "cases" / "cases.jsonl").read_text().splitlines():
        found: dict[str, object] = json.loads(raw)
        if found["id"] == name:
            return found
    raise AssertionError(f"no case {name}")


def test_all_error_shapes_are_read_as_failures(shared: Path, tmp_path: Path) -> None:
    """Case res-01."""
    given = case(shared, "res-01")["input"]
    assert isinstance(given, dict)
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(given["reader_input"]) + "\n")
    results = list(read_results(path))
    assert [result.ok for result in results] == [False, False, False, False, True]
    assert [result.message for result in results[:4]] == ["too long", "bad url", "no such model", "window over"]
    assert [result.code for result in results[:4]] == ["context_length_exceeded", None, "404", "batch_expired"]
    assert results[4].truncated and results[4].custom_id == "5"


def test_messages_are_counted_with_one_custom_id_each(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = [
        {"custom_id": str(i), "response": None, "error": {"code": "x", "message": "even" if i % 2 == 0 else "odd"}}
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    errors = top_errors(read_results(path))
    assert [(error.message, error.count, error.custom_id) for error in errors] == [("even", 3, "0"), ("odd", 2, "1")]


def test_the_place_in_front_of_a_message_is_kept_apart_so_that_equal_messages_count_as_one(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    errors = [{"custom_id": None, "response": None, "error": f"in.jsonl:{line}: not an object"} for line in (3, 7)]
    path.write_text("".join(json.dumps(line) + "\n" for line in errors))
    (error,) = top_errors(read_results(path))
    assert (error.message, error.count, error.place) == ("not an object", 2, "in.jsonl:3")


@pytest.mark.parametrize("raw", ["{", "[]", '{"custom_id": "a"}', '{"response": null, "error": null}', '"x"'])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"custom_id":"a","response":null,"error":"x"}\n' + raw + "\n")
    with pytest.raises(InputError, match=r"results\.jsonl:2: not"):
        list(read_results(path))


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        ({"status_code": 500, "body": None}, None, "status 500"),
        ({"status_code": 200, "body": None}, None, "status 200 without a body"),
        ({"status_code": 422, "body": {"detail": "field required"}}, None, "field required"),
        (None, None, "status None"),
        ("nonsense", None, "status None"),
    ],
)
def test_odd_responses_are_failures_with_a_message(
    tmp_path: Path, response: object, error: object, message: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "response": response, "error": error}))
    (result,) = read_results(path)
    assert not result.ok and result.message == message
