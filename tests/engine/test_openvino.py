"""The embedded engine on the real model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plait.data.schema import CHAT
from plait.engine.machine import EngineSettings
from plait.engine.models import LocalModel, find_model
from plait.engine.openvino import OpenVinoEngine
from plait.errors import EngineError
from plait.events import EngineRequest, Event, Failed, Finished, Preempted, Started, Step
from plait.testing import check_engine
from tests.cli.command import wait_until

pytestmark = pytest.mark.engine
LONG = "The quick brown fox jumps over the lazy dog. " * 60


def chat(row: int, content: str, max_tokens: int = 12, **body: Any) -> EngineRequest:
    messages = [{"role": "user", "content": content}]
    return EngineRequest(row, CHAT, {"messages": messages, "temperature": 0, **body}, None, max_tokens)


def run(engine: OpenVinoEngine, requests: list[EngineRequest]) -> dict[int, Any]:
    """Submit and wait for every end; what the engine gives back is submitted again."""
    ends: dict[int, Any] = {}
    while len(ends) < len(requests):
        left = [request for request in requests if request.row not in ends]
        engine.submit(left)
        found = drain(engine, {request.row for request in left})
        ends |= {row: end for row, end in found.items() if not isinstance(end, Preempted)}
    return ends


def drain(engine: OpenVinoEngine, rows: set[int]) -> dict[int, Any]:
    ends: dict[int, Any] = {}
    deadline_s = time.monotonic() + 500
    while ends.keys() != rows and time.monotonic() < deadline_s:
        for event in engine.poll(1.0):
            if isinstance(event, Finished | Failed) or (isinstance(event, Preempted) and event.requeue):
                assert event.row not in ends, "a request ended twice"
                ends[event.row] = event
    assert ends.keys() == rows
    return ends


def until(engine: OpenVinoEngine, kind: type[Finished] | type[Step]) -> list[Event]:
    """The first events that hold one of this kind."""
    events: list[Event] = []
    while not any(isinstance(event, kind) for event in events):
        events = engine.poll(1.0)
    return events


def choices(end: Any) -> list[dict[str, Any]]:
    assert isinstance(end, Finished), end
    found: list[dict[str, Any]] = json.loads(end.body)["choices"]
    return found


def test_an_answer_is_sane_and_has_the_endpoints_shape(engine: OpenVinoEngine) -> None:
    end = run(engine, [chat(0, "What is the capital of France?", 24, logprobs=True)])[0]
    assert isinstance(end, Finished)
    body = json.loads(end.body)
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == end.output_tokens
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert len(body["choices"][0]["logprobs"]["content"]) == end.output_tokens
    assert body["choices"][0]["finish_reason"] == "stop"


def test_text_ends_before_a_stop_string(engine: OpenVinoEngine) -> None:
    whole = choices(run(engine, [chat(0, "What is the capital of France?", 24)])[0])[0]["message"]["content"]
    cut = choices(run(engine, [chat(0, "What is the capital of France?", 24, stop=[" Par"])])[0])[0]
    assert cut["message"]["content"] == whole.split(" Par")[0] and cut["finish_reason"] == "stop"


def test_n_gives_n_choices_and_a_seed_gives_them_again(engine: OpenVinoEngine) -> None:
    request = chat(0, "Tell me a story", 8, temperature=1, n=2, seed=7)
    run(engine, [request])  # later ones find the prompt in the cache: rounding alike
    first, second = (choices(run(engine, [request])[0]) for _ in range(2))
    assert len(first) == 2 and first == second


def test_requests_that_can_never_fit_fail_alone(engine: OpenVinoEngine) -> None:
    requests = [
        chat(0, "Say hello", 8),
        chat(1, LONG * 7),
        chat(2, LONG * 40),
        chat(3, "x", tools=[{"type": "function"}]),
    ]
    ends = run(engine, requests)
    assert choices(ends[0])
    assert [ends[row].code for row in (1, 2, 3)] == [
        "kv_capacity_exceeded",
        "context_length_exceeded",
        "unsupported_parameter",
    ]
    assert ends[3].param == "tools"


def test_a_prefix_is_reused_once_it_was_computed(engine: OpenVinoEngine) -> None:
    run(engine, [chat(0, LONG + "a", 2)])
    end = run(engine, [chat(1, LONG + "b", 2)])[1]
    assert isinstance(end, Finished) and 0.9 * end.prompt_tokens < end.cached_tokens < end.prompt_tokens


def test_a_cancelled_request_comes_back_and_can_run_again(engine: OpenVinoEngine) -> None:
    engine.submit([chat(0, "Count", 2000, ignore_eos=True)])
    while not any(isinstance(event, Started) for event in engine.poll(1.0)):
        pass
    engine.cancel([0, 99])
    assert drain(engine, {0})[0].requeue
    assert choices(run(engine, [chat(0, "Count", 4)])[0])


def test_the_place_of_an_ended_request_is_taken_in_the_very_next_step(engine: OpenVinoEngine) -> None:
    """Most of the time, on a machine that is not too busy: the engine waits no longer than 20 ms for the next one."""

    def taken_at_once(row: int) -> bool:
        engine.submit([chat(row, f"What is {row} + {row}?", 4)])
        until(engine, Finished)
        engine.submit([chat(100 + row, f"Count to {row}.", 1)])
        events = until(engine, Step)
        if not any(isinstance(event, Finished) for event in events):
            drain(engine, {100 + row})
        return next(event for event in events if isinstance(event, Step)).prefill_tokens > 0

    for attempt in range(8):
        engine.submit([chat(0, "Tell me a long story", 2000, ignore_eos=True)])
        at_once = sum(taken_at_once(6 * attempt + k) for k in range(1, 7))
        engine.cancel([0])
        assert isinstance(drain(engine, {0})[0], Preempted)
        if at_once >= 3:
            break
    assert at_once >= 3, at_once


def test_json_follows_its_schema_and_a_bad_schema_fails_alone(engine: OpenVinoEngine) -> None:
    def form(schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    good = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    ends = run(
        engine, [chat(0, "A person", 30, response_format=form(good)), chat(1, "?", response_format=form({"type": "x"}))]
    )
    assert isinstance(json.loads(choices(ends[0])[0]["message"]["content"])["age"], int)
    assert ends[1].code == "invalid_value" and ends[1].param == "response_format"
    assert choices(run(engine, [chat(2, "Say hello", 4)])[2])


def test_requests_keep_running_while_one_that_can_never_fit_is_refused(engine: OpenVinoEngine) -> None:
    engine.submit([chat(row, f"{row} count", 40, ignore_eos=True) for row in range(3)])
    while not any(isinstance(event, Started) for event in engine.poll(1.0)):
        pass
    engine.submit([chat(9, LONG * 7)])
    ends = drain(engine, {0, 1, 2, 9})
    assert ends[9].code == "kv_capacity_exceeded"
    assert [ends[row].output_tokens for row in range(3)] == [40, 40, 40]


def test_a_seed_gives_the_answer_again_when_its_request_runs_alone(engine: OpenVinoEngine) -> None:
    request = chat(0, "Tell me a story", 16, temperature=1, seed=7)
    run(engine, [request])  # later ones find the prompt in the cache: rounding alike
    first = choices(run(engine, [request])[0])
    other = choices(run(engine, [chat(1, "Tell me a story", 16, temperature=1, seed=8)])[1])
    assert choices(run(engine, [request])[0]) == first != other


def test_the_engine_keeps_its_promises_with_more_work_than_kv(openvino_model: LocalModel) -> None:
    engine = OpenVinoEngine(openvino_model, EngineSettings(kv_tokens=512))
    requests = [chat(row, f"{row} " + LONG[:300], 64, ignore_eos=True) for row in range(5)]
    requests += [chat(5, "Two of them", 8, n=2, temperature=1, seed=1), chat(6, "To be cancelled", 8)]
    check_engine(engine, requests)


def test_an_openvino_folder_runs_like_its_gguf(openvino_model: LocalModel, tmp_path: Path) -> None:
    gguf = tmp_path / openvino_model.path.name
    shutil.copy(openvino_model.path, gguf)
    done = subprocess.run([sys.executable, "-c", CONVERT, str(gguf)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    gguf.unlink()
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_CONFIG))
    model = find_model(str(tmp_path))
    assert (model.context_tokens, model.kv_bytes_per_token) == (8192, openvino_model.kv_bytes_per_token)
    engine = OpenVinoEngine(model, EngineSettings(kv_tokens=512))
    try:
        assert "Paris" in choices(run(engine, [chat(0, "What is the capital of France?")])[0])[0]["message"]["content"]
    finally:
        engine.close()


def test_a_killed_child_is_an_engine_error(openvino_model: LocalModel) -> None:
    engine = OpenVinoEngine(openvino_model, EngineSettings(kv_tokens=512))
    engine.submit([chat(0, "Count", 400)])
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="killed by signal 9"):
        while True:
            engine.poll(1.0)
    with pytest.raises(EngineError):
        engine.submit([chat(1, "Count")])
    engine.close()
    engine.close()


def test_an_interrupt_leaves_the_child_to_its_parent_and_a_killed_parent_leaves_no_child(
    openvino_model: LocalModel,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.killpg(parent.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
        assert parent.stdout.readline().strip() == "interrupted, drained 60 tokens"
        assert is_running(child)
        parent.kill()
    wait_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PARENT = """
import time
from plait.engine.machine import EngineSettings
from plait.engine.models import find_model
from plait.engine.openvino import OpenVinoEngine
from plait.events import EngineRequest, Finished

engine = OpenVinoEngine(find_model(), EngineSettings(kv_tokens=512))
body = {"messages": [{"role": "user", "content": "Count"}], "temperature": 0, "ignore_eos": True}
engine.submit([EngineRequest(0, "/v1/chat/completions", body, None, 60)])
said = ""
try:
    print(engine.pid, flush=True)
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    said = "interrupted, "
ends = []
while not ends:
    ends = [event for event in engine.poll(1.0) if isinstance(event, Finished)]
print(f"{said}drained {ends[0].output_tokens} tokens", flush=True)
time.sleep(600)
"""
CONVERT = """
import sys, openvino_genai as genai

config = genai.SchedulerConfig()
config.num_kv_blocks = 8
genai.ContinuousBatchingPipeline(sys.argv[1], config, "CPU", {"enable_save_ov_model": True})
genai.Tokenizer(sys.argv[1], enable_save_ov_model=True)
"""
SMOLLM2_CONFIG = {
    "max_position_embeddings": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
