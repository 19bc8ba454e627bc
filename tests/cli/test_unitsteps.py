"""``plait simulate --time steps`` through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from plait.cli import cli
from plait.errors import CapacityError, UsageError


def steps(tmp_path: Path, rows: str, *options: str) -> str:
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + rows)
    command = ["simulate", str(trace), "--time", "steps", *options]
    return CliRunner().invoke(cli, command, catch_exceptions=False, standalone_mode=True).output


def test_a_schedule_is_written_by_row_of_the_trace(tmp_path: Path) -> None:
    out = tmp_path / "s.csv"
    options = ("--kv-tokens", "10", "--policy", "latency", "--schedule", str(out), "--json")
    text = steps(tmp_path, "5,5\n2,2\n", *options)
    assert out.read_text() == "request,start_step\n0,1\n1,0\n"
    row = json.loads(text)["policies"][0]
    assert (row["tel"], row["makespan"], row["bound_kind"]) == (8, 6, "mean busy time")


def test_a_request_that_never_fits_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="row 1"):
        steps(tmp_path, "1,1\n9,9\n", "--kv-tokens", "10")


@pytest.mark.parametrize("options", [(), ("--kv-tokens", "10", "--optimize", "soon")])
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        steps(tmp_path, "1,1\n", *options)


def test_a_table_compares_policies(tmp_path: Path) -> None:
    assert "latency" in steps(tmp_path, "5,5\n1,2\n", "--kv-tokens", "10", "--optimize", "0.1s")
