"""Cases from real bug reports (../shared/cases), run through the command line.

The others of these kinds are tests of the part that owns them: dur-02 and dur-04 in tests/run/test_executor.py, res-01
in tests/run/test_results.py, res-04 and srv-* in tests/engine_http/test_http.py, plan-04 and the running half of
plan-01 in tests/test_simulate.py, the checking half of in-* in tests/data/test_job.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from plait.data.problems import Fault
from plait.engine.models import LocalModel, find_model
from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.specs import device, model
from plait.model.steptime import for_machine
from plait.plan import Machine, outlook
from plait.run.prepare import prepare
from plait.table import I32
from plait.testing_server import Call, LoopbackServer, Reply, answer, error
from tests.builders import batch_line, job_of, read_lines, write_batch
from tests.cli.command import plait, serving, spawn, wait_until
from tests.data.lines import case


def run(server: LoopbackServer, source: Path, *arguments: object) -> Result:
    """Run a file against a server; the output is ``out.jsonl`` beside it."""
    options = ["-o", source.with_name("out.jsonl"), "--endpoint", server.url, "--progress", "none"]
    return plait("run", source, *options, *arguments)


def written(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of the output and of the error file."""
    paths = (folder / "out.jsonl", folder / "out.errors.jsonl")
    answers, errors = (read_lines(path) if path.exists() else [] for path in paths)
    return answers, errors


def texts(lines: list[dict[str, Any]]) -> list[str]:
    """The text of each answer."""
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]


def lines_of(shared: Path, case_id: str, folder: Path) -> Path:
    """The case's lines as a batch file."""
    return write_batch(folder, case(shared, case_id)["input"]["lines"])


def test_in_01_bad_lines_become_error_rows_and_the_others_are_answered(shared: Path, tmp_path: Path) -> None:
    with serving() as server:
        result = run(server, lines_of(shared, "in-01", tmp_path))
    answers, errors = written(tmp_path)
    assert result.exit_code == 1 and [line["custom_id"] for line in answers] == ["a", "d"]
    assert [(line["custom_id"], line.get("line")) for line in errors] == [
        ("b", None),
        (None, 3),
        (None, 4),
        (None, 5),
        ("c", None),
    ]
    assert all(line["response"]["status_code"] == 400 for line in errors)


def test_in_02_a_custom_id_used_twice_is_refused_before_anything_is_sent(shared: Path, tmp_path: Path) -> None:
    path = lines_of(shared, "in-02", tmp_path)
    with serving() as server:
        result = run(server, path)
        assert (result.exit_code, len(server.calls)) == (2, 0)
        assert "'r1'" in result.output and f"{path}:3" in result.output and f"{path}:1" in result.output
        assert run(server, path, "--allow-duplicates").exit_code == 0
    answers, _ = written(tmp_path)
    assert [line["custom_id"] for line in answers] == ["r1", "r2", "r1"]
    assert texts(answers) == ["first", "second", "third"]


def test_in_04_byte_order_mark_crlf_and_blank_lines_run(shared: Path, tmp_path: Path) -> None:
    given = case(shared, "in-04")["input"]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(bytes.fromhex(given["bytes_hex_prefix"]) + "\r\n".join(given["lines_crlf"]).encode())
    with serving() as server:
        assert run(server, path).exit_code == 0
    assert [line["custom_id"] for line in written(tmp_path)[0]] == ["b1", "b2", "b3"]


def test_in_05_wrong_urls_methods_and_models_are_rows_of_the_error_file(shared: Path, tmp_path: Path) -> None:
    def behave(call: Call) -> Reply:
        return answer(call, "ok") if call.path == "/v1/chat/completions" else error(404, f"no route {call.path}")

    with serving(reply=behave) as server:
        result = run(server, lines_of(shared, "in-05", tmp_path))
        sent = [(call.path, call.body["model"]) for call in server.calls]
    answers, errors = written(tmp_path)
    assert result.exit_code == 1 and [line["custom_id"] for line in answers] == ["k1"]
    assert [line["custom_id"] for line in errors] == ["k2", "k3", "k4", "k5"]
    assert sorted(sent) == [("/v1/chat/completions", "m"), ("/v1/embeddings", "m")]
    unknown = errors[2]["response"]["body"]["error"]
    assert unknown["code"] == "model_not_found" and "the engine serves: m" in unknown["message"]


