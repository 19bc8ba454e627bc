"""A run may be killed at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.builders import batch_line, read_lines, write_batch


@pytest.mark.crash
def test_a_run_killed_at_any_file_operation_ends_with_the_same_files_when_it_is_run_again() -> None:
    """In a process of its own: it forks for every kill, and must have no threads. In memory, where there is a place
    for it: a killed process does not take the page cache with it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        command = [sys.executable, "-m", "tests.crash.killed", folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [] and done.returncode == 0, done.stderr
    assert found["kills"] >= 200 and found["operations"] >= 40


RUN = """
import sys
import tempfile
import time
from pathlib import Path
from plait.data.job import open_job
from plait.run.executor import Options, execute
from plait.testing import FakeEngine
from tests.builders import fifo_plan
folder = Path(sys.argv[1])
sent = 0

def fate(request, attempt):
    global sent
    sent += 1
    if sent > int(sys.argv[2]):
        time.sleep(300)  # however late the kill comes, the run is not done

engine = FakeEngine(real_time=True, decode_s=2e-3, fate=fate)
execute(open_job([folder / "requests.jsonl"], folder), fifo_plan, engine, Options(folder / "out.jsonl"))
print(len(engine.submitted))
"""


@pytest.mark.crash
def test_a_run_killed_after_eighty_answers_sends_only_the_rest(tmp_path: Path) -> None:
    """Case dur-01."""
    write_batch(tmp_path, [batch_line(f"q-{i}", f"question {i}") for i in range(200)])
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    root, live = Path(__file__).parents[2], tmp_path / "out.live.jsonl"
    with subprocess.Popen([*command, "120"], cwd=root) as first:
        while first.poll() is None and (not live.exists() or live.read_bytes().count(b"\n") < 81):
            time.sleep(0.005)
        first.kill()
    kept = live.read_bytes().count(b"\n") - 1
    assert first.returncode == -signal.SIGKILL and 80 <= kept < 200
    second = subprocess.run([*command, "200"], cwd=root, capture_output=True, text=True, check=True)
    assert int(second.stdout) == 200 - kept
    assert [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")] == [f"q-{i}" for i in range(200)]
