"""``plait plan`` as a user meets it; it needs the built-in model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import batch_line, read_lines, write_batch
from tests.cli.command import plait

pytestmark = pytest.mark.engine

STORY = "Once upon a time there was a wizard who counted all the sheep of the valley every evening. " * 12
LINES = [batch_line(f"id-{i}", f"{STORY if i % 2 else 'Short.'} Question {i}?", max_tokens=8 + i) for i in range(8)]


def plan(path: Path, *arguments: object) -> dict[str, Any]:
    """The plan as JSON."""
    result = plait("plan", path, "--kv-tokens", "2048", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_plan_says_what_the_job_is_and_how_long_each_order_takes(tmp_path: Path) -> None:
    found = plan(write_batch(tmp_path, LINES))
    assert (found["requests"], found["cannot_run"], found["problems"]) == (8, 0, [])
    assert 0 < found["unique_prompt_tokens"] < found["prompt_tokens"] and 0.3 < found["sharing"] < 0.8
    assert [row["policy"] for row in found["policies"]] == ["blend", "fcfs", "dfs"]
    assert all(row["makespan_s"] >= (1 - 1e-9) * found["optimum_s"] > 0 for row in found["policies"])
    assert found["bound_by"] in ("compute", "memory")


def test_the_text_form_holds_the_same_for_people(tmp_path: Path) -> None:
    result = plait("plan", write_batch(tmp_path, LINES), "--kv-tokens", "2048", "--goal", "latency")
    assert result.exit_code == 0
    for part in ("8 requests", "prefix sharing", "bound by", "latency", "fcfs", "dfs", "optimum"):
        assert part in result.stdout


def test_rows_that_cannot_run_are_listed_with_their_numbers_and_the_others_planned(tmp_path: Path) -> None:
    path = write_batch(
        tmp_path, [*LINES, "{", batch_line("long", STORY * 20), batch_line("sum", STORY, max_tokens=9000)]
    )
    found = plan(path)
    assert (found["requests"], found["cannot_run"]) == (8, 3)
    codes = {problem["custom_id"]: problem["code"] for problem in found["problems"]}
    assert codes == {None: "invalid_json_line", "long": "kv_capacity_exceeded", "sum": "context_length_exceeded"}
    assert [problem["line"] for problem in found["problems"]] == [9, 10, 11]
    assert all("tokens" in problem["message"] for problem in found["problems"][1:])
    clamped = plan(path, "--on-overflow", "clamp")
    assert (clamped["requests"], clamped["cannot_run"], clamped["clamped"]) == (9, 2, 1)


def test_parameters_that_the_engine_cannot_honour_are_found_before_it_is_loaded(tmp_path: Path) -> None:
    path = write_batch(tmp_path, [*LINES, batch_line("biased", "Hello", logit_bias={"5": 1})])
    (problem,) = plan(path)["problems"]
    assert (problem["custom_id"], problem["code"], problem["line"]) == ("biased", "unsupported_parameter", 9)
    result = plait("run", path, "-o", tmp_path / "out.jsonl", "--strict")
    assert (
        result.exit_code == 2 and f"{path}:9 (custom_id 'biased'): unsupported_parameter: logit_bias" in result.output
    )


def test_the_reordered_file_holds_each_runnable_line_once_and_unchanged(tmp_path: Path) -> None:
    path = write_batch(tmp_path, [*LINES, "{", batch_line("long", STORY * 20)])
    plan(path, "-o", tmp_path / "reordered.jsonl")
    written = (tmp_path / "reordered.jsonl").read_text().splitlines()
    assert sorted(written) == sorted(LINES)
    again = plan(tmp_path / "reordered.jsonl")
    assert again["requests"] == 8 and again["cannot_run"] == 0


def test_rows_of_a_table_are_written_as_the_batch_lines_that_they_mean(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,who,max_tokens\nOnce upon,Ann,3\nBye,Bob,4\n")
    plan(tmp_path / "rows.csv", "-o", tmp_path / "planned.jsonl")
    lines = {line["custom_id"]: line for line in read_lines(tmp_path / "planned.jsonl")}
    body = {"prompt": "Once upon", "max_tokens": 3}
    assert lines.keys() == {"row-1", "row-2"}
    assert lines["row-1"] == {
        "custom_id": "row-1",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
        "who": "Ann",
    }
    assert plait("check", tmp_path / "planned.jsonl").exit_code == 0


@pytest.mark.parametrize("output", ["requests.jsonl", "missing/out.jsonl", "."])
def test_an_output_that_cannot_be_written_is_refused(output: str, tmp_path: Path) -> None:
    path = write_batch(tmp_path, LINES)
    result = plait("plan", path, "--kv-tokens", "2048", "-o", tmp_path / output)
    assert result.exit_code == 2 and path.read_text().splitlines() == LINES


def test_a_file_without_a_request_that_can_run_says_why(tmp_path: Path) -> None:
    result = plait("plan", write_batch(tmp_path, ["{", batch_line("long", STORY * 20)]), "--kv-tokens", "2048")
    assert result.exit_code == 2 and "none of the 2 requests can run" in result.output
    assert "requests.jsonl:1: invalid_json_line" in result.output and "'long'" in result.output


def test_a_deadline_that_cannot_be_met_is_said_with_the_ids_that_miss_it(tmp_path: Path) -> None:
    urgent = [
        batch_line("too-soon", STORY, max_tokens=64, metadata={"deadline": 0.001}),
        batch_line("easy", "Short.", max_tokens=4, metadata={"deadline": "2h", "priority": 3}),
        batch_line("gone", "Short.", max_tokens=4, metadata={"deadline": "2001-01-01T00:00:00Z"}),
    ]
    path = write_batch(tmp_path, [*LINES, *urgent])
    found = plan(path)
    assert found["deadlines"]["hopeless"] == 2 and found["deadlines"]["late"] == 0
    (line,) = found["deadlines"]["messages"]
    assert "'too-soon', 'gone'" in line and "even alone" in line
    late = plan(path, "--deadline", "0.01s")
    assert late["deadlines"]["answered_by_job_deadline"] == 0
    assert "0 of 11 requests would be answered by then" in late["deadlines"]["messages"][-1]
    assert plan(write_batch(tmp_path, LINES), "--deadline", "1d")["deadlines"]["messages"] == []


def test_the_balanced_goal_shows_the_orders_it_chose_from(tmp_path: Path) -> None:
    found = plan(write_batch(tmp_path, LINES), "--goal", "balanced")
    shown = {row["policy"]: row for row in found["policies"]}
    assert {"blend", "balanced:0.5", "latency", "fcfs", "dfs"} <= set(shown)
    fastest_s = min(row["makespan_s"] for name, row in shown.items() if name not in ("fcfs", "dfs"))
    assert shown[found["chosen_policy"]]["makespan_s"] <= 1.03 * fastest_s
    assert found["policies"][0]["policy"] == found["chosen_policy"]


def test_a_deadline_that_is_no_time_is_refused(tmp_path: Path) -> None:
    result = plait("plan", write_batch(tmp_path, LINES), "--deadline", "soon")
    assert result.exit_code == 2 and "30m, 2h or 1d" in result.output


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_seed_below_zero_is_refused(command: str, tmp_path: Path) -> None:
    result = plait(command, write_batch(tmp_path, LINES), "--seed", "-1")
    assert result.exit_code == 2 and "x>=0" in result.output
