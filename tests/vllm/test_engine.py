"""vLLM behind the engine protocol and behind ``plait run``, on a CPU; see test_plugin.py for what is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.engine.vllm import VllmEngine, command_line
from plait.errors import EngineError, UsageError
from plait.events import EngineRequest, Event, Failed, Finished, Preempted, Progress, Started
from plait.testing import check_engine

MODEL = os.environ.get("PLAIT_VLLM_MODEL", "")
if not MODEL:
    pytest.skip("PLAIT_VLLM_MODEL names no model", allow_module_level=True)
pytest.importorskip("vllm")

LIMIT_S = 1800.0
"""For tests that start vLLM several times, a minute or two each on a busy core."""
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(2 * LIMIT_S)]

ARGUMENTS: dict[str, Any] = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 10,  # of 128 tokens, less one: four answers that outgrow two blocks do not fit
    "max_num_seqs": 4,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,  # of the memory that must be free
    "dtype": "float32",  # not every CPU has fast bfloat16
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    made = VllmEngine(MODEL, command_line(ARGUMENTS))
    yield made
    made.close()
    wait_empty(made.pid)


def group_of(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgid = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgid) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_empty(group: int, limit_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while group_of(group):
        assert time.monotonic() < deadline_s, f"still alive: {group_of(group)}"
        time.sleep(0.1)


def text(row: int, prompt: Any, max_tokens: int = 4, **more: Any) -> EngineRequest:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    return EngineRequest(row, TEXT, body, None, max_tokens)


def tokens(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1000, 40000, n)]


def run(engine: VllmEngine, requests: list[EngineRequest]) -> list[Event]:
    engine.submit(requests)
    events: list[Event] = []
    left = {request.row for request in requests}
    while left:
        found = engine.poll(1.0)
        left -= {e.row for e in found if isinstance(e, Finished | Failed)}
        events += found
    return events


def end(events: list[Event], row: int) -> Finished:
    (found,) = [e for e in events if isinstance(e, Finished) and e.row == row]
    return found


def test_answers_are_the_servers_and_cached_tokens_and_progress_are_told(engine: VllmEngine) -> None:
    prompt = tokens(1, 300)
    events = run(engine, [text(0, prompt, 40)]) + run(engine, [text(1, prompt, 40)])
    body = json.loads(end(events, 1).body)
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 40
    assert end(events, 0).cached_tokens == 0 and end(events, 1).cached_tokens == 256
    assert body["choices"][0]["text"] == json.loads(end(events, 0).body)["choices"][0]["text"]
    assert end(events, 1).finish_reasons == ("length",) and end(events, 1).prompt_tokens == 300
    kinds = [type(e) for e in events if isinstance(e, Started | Progress) and e.row == 1]
    assert kinds[0] is Started and kinds.count(Started) == 1 and kinds.count(Progress) >= 3
    (started,) = [e for e in events if isinstance(e, Started) and e.row == 1]
    assert started.cached_tokens == 256


def test_chat_choices_logprobs_and_stop_strings_are_as_the_endpoint_gives_them(engine: VllmEngine) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    chat = {"model": "any name", "messages": messages, "max_tokens": 6, "n": 2, "seed": 1, "logprobs": True}
    stop = {"prompt": "1 2 3 4 5 6 7", "max_tokens": 20, "temperature": 0, "stop": [" "]}
    requests = [EngineRequest(0, CHAT, chat, None, 6), EngineRequest(1, TEXT, stop, None, 20)]
    events = run(engine, requests)
    answer = json.loads(end(events, 0).body)
    assert answer["object"] == "chat.completion" and len(answer["choices"]) == 2
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])
    assert end(events, 0).output_tokens == answer["usage"]["completion_tokens"]
    assert " " not in json.loads(end(events, 1).body)["choices"][0]["text"]


def test_what_vllm_refuses_is_its_own_error_and_hurts_nobody_else(engine: VllmEngine) -> None:
    bad = EngineRequest(1, CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": -3}, None, 4)
    unknown = EngineRequest(2, "/v1/nothing", {"x": 1}, None, 4)
    long = text(3, tokens(2, 1100), 4)
    events = run(engine, [text(0, "one"), bad, unknown, long])
    assert [end(events, row).status_code for row in range(4)] == [200, 400, 404, 400]
    assert b"temperature" in end(events, 1).body and b"1024" in end(events, 3).body


def test_preemptions_are_told_and_cost_no_answer(engine: VllmEngine) -> None:
    requests = [text(row, tokens(10 + row, 250), 20) for row in range(5)]
    events = run(engine, requests)
    assert all(end(events, row).output_tokens == 20 for row in range(5))
    assert any(isinstance(e, Preempted) and not e.requeue for e in events)


def test_prompts_are_counted_as_vllm_counts_them(engine: VllmEngine) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    counted = engine.encode_many([(CHAT, chat), (TEXT, {"prompt": "a b c"}), (TEXT, {"prompt": [5, 6]})])
    bodies = [{**chat, "max_tokens": 1}, {"prompt": "a b c", "max_tokens": 1}, {"prompt": [5, 6], "max_tokens": 1}]
    urls = [CHAT, TEXT, TEXT]
    events = run(engine, [EngineRequest(i, urls[i], bodies[i], None, 1) for i in range(3)])
    assert [len(ids) for ids in counted if isinstance(ids, np.ndarray)] == [
        end(events, i).prompt_tokens for i in range(3)
    ]
    assert isinstance(engine.encode_many([("/v1/embeddings", {"input": "words"})])[0], np.ndarray)


def test_the_engine_keeps_the_protocol(engine: VllmEngine) -> None:
    """The last one that uses the engine, since this closes it."""
    check_engine(engine, [text(row, tokens(row, 20)) for row in range(5)])
    wait_empty(engine.pid)


def test_a_killed_engine_process_ends_the_run_and_leaves_nobody_behind() -> None:
    made = VllmEngine(MODEL, command_line(ARGUMENTS))
    core = [pid for pid in group_of(made.pid) if "EngineCore" in Path(f"/proc/{pid}/comm").read_text()]
    core = core or [pid for pid in group_of(made.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(core) == 1
    made.submit([text(0, tokens(3, 50), 900)])
    made.poll(1.0)
    os.kill(core[0], signal.SIGKILL)
    with pytest.raises(EngineError):
        while True:
            made.poll(1.0)
    made.close()
    made.close()
    wait_empty(made.pid)


def test_arguments_vllm_does_not_know_are_refused_with_its_words() -> None:
    with pytest.raises(UsageError, match="no-such-argument"):
        VllmEngine(MODEL, ["--no-such-argument", "1"])


def job(path: Path, n: int, max_tokens: int) -> None:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": TEXT, "body": text(i, tokens(i, 40), max_tokens).body}
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(folder: Path, **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "plait", "run", "in.jsonl", "-o", "out.jsonl", "--engine", "vllm", "--json"]
    command += ["--model", MODEL, "--grace", "1"]
    for key, value in {**ARGUMENTS, **more}.items():
        command += ["--engine-arg", f"{key}={json.dumps(value)}"]
    root = Path(__file__).parents[2]  # where vLLM's process finds the scheduler of tests/vllm/killer.py
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)])}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0, env=environment
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def answers(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines() if '"custom_id"' in line]


def until_answered(folder: Path, process: subprocess.Popen[bytes], n: int) -> int:
    """Wait for so many answers; the group of the engine's processes."""
    live = folder / "out.live.jsonl"
    while not (live.exists() and len(answers(live)) >= n):
        assert process.poll() is None
        time.sleep(0.05)
    (worker,) = children(process.pid)
    return worker


