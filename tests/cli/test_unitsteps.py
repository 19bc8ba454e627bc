"""``plait simulate --time steps`` through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
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
    options = ("--kv-tokens", "10", "--policy", "latency", "--optimize", "0", "--schedule", str(out), "--json")
    text = steps(tmp_path, "5,5\n2,2\n", *options)
    assert out.read_text() == "request,start_step\n0,1\n1,0\n"
    row = json.loads(text)["policies"][0]
    assert (row["tel"], row["makespan"], row["bound_kind"]) == (8, 6, "Lagrangian LP")


def test_a_request_that_never_fits_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="row 1"):
        steps(tmp_path, "1,1\n9,9\n", "--kv-tokens", "10")


@pytest.mark.parametrize("options", [(), ("--kv-tokens", "10", "--optimize", "soon")])
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        steps(tmp_path, "1,1\n", *options)


def test_a_table_compares_policies(tmp_path: Path) -> None:
    assert "latency" in steps(tmp_path, "5,5\n1,2\n", "--kv-tokens", "10", "--optimize", "0.1s")


@pytest.mark.parametrize(
    ("policy", "said"),
    [("sorted-f-dp", "up to 100 requests, got 101; use sorted-f "), ("sorted-f-quantile", "at least 1000 requests")],
)
def test_a_policy_out_of_its_range_says_what_to_use(tmp_path: Path, policy: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        steps(tmp_path, "5,5\n" * 101, "--kv-tokens", "10", "--policy", policy)


def test_the_bound_is_the_same_for_all_policies_of_a_trace_and_below_each(tmp_path: Path) -> None:
    named = ["fcfs", "dispersed", "sorted-f", "sorted-f-dp", "sorted-f-swap", "sorted-lp"]
    options = [word for name in named for word in ("--policy", name)]
    text = steps(tmp_path, "5,5\n9,3\n1,2\n4,1\n" * 4, "--kv-tokens", "15", "--json", *options)
    rows = json.loads(text)["policies"]
    assert [row["policy"] for row in rows] == named
    assert len({row["bound"] for row in rows}) == 1
    assert all(row["ratio"] >= 1 for row in rows)


def test_requests_that_arrive_over_time_start_after_their_arrival(tmp_path: Path) -> None:
    trace, out = tmp_path / "a.csv", tmp_path / "s.csv"
    trace.write_text("prompt_tokens,output_tokens,arrival_s\n5,5,0\n5,9,0.5\n1,1,2\n")
    for policy in ("fcfs", "latency", "sorted-f-online"):
        options = ["--kv-tokens", "15", "--policy", policy, "--schedule", str(out), "--json"]
        result = CliRunner().invoke(cli, ["simulate", str(trace), "--time", "steps", *options], catch_exceptions=False)
        row = json.loads(result.output)["policies"][0]
        starts = [int(line.split(",")[1]) for line in out.read_text().split()[1:]]
        assert starts[1] >= 1 and starts[2] >= 2
        assert row["mean"] == pytest.approx((sum(starts) + 15 - 3) / 3)


def test_a_process_prints_json_and_nothing_else_on_standard_output(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n5,3\n6,9\n2,2\n9,4\n")
    options = ["--time", "steps", "--kv-tokens", "20", "--policy", "sorted-lp", "--policy", "latency", "--json"]
    command = [sys.executable, "-m", "plait", "simulate", str(trace), *options]
    out = subprocess.run(command, capture_output=True, check=True).stdout  # solvers in C write past Python's own stream
    assert [row["policy"] for row in json.loads(out)["policies"]] == ["sorted-lp", "latency"]
