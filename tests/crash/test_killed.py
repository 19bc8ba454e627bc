"""A run may be killed at any moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.crash
def test_a_run_killed_at_any_file_operation_ends_with_the_same_files_when_it_is_run_again(tmp_path: Path) -> None:
    """In a process of its own: it forks for every kill, and must have no threads."""
    command = [sys.executable, "-m", "tests.crash.killed", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [] and done.returncode == 0, done.stderr
    assert found["kills"] >= 200 and found["operations"] >= 40