@pytest.mark.crash
def test_kill_9_and_ctrl_c_leave_no_process_and_the_run_is_resumed(tmp_path: Path) -> None:
    job(tmp_path / "in.jsonl", 16, 40)
    process = start(tmp_path)
    group = until_answered(tmp_path, process, 3)
    process.kill()
    process.wait()
    wait_empty(group)

    process = start(tmp_path)
    group = until_answered(tmp_path, process, 7)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert process.wait(LIMIT_S) == 130
    wait_empty(group)

    process = start(tmp_path)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert answers(tmp_path / "out.jsonl") == [f"r{i}" for i in range(16)]


@pytest.mark.crash
def test_a_request_that_kills_vllm_is_found_and_all_others_are_answered(tmp_path: Path) -> None:
    from tests.vllm.killer import MARK

    job(tmp_path / "in.jsonl", 8, 6)
    lines = (tmp_path / "in.jsonl").read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "body": text(3, [*MARK, 1000, 1001], 6).body})
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    process = start(tmp_path, scheduler_cls="tests.vllm.killer.Killer")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, "done, with failures"
    assert answers(tmp_path / "out.jsonl") == [f"r{i}" for i in range(8) if i != 3]
    (failed,) = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert failed["custom_id"] == "r3" and failed["error"]["code"] == "engine_killed"
    assert "3 times" in failed["error"]["message"]
