"""``plait run`` on the real engine and model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders import batch_line, read_lines, write_batch
from tests.cli.command import plait, press, spawn, wait_until
from tests.crash import real_engine

pytestmark = pytest.mark.engine

ENGINE = ("--kv-tokens", "4096", "--threads", "2", "--progress", "none")
LONG = [batch_line(f"id-{i}", f"Write a long story about the number {i}.", max_tokens=900) for i in range(24)]


def capped(lines: list[str], max_tokens: int = 3) -> list[str]:
    """Lines with a cap that a test has time for, where they can be read."""
    out = []
    for line in lines:
        try:
            request = json.loads(line)
            request["body"].pop("max_completion_tokens", None)
            request["body"]["max_tokens"] = max_tokens
            out.append(json.dumps(request))
        except (ValueError, KeyError, TypeError):
            out.append(line)
    return out


def test_batch_files_as_people_write_them_are_answered_or_refused_line_by_line(shared: Path, tmp_path: Path) -> None:
    paths, expected = [], {}
    for source in sorted((shared / "data" / "batch").glob("*.jsonl")):
        lines = source.read_text("utf-8-sig").split("\n")
        lines = capped([line.rstrip("\r") for line in lines if line.strip()])
        paths.append(write_batch(tmp_path, lines, source.name))
        expected[source.name] = len(lines)
    result = plait("run", *paths, "-o", tmp_path / "out.jsonl", "--allow-duplicates", *ENGINE)
    assert result.exit_code == 1, result.output
    answers, errors = read_lines(tmp_path / "out.jsonl"), read_lines(tmp_path / "out.errors.jsonl")
    assert len(answers) + len(errors) == sum(expected.values())
    faults: dict[str, list[str]] = {}
    for line in errors:
        error: dict[str, Any] = line["response"]["body"]["error"]
        name = Path(error["message"].split(".jsonl:")[0]).name
        faults.setdefault(name, []).append(error["code"])
    assert {name: sorted(codes) for name, codes in faults.items()} == {
        "azure_chat_crlf": ["url_mismatch"] * 3,
        "glm_image_caption": ["url_mismatch"] * 6,
        "vllm_test_embeddings": ["url_mismatch"] * 4,
        "vllm_test_mixed_errors": ["unsupported_value", "url_mismatch"],
    }
    for line in answers:
        body = line["response"]["body"]
        assert body["usage"]["completion_tokens"] <= 3 and body["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_table_without_prompts_is_refused_naming_its_columns(shared: Path, tmp_path: Path) -> None:
    result = plait("run", shared / "data/batch/usage_temporal_rewrite.csv", "-o", tmp_path / "out.jsonl", *ENGINE)
    assert result.exit_code == 2 and "no column named prompt or messages" in result.output


def test_urgent_requests_are_answered_before_the_others_and_lost_deadlines_said_before_starting(tmp_path: Path) -> None:
    """In submission order, two at a time, with everything urgent at the end of the file."""
    settings = {"max_tokens": 20, "ignore_eos": True}
    lines = [batch_line(f"plain-{i}", f"Tell me about the number {i}.", **settings) for i in range(20)]
    urgency = {
        "first": {"priority": 7},
        "hopeless": {"deadline": "0.001s"},
        "easy": {"deadline": "3h"},
    }
    lines += [batch_line(name, f"Say {name}.", metadata=given, **settings) for name, given in urgency.items()]
    options = ("--max-num-seqs", "2", "--policy", "fcfs", "--deadline", "0.1s")
    result = plait("run", write_batch(tmp_path, lines), "-o", tmp_path / "out.jsonl", *ENGINE, *options)
    assert result.exit_code == 0, result.output
    before, after = result.stderr.split("starting ")
    assert "1 requests cannot meet their deadline even alone: 'hopeless'" in before
    assert "its deadline is 0.1 s: 0 of 23 requests would be answered by then" in before
    assert "deadline" not in after
    order = [line["custom_id"] for line in read_lines(tmp_path / "out.live.jsonl") if "custom_id" in line]
    assert len(order) == 23
    assert set(order[:2]) == {"hopeless", "first"} and order[-1] == "easy"


@pytest.mark.crash
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_drains_or_stops_the_engine_and_leaves_files_that_can_be_gone_on_from(
    times: int, tmp_path: Path
) -> None:
    path = write_batch(tmp_path, [batch_line("short", "Say ok.", max_tokens=2), *LONG])
    grace = ["--grace", "1"] if times == 1 else []
    process = spawn("run", path, "-o", tmp_path / "out.jsonl", *ENGINE, *grace)
    live = tmp_path / "out.live.jsonl"
    wait_until(lambda: live.exists() and live.read_bytes().count(b"\n") >= 2)
    press(process)
    if times == 2:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        press(process)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "run the same command again to go on" in said, said
    assert "Traceback" not in said
    answers = [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")]
    assert "short" in answers and len(set(answers)) == len(answers) < 25
    assert not (tmp_path / "out.errors.jsonl").exists() and not (tmp_path / "out.lock").exists()


@pytest.mark.crash
def test_an_engine_that_is_killed_is_started_again_and_all_is_answered(tmp_path: Path) -> None:
    path = write_batch(tmp_path, [batch_line(f"id-{i}", f"Count from {i} on.", max_tokens=60) for i in range(24)])
    process = spawn("run", path, "-o", tmp_path / "out.jsonl", *ENGINE)
    live = tmp_path / "out.live.jsonl"
    wait_until(lambda: live.exists() and live.read_bytes().count(b"\n") >= 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (worker,) = [pid for pid in children if b"openvino_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(worker), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and "killed by signal 9" in said and "requests run again" in said, said
    assert [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")] == [f"id-{i}" for i in range(24)]


@pytest.mark.crash
def test_killed_runs_of_the_real_engine_lose_and_double_nothing(tmp_path: Path) -> None:
    """Three kills; ``python tests/crash/real_engine.py --kills 20`` does more."""
    lines = capped(real_engine.EXAMPLE.read_text().splitlines()[:16], 8)
    command = [sys.executable, real_engine.__file__, "--input", write_batch(tmp_path, lines), "--kills", "3"]
    done = subprocess.run([*map(str, command), "--earliest", "0.6"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 3 and found["wrong"] == []
