"""``plait check --endpoint``: what a server says of itself is held against the job; nothing is sent to be answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.engine.models import find_model
from plait.testing_server import LoopbackServer, error
from tests.cli.command import plait, serving


def batch(path: Path, *rows: tuple[str, str, int]) -> Path:
    """A batch file of (model, prompt, max_tokens)."""
    with path.open("w") as file:
        for number, (model, prompt, max_tokens) in enumerate(rows):
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
            line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def test_a_job_that_suits_the_server_passes_and_the_server_is_described(tmp_path: Path) -> None:
    source = batch(tmp_path / "a.jsonl", ("m", "hello", 8))
    with serving(max_model_len=1024) as server:
        result = plait("check", source, "--endpoint", server.url)
        assert not server.calls, "nothing was sent to be answered"
    assert result.exit_code == 0, result.output
    assert f"{server.url}: reachable; serves m; context length 1024 tokens, not checked" in result.stdout


def test_a_model_that_is_not_served_and_a_prompt_beyond_the_context_are_problems_of_their_lines(tmp_path: Path) -> None:
    source = batch(tmp_path / "a.jsonl", ("m", "hello", 8), ("other", "hello", 8), ("m", "word " * 300, 900))
    with serving(max_model_len=1024) as server:
        options = ["--endpoint", server.url, "--tokenizer", find_model().path]
        result = plait("check", source, *options)
        as_json = json.loads(plait("check", source, *options, "--json").stdout)
    assert result.exit_code == 2
    assert "a.jsonl:2" in result.stdout and "model_not_found" in result.stdout
    assert "a.jsonl:3" in result.stdout and "context_length_exceeded" in result.stdout
    assert as_json["errors"] == {"model_not_found": 1, "context_length_exceeded": 1} and as_json["good"] == 1


def test_servers_that_do_not_answer_are_named_with_exit_code_2(tmp_path: Path) -> None:
    source = batch(tmp_path / "a.jsonl", ("m", "hello", 8))
    with serving() as server, LoopbackServer() as gone:
        gone.kill()
        for endpoints in ([gone.url], [server.url, gone.url]):
            options = [option for url in endpoints for option in ("--endpoint", url)]
            result = plait("check", source, *options)
            assert result.exit_code == 2 and gone.url in result.stderr, result.output


def test_a_key_that_is_refused_is_said_with_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", "sk-not-good")
    source = batch(tmp_path / "a.jsonl", ("m", "hello", 8))
    with LoopbackServer(lambda call: error(401, "no")) as server:
        result = plait("check", source, "--endpoint", server.url, "--api-key-env", "PLAIT_TEST_KEY")
    assert result.exit_code == 2 and "PLAIT_TEST_KEY" in result.stderr and "sk-not-good" not in result.output


def test_servers_that_serve_different_models_are_refused_and_only_common_ones_count(tmp_path: Path) -> None:
    source = batch(tmp_path / "a.jsonl", ("m", "hello", 8))
    with serving("m") as first, serving("other") as second, serving("m") as third:
        refused = plait("check", source, "--endpoint", first.url, "--endpoint", second.url)
        assert refused.exit_code == 2 and "no model in common" in refused.stderr and second.url in refused.stderr
        assert plait("check", source, "--endpoint", first.url, "--endpoint", third.url).exit_code == 0
