"""``plait run`` as a user meets it, against servers that answer at once."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import Result

from plait.testing_server import Call, LoopbackServer, Reply, answer, error, models
from tests.builders import batch_line, read_lines, write_batch
from tests.cli.command import plait, press, serving, spawn, wait_until

LINES = [batch_line(f"id-{i}", f"question {i}") for i in range(12)]


def run(server: LoopbackServer, folder: Path, *arguments: object, stdin: bytes = b"") -> Result:
    """``plait run ... -o out.jsonl`` against a server."""
    options = ["--endpoint", server.url, "-o", folder / "out.jsonl", "--progress", "none"]
    return plait("run", *arguments, *options, stdin=stdin)


def answers(folder: Path) -> dict[str, str]:
    """custom_id -> text of each answer, in the order of the file."""
    lines = read_lines(folder / "out.jsonl")
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


def test_every_request_is_answered_with_its_own_answer_in_input_order(tmp_path: Path) -> None:
    with serving() as server:
        result = run(server, tmp_path, write_batch(tmp_path, LINES))
    assert result.exit_code == 0, result.output
    assert list(answers(tmp_path).items()) == [(f"id-{i}", f"question {i}") for i in range(12)]
    assert "12 of 12 answered, 0 failed" in result.output
    assert not (tmp_path / "out.errors.jsonl").exists() and not (tmp_path / "out.lock").exists()


@pytest.mark.parametrize("kind", ["stdin", "gz", "zst", "two files", "bom and crlf"])
def test_every_way_to_hand_in_lines_gives_the_same_answers(kind: str, tmp_path: Path) -> None:
    text = "".join(line + "\n" for line in LINES).encode()
    files: list[str | Path] = [tmp_path / "in.jsonl"]
    match kind:
        case "stdin":
            files = ["-"]
        case "gz":
            (tmp_path / "in.jsonl").write_bytes(gzip.compress(text))
        case "zst":
            (tmp_path / "in.jsonl").write_bytes(zstandard.compress(text))
        case "two files":
            files = [write_batch(tmp_path, LINES[:5], "a.jsonl"), write_batch(tmp_path, LINES[5:], "b.jsonl")]
        case _:
            (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\r\n")[:-4])
    with serving() as server:
        result = run(server, tmp_path, *files, stdin=text if kind == "stdin" else b"")
    assert result.exit_code == 0, result.output
    assert list(answers(tmp_path)) == [f"id-{i}" for i in range(12)]


@pytest.mark.parametrize("kind", ["csv", "parquet", "plain jsonl"])
def test_other_columns_of_a_table_come_back_beside_the_answer(kind: str, tmp_path: Path) -> None:
    table: dict[str, list[Any]] = {"prompt": ["one", "two"], "source": ["left", "right"], "n_th": [1, 2]}
    if kind == "csv":
        path = tmp_path / "in.csv"
        path.write_text("prompt,source,n_th\none,left,1\ntwo,right,2\n")
    elif kind == "parquet":
        path = tmp_path / "in.parquet"
        pq.write_table(pa.table(table), path)
    else:
        rows = [{name: column[i] for name, column in table.items()} for i in range(2)]
        path = write_batch(tmp_path, [json.dumps(row) for row in rows])
    with serving() as server:
        result = run(server, tmp_path, path, "--model", "m")
    assert result.exit_code == 0, result.output
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["metadata"]["source"] for line in lines] == ["left", "right"]
    assert [int(line["metadata"]["n_th"]) for line in lines] == [1, 2]


def test_strict_stops_before_anything_is_sent_and_the_mended_file_runs(tmp_path: Path) -> None:
    with serving() as server:
        bad = write_batch(
            tmp_path, [*LINES, batch_line("bad", "x", temperature=9), batch_line("other", "x", model="z")]
        )
        result = run(server, tmp_path, bad, "--strict")
        assert (result.exit_code, len(server.calls)) == (2, 0)
        assert f"{bad}:13 (custom_id 'bad')" in result.output and "--strict: not started" in result.output
        unserved = write_batch(tmp_path, [*LINES, batch_line("other", "x", model="z")])
        result = run(server, tmp_path, unserved, "--strict")
        assert (result.exit_code, len(server.calls)) == (2, 0)
        assert f"{unserved}:13 (custom_id 'other'): model_not_found" in result.output
        assert run(server, tmp_path, write_batch(tmp_path, LINES), "--strict").exit_code == 0


def test_failed_rows_are_kept_or_run_again_as_asked(tmp_path: Path) -> None:
    broken = True

    def reply(call: Call) -> Reply:
        return (
            error(400, "too silly") if broken and call.prompt in ("question 3", "question 7") else answer(call, "fine")
        )

    with serving(reply=reply) as server:
        path = write_batch(tmp_path, LINES)
        result = run(server, tmp_path, path)
        assert result.exit_code == 1 and "2 x too silly (custom_id 'id-3')" in result.output
        assert [line["custom_id"] for line in read_lines(tmp_path / "out.errors.jsonl")] == ["id-3", "id-7"]
        broken, sent = False, len(server.calls)
        result = run(server, tmp_path, path)
        assert result.exit_code == 1 and len(server.calls) == sent and "--retry-failed all runs" in result.output
        assert run(server, tmp_path, path, "--retry-failed", "all").exit_code == 0 and len(server.calls) == sent + 2
    assert len(answers(tmp_path)) == 12 and not (tmp_path / "out.errors.jsonl").exists()


def test_cut_answers_are_counted_and_fail_the_run_if_asked(tmp_path: Path) -> None:
    def reply(call: Call) -> Reply:
        whole = answer(call, "cut")
        return Reply(body=whole.body.replace(b'"stop"', b'"length"')) if call.prompt.endswith("5") else whole

    with serving(reply=reply) as server:
        path = write_batch(tmp_path, LINES)
        result = run(server, tmp_path, path, "--restart")
        assert result.exit_code == 0 and "(1 cut off at max_tokens)" in result.output
        result = run(server, tmp_path, path, "--restart", "--fail-on", "length", "--json", "--quiet")
        assert result.exit_code == json.loads(result.output)["exit_code"] == 1


def test_resuming_a_complete_run_still_fails_on_cut_answers(tmp_path: Path) -> None:
    with serving(reply=lambda call: Reply(body=answer(call, "cut").body.replace(b'"stop"', b'"length"'))) as server:
        path = write_batch(tmp_path, LINES)
        assert run(server, tmp_path, path).exit_code == 0
        assert run(server, tmp_path, path, "--fail-on", "length").exit_code == 1


def test_json_summary_is_one_object_and_quiet_says_nothing_else(tmp_path: Path) -> None:
    with serving() as server:
        path = write_batch(tmp_path, [*LINES, "{"])
        result = run(server, tmp_path, path, "--json", "--quiet")
    summary: dict[str, Any] = json.loads(result.output)
    assert result.exit_code == 1
    assert (summary["total"], summary["answered"], summary["failed"], summary["remaining"]) == (13, 12, 1, 0)
    assert summary["run"]["finish_reasons"] == {"stop": 12}
    (top,) = summary["top_errors"]
    assert top["count"] == 1 and "not valid JSON" in top["message"]


def test_a_failed_line_without_an_id_is_named_by_its_place_and_nothing_is_said_of_earlier_runs(tmp_path: Path) -> None:
    with serving() as server:
        result = run(server, tmp_path, write_batch(tmp_path, ["[1]", "[2]", '{"a": 1}', "[1]"]))
    assert result.exit_code == 1 and not server.calls
    assert "nothing to run: no line of the input is a request" in result.output and "earlier" not in result.output
    assert "requests.jsonl:1)" in result.output and "None" not in result.output


def test_before_a_run_it_is_said_how_many_lines_cannot_run_and_what_looks_wrong(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "hello", "temperture": 0.5})
    with serving() as server:
        result = run(server, tmp_path, write_batch(tmp_path, ["{", *[row] * 7]), "--model", "m")
    said = result.output[: result.output.index("planning")]
    assert "1 of 8 requests cannot run" in said and "requests.jsonl:2 (custom_id 'row-2'): warning: " in said
    assert said.count("Did you mean temperature?") == 5 and "and more warnings" in said


def test_quiet_alone_prints_nothing(tmp_path: Path) -> None:
    with serving() as server:
        assert run(server, tmp_path, write_batch(tmp_path, LINES), "--quiet").output == ""


def test_the_heartbeat_goes_on_while_nothing_completes(tmp_path: Path) -> None:
    seen, still = threading.Event(), list[dict[str, Any]]()
    with serving(reply=lambda call: Reply(body=answer(call, "late").body, held=seen)) as server:
        options = ["--endpoint", server.url, "-o", tmp_path / "out.jsonl", "--progress", "json"]
        process = spawn("run", write_batch(tmp_path, LINES), *options)
        assert process.stderr is not None
        for line in process.stderr:
            still += [json.loads(line)] if line.startswith("{") and not seen.is_set() else []
            if len(still) >= 2 and still[-1]["running"] == 12 and still[-1]["oldest_s"] > 1:
                seen.set()
        process.communicate()
    assert process.returncode == 0 and seen.is_set() and all(beat["done"] == 0 for beat in still)
    assert still[-1]["oldest_custom_id"].startswith("id-")


def test_identical_deterministic_requests_are_asked_once(tmp_path: Path) -> None:
    lines = [batch_line(f"id-{i}", "the same") for i in range(6)]
    with serving() as server:
        assert run(server, tmp_path, write_batch(tmp_path, lines)).exit_code == 0
        assert len(server.calls) == 1 and len(answers(tmp_path)) == 6
        assert run(server, tmp_path, write_batch(tmp_path, lines), "--restart", "--no-dedupe").exit_code == 0
        assert len(server.calls) == 7


def test_an_output_that_is_the_input_is_refused(tmp_path: Path) -> None:
    path = write_batch(tmp_path, LINES, "out.jsonl")
    with serving() as server:
        result = run(server, tmp_path, path)
        assert (result.exit_code, len(server.calls)) == (2, 0)
    assert "would overwrite the input" in result.output and len(read_lines(path)) == 12


def test_going_on_with_a_changed_job_is_refused_naming_the_change(tmp_path: Path) -> None:
    with serving() as server:
        assert run(server, tmp_path, write_batch(tmp_path, LINES)).exit_code == 0
        result = run(server, tmp_path, write_batch(tmp_path, LINES[:4]))
        assert result.exit_code == 2 and "it had 12 requests, now 4" in result.output
        result = run(server, tmp_path, write_batch(tmp_path, LINES), "--on-overflow", "clamp")
        assert result.exit_code == 2 and "on_overflow was 'error', now 'clamp'" in result.output
        assert run(server, tmp_path, write_batch(tmp_path, LINES), "--policy", "random").exit_code == 0
        assert len(server.calls) == 12


def test_a_second_run_on_the_same_output_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    refused = threading.Event()
    with serving(reply=lambda call: Reply(body=answer(call, "late").body, held=refused)) as server:
        path = write_batch(tmp_path, LINES)
        first = spawn("run", path, "-o", tmp_path / "out.jsonl", "--endpoint", server.url, "--quiet")
        wait_until(lambda: bool(server.calls))
        result = run(server, tmp_path, path)
        assert result.exit_code == 3 and "another" in result.output
        refused.set()
        first.communicate()
        assert first.returncode == 0
    assert len(answers(tmp_path)) == 12


@pytest.mark.parametrize("columns", [80, 200])
def test_the_bar_shows_every_figure_whatever_the_width_of_the_terminal(columns: int, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    seen = threading.Event()
    parts = ("0/12 done", " running, ", " waiting", "prompt ", "output ", "cached ", "oldest 'id-", "ETA ")
    with serving(reply=lambda call: Reply(body=answer(call, "late").body, held=seen, delay_s=1.2)) as server:
        options = ["--endpoint", server.url, "-o", tmp_path / "out.jsonl", "--max-concurrency", "4"]
        command = [sys.executable, "-m", "plait", "run", write_batch(tmp_path, LINES), *options]
        with subprocess.Popen(list(map(str, command)), stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process:
            os.close(theirs)
            shown, plain = b"", ""
            hung = threading.Timer(300, process.kill)
            hung.start()
            with contextlib.suppress(OSError):  # the other end is closed when the process ends
                while block := os.read(ours, 1 << 16):
                    shown += block
                    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))
                    if all(part in " ".join(plain.split()) for part in parts):
                        seen.set()
            hung.cancel()
    os.close(ours)
    assert process.returncode == 0 and seen.is_set(), plain
    assert "plait: about" in plain and not re.search(r"[^\r\n]plait: ", plain), plain


def test_ctrl_c_once_drains_and_the_same_command_goes_on(tmp_path: Path) -> None:
    lines = [batch_line(f"id-{i}", f"question {i}") for i in range(40)]
    with serving(reply=lambda call: Reply(body=answer(call, "late").body, delay_s=1.2)) as server:
        options = ["-o", tmp_path / "out.jsonl", "--endpoint", server.url, "--max-concurrency", "4"]
        process = spawn("run", write_batch(tmp_path, lines), *options)
        wait_until(lambda: len(server.calls) >= 8)
        press(process)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130 and "run the same command again to go on" in said, said
        assert re.search(r"stopping: at most \d\d s for \d running requests", said), said
        done = len(answers(tmp_path))
        assert 4 <= done < 40 and server.in_flight == 0
        assert plait("run", tmp_path / "requests.jsonl", *options, "--quiet").exit_code == 0
        assert Counter(call.prompt for call in server.calls).most_common(1)[0][1] == 1
    assert len(answers(tmp_path)) == 40


@pytest.mark.parametrize("how", ["twice", "sigterm without grace"])
def test_stopping_now_leaves_valid_files_and_the_rest_to_do(how: str, tmp_path: Path) -> None:
    first_ones = threading.Semaphore(5)

    def reply(call: Call) -> Reply:
        return answer(call, "quick") if first_ones.acquire(blocking=False) else Reply(silent=True)

    with serving(reply=reply) as server:
        options = ["-o", tmp_path / "out.jsonl", "--endpoint", server.url]
        grace = ["--grace", "0"] if how != "twice" else []
        process = spawn("run", write_batch(tmp_path, LINES), *options, *grace)
        live = tmp_path / "out.live.jsonl"
        wait_until(lambda: live.exists() and live.read_bytes().count(b"\n") == 6)
        press(process, signal.SIGINT if how == "twice" else signal.SIGTERM)
        if how == "twice":
            time.sleep(0.5)  # the first one has been handled
            press(process)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130 and "7 requests are left" in said, said
        assert len(answers(tmp_path)) == 5
        server.behaviour = lambda call: answer(call, "later") if call.method == "POST" else models("m")
        assert plait("run", tmp_path / "requests.jsonl", *options, "--quiet").exit_code == 0
    assert len(answers(tmp_path)) == 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_before_anything_is_sent_ends_with_130_and_leaves_no_temporary_files(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / "temp").mkdir()
    probed: list[Call] = []

    def behave(call: Call) -> Reply:
        probed.append(call)
        return Reply(silent=True)

    with LoopbackServer(behave) as server:
        options = ["-o", tmp_path / "out.jsonl", "--endpoint", server.url]
        process = spawn("run", write_batch(tmp_path, LINES), *options, env={"TMPDIR": str(tmp_path / "temp")})
        wait_until(lambda: bool(probed))
        press(process, number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted; run the same command again" in said, said
    assert "Traceback" not in said
    assert not list((tmp_path / "temp").iterdir()) and not (tmp_path / "out.lock").exists()


def test_servers_that_are_gone_end_with_3_and_the_run_goes_on_later(tmp_path: Path) -> None:
    path = write_batch(tmp_path, LINES)
    result = plait("run", path, "-o", tmp_path / "out.jsonl", "--endpoint", "http://127.0.0.1:9/v1")
    assert result.exit_code == 3 and "no server answers" in result.output and "same command again" in result.output
    with serving() as server:
        assert run(server, tmp_path, path).exit_code == 0


def test_a_policy_that_does_not_exist_is_answered_with_a_near_one(tmp_path: Path) -> None:
    for command in (["run", "-o", tmp_path / "out.jsonl"], ["plan"]):
        result = plait(*command, write_batch(tmp_path, LINES), "--policy", "fcsf")
        assert result.exit_code == 2 and "did you mean 'fcfs'?" in result.output


def test_a_model_that_no_server_has_is_refused_by_name(tmp_path: Path) -> None:
    with serving() as server:
        result = run(server, tmp_path, write_batch(tmp_path, LINES), "--model", "typo")
        assert (result.exit_code, len(server.calls)) == (2, 0) and "the servers serve: m" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-o"],
        ["--kv-tokens", "0"],
        ["--kv-tokens", "many"],
        ["--kv-gib", "nan"],
        ["--kv-gib", "-1"],
        ["--kv-tokens", "100", "--kv-gib", "1"],
        ["--kv-tokens", "99999999999999"],
        ["--threads", "99999999"],
        ["--max-num-seqs", "99999999999"],
        ["--model", "/nowhere/model.gguf"],
        ["--model", ""],
        ["--model", "."],
        ["--endpoint", "not a url"],
        ["--endpoint", "http://127.0.0.1:9/v1", "--threads", "2"],
        ["--endpoint", "http://127.0.0.1:9/v1", "--api-key-env", "PLAIT_TEST_IS_NOT_SET"],
        ["--seed", "-1"],
        ["--seed", "99999999999999999999"],
        ["--stall-timeout", "0"],
        ["--stall-timeout", "nan"],
        ["--rpm", "nan"],
        ["--grace", "nan"],
        ["--on-overflow", "perhaps"],
        ["--progress", "loud"],
        ["--goal", "fame"],
        ["--policy", ""],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_no_option_value_is_a_traceback(arguments: list[str], tmp_path: Path) -> None:
    path = write_batch(tmp_path, ["{", "null"])
    output = [] if not arguments else ["-o", tmp_path / "out.jsonl"] if arguments != ["-o"] else []
    result = plait("run", path, *output, *arguments)
    assert result.exit_code in (1, 2, 3) and "Traceback" not in result.output
    assert result.output.strip()


@pytest.mark.parametrize("output", ["missing/out.jsonl", ".", "", "/dev/full/x", "requests.jsonl/x"])
def test_an_output_that_cannot_be_written_is_said_before_anything_runs(output: str, tmp_path: Path) -> None:
    path = write_batch(tmp_path, LINES)
    with serving() as server:
        where = str(tmp_path / output) if output else ""
        result = plait("run", path, "-o", where, "--endpoint", server.url)
        assert result.exit_code in (2, 3) and len(server.calls) == 0, result.output


def test_a_default_cap_is_sent_with_requests_that_set_none_and_with_no_other(tmp_path: Path) -> None:
    caps: dict[str, dict[str, int | None]] = {
        "a": {"max_tokens": None},
        "b": {"max_tokens": 5},
        "c": {"max_tokens": None, "max_completion_tokens": 7},
    }
    lines = [batch_line(name, name, **body) for name, body in caps.items()]
    with serving() as server:
        assert run(server, tmp_path, write_batch(tmp_path, lines), "--default-max-tokens", "3").exit_code == 0
        names = ("max_tokens", "max_completion_tokens")
        sent = {call.prompt: tuple(map(call.body.get, names)) for call in server.calls}
    assert sent == {"a": (3, None), "b": (5, None), "c": (None, 7)}


def test_a_full_disk_ends_the_run_saying_so_and_the_same_command_goes_on(tmp_path: Path) -> None:
    lines = [batch_line(f"id-{i}", f"question {i} " + "x" * 400) for i in range(200)]
    path = write_batch(tmp_path, lines)
    with serving() as server:
        options = [str(path), "-o", str(tmp_path / "out.jsonl"), "--endpoint", server.url, "--quiet"]
        limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
        code = limited + "from plait.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "run", *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
        assert "cannot write" in done.stderr and "run the same command again" in done.stderr.replace("\n", " ")
        kept = (tmp_path / "out.live.jsonl").read_bytes().count(b"\n") - 1
        assert 10 < kept < 200
        sent = len(server.calls)
        assert plait("run", *options).exit_code == 0 and len(server.calls) == sent + 200 - kept
    assert len(answers(tmp_path)) == 200
