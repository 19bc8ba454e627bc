"""``plait check`` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from plait.cli import cli
from tests.cli.command import press, spawn, wait_until
from tests.data.lines import batch, chat, completion, encoded


def check(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """Run the command in this process; an exception is a failure of the test."""
    return CliRunner().invoke(cli, ["check", *map(str, arguments)], input=stdin, catch_exceptions=False)


def test_a_good_file_exits_0_with_a_summary(tmp_path: Path) -> None:
    result = check(batch(tmp_path / "x", chat("a"), completion("b")))
    assert (result.exit_code, result.output) == (0, "2 requests: 2 good, 0 bad\n")


def test_each_problem_is_one_line_with_place_id_code_and_fix(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", chat("a"), chat("b\n\x1b", max_tokens=0), b"{", chat("c", max_token=1))
    result = check(path)
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"{path}:2 (custom_id 'b\\n\\x1b'): invalid_value: max_tokens is 0; an integer from 1 to 2147483647 is needed.",
        f"{path}:3: invalid_json_line: the line is not valid JSON: the line ends in the middle of a value.",
        f"{path}:4 (custom_id 'c'): unknown_parameter: \"max_token\" is not a parameter of /v1/chat/completions. "
        "Did you mean max_tokens?",
        "4 requests: 1 good, 3 bad",
        "errors: 1 invalid_value, 1 invalid_json_line, 1 unknown_parameter",
    ]


def test_warnings_alone_exit_0(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf" + encoded(chat("a")))
    result = check(tmp_path / "x")
    assert result.exit_code == 0 and "warning: byte_order_mark" in result.output


def test_the_list_is_cut_but_everything_is_counted(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", *[b"{,"] * 5)
    result = check("--max-problems", "2", path)
    assert result.output.count("invalid_json_line:") == 2
    assert "... and 3 more problems" in result.output and "errors: 5 invalid_json_line" in result.output
    assert check("--max-problems", "0", path).output.count("invalid_json_line:") == 5


def test_json_output_holds_the_same(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", chat("a"), chat("a"), b"{")
    result = check("--json", "--max-problems", "1", path, tmp_path / "missing")
    report = json.loads(result.output)
    assert result.exit_code == 2
    assert (report["requests"], report["good"], report["bad"], report["models"]) == (3, 1, 2, {"m": 2})
    assert report["errors"] == {"file_not_found": 1, "duplicate_custom_id": 1, "invalid_json_line": 1}
    assert report["problems_not_listed"] == 2
    (problem,) = report["problems"]
    assert problem == {
        "row": None,
        "file": str(tmp_path / "missing"),
        "line": None,
        "custom_id": None,
        "code": "file_not_found",
        "param": None,
        "message": "there is no such file",
        "fix": "",
        "severity": "error",
    }


def test_options_change_what_is_an_error(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", chat("a"), chat("a"))
    assert check(path).exit_code == 2
    assert check("--allow-duplicates", path).exit_code == 0
    assert check("--allow-duplicates", "--model", "m", path).exit_code == 0
    served = check("--allow-duplicates", "--model", "other", path)
    assert served.exit_code == 2 and "2 model_not_found" in served.output and "0 good, 2 bad" in served.output
    mixed = batch(tmp_path / "y", chat("a"), completion("b"))
    assert check(mixed).exit_code == 0
    assert "url_mismatch" in check("--openai-limits", mixed).output
    other = batch(tmp_path / "z", chat("a") | {"url": "/v1/embeddings"})
    assert (check(other).exit_code, check("--passthrough", other).exit_code) == (2, 0)


def test_standard_input_is_checked_too() -> None:
    result = check("-", stdin=encoded(chat("a"), b"{"))
    assert result.exit_code == 2 and "stdin:2: invalid_json_line" in result.output


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\x00\xff" * 100, b"[" * 50_000, b'{"a":' * 50_000, b"\x1f\x8b\x08"]
)
def test_no_content_is_a_traceback(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    result = check(tmp_path / "x")
    assert result.exit_code == 2 and result.output.startswith(str(tmp_path / "x"))


def test_no_file_at_all_is_a_usage_error() -> None:
    assert check().exit_code == 2


def test_no_engine_is_imported(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", chat("a"))
    code = (
        "import sys\n"
        "from plait.cli import cli\n"
        "try: cli(['check', sys.argv[1]])\n"
        "except SystemExit: print({'openvino', 'openvino_genai', 'aiohttp', 'pyarrow', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_terminal_that_cannot_show_an_id_is_no_traceback(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", chat("ж", é=1))
    command = [sys.executable, "-m", "plait", "check", str(path)]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stderr) == (2, b"")
    assert b"(custom_id '\\u0436'): unknown_parameter: \"\xe9\" is not" in done.stdout


@pytest.mark.parametrize("command", ["check", "plan"])
def test_ctrl_c_ends_a_command_that_only_reads_with_130_and_one_line(command: str, tmp_path: Path) -> None:
    path = batch(tmp_path / "x", *(completion(f"id-{i}") for i in range(20_000)))
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: however late the interrupt comes, the command is not done
    process = spawn(command, path, tmp_path / "pipe", env={"TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: any(tmp_path.glob(f"plait-{command}-*")))
        press(process)
        out, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out, said.strip()) == (130, "", "plait: interrupted")
    assert not any(tmp_path.glob(f"plait-{command}-*"))


def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", *(b"{" for _ in range(20_000)))
    command = f"'{sys.executable}' -m plait check '{path}' --max-problems 0 | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
