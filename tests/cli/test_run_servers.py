"""``plait run --endpoint`` as a user sees it: faults, limits, secrets, servers that come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.testing_server import FAULTS, Call, LoopbackServer, Reply, answer, echo, error
from tests.cli.command import plait, serving, spawn, wait_until

SECRET = "sk-very-secret-4711"


def batch(folder: Path, n: int, **extra: Any) -> Path:
    """n chat requests whose prompts name their rows."""
    path = folder / "in.jsonl"
    with path.open("w") as file:
        for row in range(n):
            message = {"role": "user", "content": f"question {row}"}
            body = {"model": "m", "messages": [message], "max_tokens": 8, **extra}
            line = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_key_is_in_no_file_and_no_output_whatever_servers_do_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", SECRET)

    def leaky(call: Call) -> Reply:
        assert call.headers["authorization"] == f"Bearer {SECRET}"
        match int(call.prompt.split()[-1]) % 4:
            case 0:
                return error(400, f"bad key {SECRET}")
            case 1:
                return error(500, f"cannot log {SECRET}")
            case 2:
                return Reply(200, f"<html>{SECRET}</html>".encode(), content_type="text/html")
            case _:
                return answer(call, f"your key is {SECRET}")

    with serving(reply=leaky) as server:
        options = ["--endpoint", server.url, "--api-key-env", "PLAIT_TEST_KEY", "--retries", "1", "--progress", "json"]
        result = plait("run", batch(tmp_path, 12), "-o", tmp_path / "out.jsonl", *options, "--json")
    assert result.exit_code == 1 and SECRET not in result.output
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"out.jsonl", "out.errors.jsonl", "out.live.jsonl"} <= {path.name for path in written}
    for path in written:
        assert SECRET.encode() not in path.read_bytes(), path
    assert "your key is ***" in (tmp_path / "out.jsonl").read_text()


def test_max_failures_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    broken = [True]

    def behave(call: Call) -> Reply:
        return FAULTS["500"]() if broken[0] and call.index >= 10 else answer(call, call.prompt)

    source, output = batch(tmp_path, 60), tmp_path / "out.jsonl"
    with serving(reply=behave) as server:
        options = ["--endpoint", server.url, "--retries", "0", "--max-failures", "5", "--max-concurrency", "1"]
        first = plait("run", source, "-o", output, *options, "--progress", "none")
        assert first.exit_code == 3 and "5 requests in a row failed by the server's fault" in first.output
        assert len(server.calls) < 60
        broken[0] = False
        assert plait("run", source, "-o", output, *options, "--progress", "none").exit_code == 0
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines(output)]
    assert texts == [f"question {row}" for row in range(60)]


def test_context_errors_of_the_server_are_recorded_at_once_with_its_words(tmp_path: Path) -> None:
    with serving(reply=lambda call: FAULTS["context-length"]()) as server:
        result = plait("run", batch(tmp_path, 3), "-o", tmp_path / "out.jsonl", "--endpoint", server.url, "--quiet")
        assert len(server.calls) == 3
    failed = [line["response"] for line in lines(tmp_path / "out.errors.jsonl")]
    assert result.exit_code == 1 and [line["status_code"] for line in failed] == [400] * 3
    assert {line["body"]["error"]["code"] for line in failed} == {"context_length_exceeded"}


def test_a_stuck_request_is_named_by_its_custom_id_and_the_run_carries_on(tmp_path: Path) -> None:
    def behave(call: Call) -> Reply:
        return Reply(silent=True) if call.prompt == "question 3" else answer(call, call.prompt, 0, 8, 0.05)

    with serving(reply=behave) as server:
        options = ["--endpoint", server.url, "--stall-timeout", "0.4", "--max-concurrency", "2", "--quiet"]
        options += ["--policy", "fcfs"]
        result = plait("run", batch(tmp_path, 200), "-o", tmp_path / "out.jsonl", *options)
    assert result.exit_code == 1, result.output
    (failed,) = lines(tmp_path / "out.errors.jsonl")
    assert failed["custom_id"] == "id-3" and "id-3" in json.dumps(failed["error"])
    assert len(lines(tmp_path / "out.jsonl")) == 199


def test_a_server_that_is_listed_while_the_run_goes_on_takes_work(tmp_path: Path) -> None:
    def behave(call: Call) -> Reply:
        return answer(call, call.prompt, delay_s=0.05) if call.method == "POST" else echo(call)

    source, listing = batch(tmp_path, 400), tmp_path / "endpoints.txt"
    with LoopbackServer(behave) as first, LoopbackServer(behave) as second:
        listing.write_text(first.url)
        options = ["--endpoints-file", listing, "--model", "echo", "--max-concurrency", "6", "--quiet"]
        process = spawn("run", source, "-o", tmp_path / "out.jsonl", *options)
        wait_until(lambda: len(first.calls) > 5)
        listing.write_text(f"{first.url}\n{second.url}\n")
        _, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints
        assert len(second.calls) > 10
    assert len(lines(tmp_path / "out.jsonl")) == 400
