"""Runs end to end on the fake engine: files, resume, refusals, stopping."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.data.problems import Fault
from plait.errors import JournalError, UsageError
from plait.events import EngineRequest, Event, Failed, Finished, Preempted
from plait.run.executor import Options, Outcome, Planned, execute, open_run
from plait.table import I64
from plait.testing import FakeEngine, answer_of
from tests.builders import batch_line, fifo_plan, job_of, read_lines

LINES = [batch_line(f"q-{i}", f"question {i}") for i in range(30)]


def run(folder: Path, engine: FakeEngine, lines: list[str] | None = None, **options: Any) -> Outcome:
    with job_of(folder, LINES if lines is None else lines) as job:
        return execute(job, fifo_plan, engine, Options(folder / "out.jsonl", **options))


def written(folder: Path, name: str = "out") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    errors = folder / f"{name}.errors.jsonl"
    return read_lines(folder / f"{name}.jsonl"), read_lines(errors) if errors.exists() else []


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def status(code: int) -> Finished:
    return Finished(0, 0, code, b'{"error":{"message":"status %d","type":"x","param":null,"code":null}}' % code)


def asks(request: EngineRequest) -> str:
    return str(request.body["messages"][-1]["content"])


# ---- files


def test_answers_are_written_in_input_order_in_the_batch_shape(tmp_path: Path) -> None:
    outcome = run(tmp_path, FakeEngine())
    answers, errors = written(tmp_path)
    assert outcome == Outcome(30, 30, 0, 0) and outcome.exit_code == 0
    assert ids(answers) == [f"q-{i}" for i in range(30)] and errors == []
    assert not (tmp_path / "out.errors.jsonl").exists() and not (tmp_path / "out.lock").exists()
    assert set(answers[0]) == {"id", "custom_id", "response", "error"} and answers[0]["error"] is None
    assert set(answers[0]["response"]) == {"status_code", "request_id", "body"}
    assert len({line["id"] for line in answers}) == 30


def test_each_answer_belongs_to_its_question(tmp_path: Path) -> None:
    """Case res-04 with the fake engine: 300 rows, 10 % of the first tries fail with 503."""
    lines = [batch_line(f"q-{i}", f"question {i}") for i in range(300)]
    chance = random.Random(1)
    flaky = {f"question {i}" for i in range(300) if chance.random() < 0.1}

    def fate(request: EngineRequest, attempt: int) -> Event | None:
        return status(503) if attempt == 0 and asks(request) in flaky else None

    assert run(tmp_path, FakeEngine(fate=fate), lines).exit_code == 0
    answers, _ = written(tmp_path)
    assert ids(answers) == [f"q-{i}" for i in range(300)]
    for line, source in zip(answers, lines, strict=True):
        request = EngineRequest(0, "/v1/chat/completions", json.loads(source)["body"], None, 16)
        content = line["response"]["body"]["choices"][0]["message"]["content"]
        assert content == json.loads(answer_of(request, 1, 0))["choices"][0]["message"]["content"]


def test_completion_order_is_another_order_of_the_same_lines(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    by_input = (tmp_path / "out.jsonl").read_bytes().splitlines()
    run(tmp_path, FakeEngine(), order="completion", restart=True)
    by_completion = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert sorted(by_input) == sorted(by_completion) and by_input != by_completion


def test_failures_have_the_two_shapes_of_the_contract(tmp_path: Path) -> None:
    fates: dict[str, Event] = {
        "question 1": status(400),
        "question 2": Failed(0, 0, "unsupported_value", "logit_bias is not supported", "logit_bias"),
        "question 3": Failed(0, 0, "invalid_value", "too hot", "temperature", status_code=400),
    }
    outcome = run(tmp_path, FakeEngine(fate=lambda request, attempt: fates.get(asks(request))))
    _, errors = written(tmp_path)
    assert (outcome.answered, outcome.failed, outcome.exit_code) == (27, 3, 1)
    http, never, made = errors
    assert http["error"] is None and http["response"]["status_code"] == 400
    assert http["response"]["body"]["error"]["message"] == "status 400"
    assert never["response"] is None
    wanted = {"code": "unsupported_value", "message": "logit_bias is not supported", "param": "logit_bias"}
    assert never["error"] == wanted
    assert made["error"] is None and made["response"]["body"]["error"]["param"] == "temperature"


def test_bad_lines_are_in_the_error_file_and_the_others_run(tmp_path: Path) -> None:
    lines = [LINES[0], "{broken", batch_line("dup", "x", max_tokens="many"), LINES[1]]
    outcome = run(tmp_path, FakeEngine(), lines)
    answers, errors = written(tmp_path)
    assert (outcome.answered, outcome.failed, outcome.exit_code) == (2, 2, 1)
    assert ids(answers) == ["q-0", "q-1"]
    assert errors[0]["custom_id"] is None and errors[0]["line"] == 2
    assert errors[1]["custom_id"] == "dup" and errors[1]["response"]["status_code"] == 400
    error = errors[1]["response"]["body"]["error"]
    assert error["param"] == "max_tokens" and "requests.jsonl:3" in error["message"]


def test_metadata_is_carried_through(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(), [json.dumps({"custom_id": "a", "prompt": "hello", "topic": "birds"})])
    answers, _ = written(tmp_path)
    assert answers[0]["metadata"] == {"topic": "birds"}


def test_rows_that_do_not_fit_are_recorded_without_running_and_stay_so(tmp_path: Path) -> None:
    def plan(rows: I64) -> Planned:
        fault = Fault("context_length_exceeded", "too long", "max_tokens", "Shorten it.")
        return replace(fifo_plan(rows[1:]), faults={int(rows[0]): fault})

    engine = FakeEngine()
    lines = [json.dumps({**json.loads(LINES[0]), "topic": "birds"}), *LINES[1:]]
    with job_of(tmp_path, lines) as job:
        outcome = execute(job, plan, engine, Options(tmp_path / "out.jsonl"))
        again = execute(job, plan, engine, Options(tmp_path / "out.jsonl"))
    _, errors = written(tmp_path)
    assert outcome == again and outcome.failed == 1 and len(engine.submitted) == 29
    assert errors[0]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert errors[0]["metadata"] == {"topic": "birds"}


def test_an_answer_that_is_not_json_is_a_failure_and_never_an_unreadable_line(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(fate=lambda request, attempt: Finished(0, 0, 200, b"<html>")), LINES[:3], retries=1)
    answers, errors = written(tmp_path)
    assert answers == [] and [line["error"]["code"] for line in errors] == ["invalid_response"] * 3


def test_secrets_that_a_server_repeats_are_not_written(tmp_path: Path) -> None:
    def fate(request: EngineRequest, attempt: int) -> Event:
        return Finished(0, 0, 401, b'{"error":{"message":"bad key sk-secret-7"}}')

    run(tmp_path, FakeEngine(fate=fate), LINES[:3], secrets=("sk-secret-7",))
    for path in tmp_path.iterdir():
        assert b"sk-secret-7" not in path.read_bytes()


# ---- identical requests


def same(n: int, **body: Any) -> list[str]:
    return [batch_line(f"same-{i}", "the same question", **body) for i in range(n)]


def test_identical_greedy_requests_are_computed_once_and_each_answered(tmp_path: Path) -> None:
    engine = FakeEngine()
    assert run(tmp_path, engine, same(10)).answered == 10
    answers, _ = written(tmp_path)
    assert len(engine.submitted) == 1
    assert ids(answers) == [f"same-{i}" for i in range(10)]
    assert len({line["id"] for line in answers}) == len({line["response"]["request_id"] for line in answers}) == 10
    assert len({json.dumps(line["response"]["body"]) for line in answers}) == 1


@pytest.mark.parametrize(("body", "options"), [({"temperature": 0.7}, {}), ({}, {"dedupe": False})])
def test_identical_requests_that_may_differ_or_shall_not_be_merged_all_run(
    tmp_path: Path, body: dict[str, Any], options: dict[str, Any]
) -> None:
    engine = FakeEngine()
    run(tmp_path, engine, same(10, **body), **options)
    assert len(engine.submitted) == 10


def test_copies_that_a_crash_left_out_are_answered_from_the_journal(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(), same(10))
    before = (tmp_path / "out.jsonl").read_bytes()
    live = tmp_path / "out.live.jsonl"
    live.write_bytes(b"".join(live.read_bytes().splitlines(keepends=True)[:4]))
    engine = FakeEngine()
    assert run(tmp_path, engine, same(10)).answered == 10
    assert engine.submitted == [] and (tmp_path / "out.jsonl").read_bytes() == before


def test_copies_of_a_failed_request_fail_too_and_are_retried_together(tmp_path: Path) -> None:
    engine = FakeEngine(fate=lambda request, attempt: status(500))
    assert run(tmp_path, engine, same(5), retries=0).failed == 5
    engine = FakeEngine()
    assert run(tmp_path, engine, same(5)).answered == 5
    assert len(engine.submitted) == 1 and not (tmp_path / "out.errors.jsonl").exists()


# ---- resume


def test_a_complete_run_runs_nothing_again(tmp_path: Path) -> None:
    first, engine = run(tmp_path, FakeEngine()), FakeEngine()
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(tmp_path, engine) == first
    assert engine.submitted == [] and (tmp_path / "out.jsonl").read_bytes() == before


DUR_04 = [batch_line(name, "Say ok.", max_tokens=8) for name in "abc"]


def leave_failures(folder: Path) -> None:
    codes = iter([None, status(503), status(400)])
    outcome = run(folder, FakeEngine(fate=lambda request, attempt: next(codes)), DUR_04, retries=0, dedupe=False)
    assert (outcome.answered, outcome.failed) == (1, 2)


def test_server_faults_are_sent_again_by_default_and_leave_the_error_file(tmp_path: Path) -> None:
    """Case dur-04."""
    leave_failures(tmp_path)
    engine = FakeEngine()
    assert run(tmp_path, engine, DUR_04, dedupe=False).failed == 1
    answers, errors = written(tmp_path)
    assert len(engine.submitted) == 1 and ids(answers) == ["a", "b"] and ids(errors) == ["c"]
    engine = FakeEngine()
    assert run(tmp_path, engine, DUR_04, dedupe=False, retry_failed="all").exit_code == 0
    assert len(engine.submitted) == 1 and ids(written(tmp_path)[0]) == ["a", "b", "c"]


def test_failed_rows_stay_failed_when_asked(tmp_path: Path) -> None:
    leave_failures(tmp_path)
    engine = FakeEngine()
    assert run(tmp_path, engine, DUR_04, dedupe=False, retry_failed="none").failed == 2 and not engine.submitted


def test_a_changed_setting_is_refused_by_name_and_a_changed_note_is_not(tmp_path: Path) -> None:
    """Case dur-04, variant."""
    engine = FakeEngine(dies_after=5)
    run(tmp_path, engine, settings={"temperature": 0, "model": "m"}, notes={"policy": "fcfs"})
    with pytest.raises(UsageError, match=r"temperature was 0, now 0\.9.*--restart"):
        run(tmp_path, FakeEngine(), settings={"temperature": 0.9, "model": "m"})
    outcome = run(tmp_path, FakeEngine(), settings={"model": "m", "temperature": 0}, notes={"policy": "dfs"}, retries=9)
    assert outcome.exit_code == 0


def test_another_job_on_the_same_output_is_refused_and_restart_replaces_it(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    with pytest.raises(UsageError, match=r"the input has changed since that run .it had 30 requests, now 3"):
        run(tmp_path, FakeEngine(), LINES[:3])
    assert len(written(tmp_path)[0]) == 30
    assert run(tmp_path, FakeEngine(), LINES[:3], restart=True).answered == 3
    assert len(written(tmp_path)[0]) == 3


# ---- existing output without a journal

FOREIGN = (
    b'{"id":"x1","custom_id":"a","response":{"status_code":200,"request_id":"q","body":{"choices":[]}},"error":null}\n'
)


@pytest.mark.parametrize(
    ("tail", "sent", "kept"),
    [
        (b'{"id":"x2","custom_id":"b","response":{"status_code":200,"bo', 2, {"a"}),
        (FOREIGN[:-1].replace(b'"a"', b'"b"').replace(b"x1", b"x2"), 1, {"a", "b"}),
    ],
    ids=["torn", "only the newline is missing"],
)
def test_a_torn_existing_output_is_gone_on_from(tmp_path: Path, tail: bytes, sent: int, kept: set[str]) -> None:
    """Case dur-02 and its variant."""
    (tmp_path / "out.jsonl").write_bytes(FOREIGN + tail)
    engine = FakeEngine()
    assert run(tmp_path, engine, DUR_04, dedupe=False).answered == 3
    answers, _ = written(tmp_path)
    assert ids(answers) == ["a", "b", "c"] and len(engine.submitted) == sent
    assert {line["custom_id"] for line in answers if line["id"].startswith("x")} == kept


def test_existing_error_files_count_as_the_failures_they_hold(tmp_path: Path) -> None:
    failed = FOREIGN.replace(b"200", b"503").replace(b'"a"', b'"b"')
    (tmp_path / "out.jsonl").write_bytes(FOREIGN)
    (tmp_path / "out.errors.jsonl").write_bytes(failed + failed.replace(b"503", b"400").replace(b'"b"', b'"c"'))
    engine = FakeEngine()
    outcome = run(tmp_path, engine, DUR_04, dedupe=False)
    assert (outcome.answered, outcome.failed, len(engine.submitted)) == (2, 1, 1)


@pytest.mark.parametrize("content", [b"my thesis\n", FOREIGN.replace(b'"a"', b'"zz"'), FOREIGN + b"[1]\n" + FOREIGN])
def test_a_file_that_is_not_a_result_of_this_job_is_never_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=r"not overwritten.*--restart"):
        run(tmp_path, FakeEngine(), DUR_04)
    assert (tmp_path / "out.jsonl").read_bytes() == content
    assert not (tmp_path / "out.live.jsonl").exists()


def test_an_output_that_is_an_input_is_refused_also_through_links(tmp_path: Path) -> None:
    with job_of(tmp_path, LINES) as job:
        source = tmp_path / "requests.jsonl"
        os.link(source, tmp_path / "hard.jsonl")
        (tmp_path / "soft.jsonl").symlink_to(source)
        for name in ("requests.jsonl", "hard.jsonl", "soft.jsonl"):
            with pytest.raises(UsageError, match="would overwrite the input"):
                open_run(job, Options(tmp_path / name, [source]))
        with pytest.raises(UsageError, match="would overwrite the input"):
            open_run(job, Options(tmp_path / "a.jsonl", [tmp_path / "a.live.jsonl"]))
    assert len(source.read_text().splitlines()) == 30


def test_an_output_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with job_of(tmp_path, LINES) as job:
        with pytest.raises(UsageError, match="this is a folder"):
            open_run(job, Options(tmp_path))
        with pytest.raises(UsageError, match="does not exist"):
            open_run(job, Options(tmp_path / "no" / "out.jsonl"))
        for name in (Path("-"), tmp_path / "out.jsonl.gz", tmp_path / "out.csv"):
            with pytest.raises(UsageError, match="plain JSONL"):
                open_run(job, Options(name))


def test_two_runs_on_one_output_are_refused_naming_the_process(tmp_path: Path) -> None:
    with (
        job_of(tmp_path, LINES) as job,
        open_run(job, Options(tmp_path / "out.jsonl")),
        pytest.raises(JournalError, match=f"process {os.getpid()}"),
    ):
        open_run(job, Options(tmp_path / "out.jsonl"))
    assert run(tmp_path, FakeEngine()).answered == 30


# ---- stopping


def test_a_dead_engine_keeps_everything_and_the_next_run_does_the_rest(tmp_path: Path) -> None:
    outcome = run(tmp_path, FakeEngine(dies_after=10))
    kept = outcome.answered
    assert outcome.exit_code == 3 and "died after" in outcome.reason and kept >= 10
    assert len(written(tmp_path)[0]) == kept and outcome.remaining == 30 - kept
    engine = FakeEngine()
    assert run(tmp_path, engine).exit_code == 0
    assert len(engine.submitted) == 30 - kept


def test_too_many_server_faults_in_a_row_stop_the_run_resumably(tmp_path: Path) -> None:
    outcome = run(tmp_path, FakeEngine(fate=lambda request, attempt: status(503)), retries=1, max_failures=5)
    assert outcome.exit_code == 3 and outcome.failed == 5 and outcome.remaining == 25
    assert "5 requests in a row" in outcome.reason
    assert run(tmp_path, FakeEngine()).exit_code == 0


def test_a_row_is_tried_as_often_as_said_and_then_recorded(tmp_path: Path) -> None:
    engine = FakeEngine(fate=lambda request, attempt: status(500) if asks(request) == "question 0" else None)
    assert run(tmp_path, engine, retries=4).failed == 1
    assert len(engine.submitted) == 29 + 5


class Interrupting:
    """Sends SIGINT after some answers, once or twice."""

    def __init__(self, times: int) -> None:
        self.answers, self.times = 0, times

    def event(self, event: Event) -> None:
        self.answers += isinstance(event, Finished)
        if self.answers == 5:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)

    def retrying(self, event: Finished | Failed, after_s: float) -> None: ...

    def heartbeat(self, now_s: float) -> None: ...


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_leaves_valid_files_and_the_same_command_goes_on(tmp_path: Path, times: int) -> None:
    engine = FakeEngine()
    with job_of(tmp_path, LINES) as job:
        outcome = execute(job, fifo_plan, engine, Options(tmp_path / "out.jsonl"), Interrupting(times))
    assert outcome.exit_code == 130 and outcome.interrupted
    assert 5 <= outcome.answered < 30 and len(written(tmp_path)[0]) == outcome.answered
    if times == 1:
        assert outcome.answered == len(engine.submitted), "a drained run answers what it sent"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(tmp_path, FakeEngine()).exit_code == 0


def test_a_full_disk_stops_the_run_and_nothing_recorded_is_lost(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(JournalError, match=r"out\.live\.jsonl: .*Every answer recorded so far is kept"):
            run(tmp_path, FakeEngine())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = len(read_lines(tmp_path / "out.live.jsonl")) - 1
    assert 0 < kept < 30
    engine = FakeEngine()
    assert run(tmp_path, engine).exit_code == 0 and len(engine.submitted) == 30 - kept


# ---- exactly once


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    fates=st.lists(st.sampled_from(["ok", "ok", "500", "400", "gone", "preempt", "html"]), min_size=1, max_size=60),
    n=st.integers(1, 25),
    equal=st.integers(0, 5),
    dies=st.one_of(st.none(), st.integers(0, 20)),
)
def test_each_row_is_in_exactly_one_file_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, fates: list[str], n: int, equal: int, dies: int | None
) -> None:
    folder = tmp_path_factory.mktemp("run")
    events: dict[str, Event | None] = {
        "ok": None,
        "500": status(500),
        "400": status(400),
        "gone": Failed(0, 0, "disconnected", "gone", retryable=True),
        "preempt": Preempted(0, 0, requeue=True),
        "html": Finished(0, 0, 200, b"<html>"),
    }
    turn = iter(fates)
    lines = [batch_line(f"q-{i}", f"question {i}") for i in range(n)] + same(equal) + ["{"]
    engine = FakeEngine(fate=lambda request, attempt: events[next(turn, "ok")], dies_after=dies)
    first = run(folder, engine, lines, retries=2, max_failures=3)
    assert first.answered + first.failed + first.remaining == len(lines)
    outcome = run(folder, FakeEngine(), lines)
    answers, errors = written(folder)
    wanted = [f"q-{i}" for i in range(n)] + [f"same-{i}" for i in range(equal)]
    assert sorted(ids(answers) + [line["custom_id"] for line in errors if "line" not in line]) == sorted(wanted)
    assert (len(answers), len(errors), 0) == (outcome.answered, outcome.failed, outcome.remaining)
    kept = {line["custom_id"] for line in answers}
    assert all(line["response"]["status_code"] == 400 for line in errors) and len(kept) == len(answers)
