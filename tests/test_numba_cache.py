"""The cache of compiled code: where it lies, and whether a first run still has to fill it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from plait._numba import compiled_before, njit

@njit
def more(x):
    return x + 1

before = compiled_before()
more(1)
print(before, compiled_before())
"""


def test_a_first_run_is_known_by_its_empty_cache(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PLAIT_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "-W", "ignore", str(script)]
    said = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in "12"]
    assert said == ["False True\n", "True True\n"]
    assert list((tmp_path / "cache" / "numba").glob("*/*/*.nbc"))