@pytest.mark.crash
def test_dur_01_a_killed_run_sends_only_the_rest(tmp_path: Path) -> None:
    chance = random.Random(1)
    path = write_batch(tmp_path, [batch_line(f"id-{i}", f"question {i}") for i in range(200)])

    before_the_kill, killed = threading.Semaphore(120), threading.Event()

    def behave(call: Call) -> Reply:
        if not killed.is_set() and not before_the_kill.acquire(blocking=False):
            return Reply(silent=True)  # however late the kill comes, the run is not done
        return Reply(body=answer(call, call.prompt).body, delay_s=chance.uniform(0.02, 0.06))

    with serving(reply=behave) as server:
        options = ["--endpoint", server.url, "--max-concurrency", "8", "--quiet", "-o", tmp_path / "out.jsonl"]
        process = spawn("run", path, *options)
        live = tmp_path / "out.live.jsonl"
        wait_until(lambda: live.exists() and live.read_bytes().count(b"\n") > 80)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        killed.set()
        kept, flying = live.read_bytes().count(b"\n") - 1, server.max_in_flight
        on_disk = [json.loads(line)["custom_id"] for line in live.read_bytes().splitlines()[1 : kept + 1]]
        assert 80 <= kept < 200 and flying <= 8
        assert plait("run", path, *options).exit_code == 0
        calls = Counter(call.prompt for call in server.calls)
        assert all(calls[f"question {name[3:]}"] == 1 for name in on_disk) and max(calls.values()) <= 2
    answers, _ = written(tmp_path)
    assert [line["custom_id"] for line in answers] == [f"id-{i}" for i in range(200)]
    assert texts(answers) == [f"question {i}" for i in range(200)]


def test_res_02_where_all_fail_the_message_is_said_once_with_its_count(shared: Path, tmp_path: Path) -> None:
    with serving(reply=lambda call: error(400, "unsupported parameter")) as server:
        result = run(server, lines_of(shared, "res-02", tmp_path), "--no-dedupe")
    answers, errors = written(tmp_path)
    assert result.exit_code == 1 and (len(answers), len(errors)) == (0, 3)
    assert result.output.count("unsupported parameter") == 1 and "3 x unsupported parameter" in result.output


class Words:
    """A token is a word."""

    def encode_many(self, requests: list[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """The numbers that the words are."""
        return [np.array(body["messages"][0]["content"].split(), np.int32) for _, body in requests]


def test_plan_01_the_shareable_part_of_prefix_groups_is_found_and_reuse_predicted(shared: Path, tmp_path: Path) -> None:
    shape = case(shared, "plan-01")["input"]["generate"]
    groups, each, prefix, tail = (shape[k] for k in ("groups", "per_group", "prefix_tokens", "tail_tokens"))
    lines = [
        batch_line(
            f"{g}-{i}",
            " ".join(map(str, [g * 1000 + k for k in range(prefix)] + [10_000 + i * 1000 + k for k in range(tail)])),
            max_tokens=shape["max_tokens"],
        )
        for i in range(each)
        for g in range(groups)
    ]
    capacity = Capacity(kv_tokens=1200, block_tokens=16, max_batched_tokens=512, prefix_lookup_at_submit=True)
    with job_of(tmp_path, lines) as job:
        ready = prepare(job, np.arange(job.n), Words(), capacity)
    machine = Machine(capacity, for_machine(device("A100-80"), model("Llama-3.1-8B"), "sequential"))
    found = outlook(ready.table, ready.tree, Lengths.unknown(ready.table, ready.tree), machine, ["blend", "fcfs"])
    assert round(found.sharing, 2) == 0.86
    assert found.prompt_tokens - found.unique_prompt_tokens == groups * (each - 1) * prefix
    possible = found.prompt_tokens - found.unique_prompt_tokens
    reused = [(found.prompt_tokens - forecast.prefill_tokens) / possible for forecast in found.forecasts]
    assert reused[0] >= 0.9 and reused[1] < 0.5


@pytest.fixture(scope="module")
def local_model() -> LocalModel:
    """The built-in model, for its tokenizer."""
    return find_model()


@pytest.mark.engine
@pytest.mark.parametrize("on_overflow", ["error", "clamp", "skip"])
def test_plan_02_requests_beyond_the_context_are_never_sent(
    shared: Path, tmp_path: Path, on_overflow: str, local_model: LocalModel
) -> None:
    with serving(max_model_len=1024) as server:
        options = ["--tokenizer", local_model.path, "--kv-tokens", "4096", "--on-overflow", on_overflow]
        result = run(server, lines_of(shared, "plan-02", tmp_path), *options)
        sent = {call.body["max_tokens"] for call in server.calls}
    answers, errors = written(tmp_path)
    assert result.exit_code == 1
    faults = {line["custom_id"]: line["response"]["body"]["error"] for line in errors}
    assert all("1024 tokens" in fault["message"] for fault in faults.values())
    if on_overflow == "clamp":
        assert [line["custom_id"] for line in answers] == ["fit", "sum", "fit2"] and set(faults) == {"long"}
        assert answers[1]["metadata"] == {"max_tokens_clamped_from": 400} and 8 in sent and max(sent) < 400
    else:
        assert [line["custom_id"] for line in answers] == ["fit", "fit2"] and set(faults) == {"long", "sum"}
        assert sent == {8} and "max_tokens is 400" in faults["sum"]["message"]
        wanted = "skipped" if on_overflow == "skip" else "context_length_exceeded"
        assert {fault["code"] for fault in faults.values()} == {wanted}
    assert json.dumps(answers[0]["response"]["body"]["choices"][0]["message"]["content"]) == '"Say ok."'
