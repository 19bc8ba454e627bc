"""Imports that must not exist, as data: the boundaries of docs/architecture.md, checked on the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "plait"

OPEN_TO_ALL = {"errors", "_numba", "plait"}
NOUNS = {"table", "events", "model", "tree"}
PLANNING = NOUNS | {"lengths", "policy"}
CORE = PLANNING | {"scheduler", "scheduling", "bounds", "unitstep", "partition"}
MAY_IMPORT = {
    "errors": set(),
    "_numba": set(),
    "events": set(),
    "table": set(),
    "model": {"table", "events"},
    "tree": {"table", "model"},
    "lengths": {"table", "tree"},
    "policy": {"table", "tree", "model", "lengths", "events", "unitstep"},
    "scheduling": PLANNING,
    "scheduler": PLANNING | {"scheduling"},
    "bounds": PLANNING,
    "partition": PLANNING,
    "unitstep": PLANNING,
    "simulate": CORE,
    "deadlines": {"table", "model"},
    "online": CORE,
    "plan": CORE | {"simulate", "deadlines"},
    "drive": {"scheduler", "events"},
    "data": {"table", "tree", "events", "model"},
    "engine": {"events", "table", "model", "data"},
    "report": {"events", "table"},
}
"""Area -> areas it may import (itself always). Areas not listed (run, cli, testing, ...) may import anything."""

CORE_FORBIDS = {
    "openvino",
    "openvino_genai",
    "torch",
    "transformers",
    "vllm",
    "ray",
    "aiohttp",
    "asyncio",
    "pyarrow",
    "matplotlib",
    "click",
    "rich",
}
PURE = CORE | {"deadlines", "drive", "simulate", "online", "plan"}
IMPURE_NAMES = {"time", "os", "random"}


def area_of(path: Path) -> str:
    """First path component below the package: ``policy/orders.py`` -> ``policy``."""
    first = path.relative_to(SRC).parts[0]
    return "plait" if first == "__init__.py" else first.removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Every module imported anywhere in the file, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_a_module_imports_only_what_its_layer_allows(path: Path) -> None:
    area = area_of(path)
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "plait" and area in MAY_IMPORT:
            target = parts[1] if len(parts) > 1 else "plait"
            allowed = MAY_IMPORT[area] | OPEN_TO_ALL | {area}
            assert target in allowed, f"{path.relative_to(SRC)} ({area}) must not import plait.{target}"
        if area in PURE:
            assert parts[0] not in CORE_FORBIDS, (
                f"{path.relative_to(SRC)} is planning code and must not import {module}"
            )
            assert parts[0] not in IMPURE_NAMES, f"{path.relative_to(SRC)} is pure and must not import {module}"
        if area not in {"cli", "__main__"}:
            assert module != "plait.cli" and not module.startswith("plait.cli."), f"{path}: nothing imports the cli"


@pytest.mark.parametrize("path", [p for p in FILES if area_of(p) in PURE], ids=lambda path: str(path.relative_to(SRC)))
def test_planning_code_neither_opens_files_nor_prints(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input"}, f"{path}:{node.lineno}"


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, plait, plait.cli; print(','.join(m for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(",")
    heavy = CORE_FORBIDS - {"click"} | {"numpy", "numba", "msgspec"}
    assert not heavy & set(loaded)
