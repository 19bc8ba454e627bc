"""``plait simulate --time steps`` through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from plait.cli import cli
from plait.errors import CapacityError, UsageError
from plait.unitstep.orders import NAMES
from tests.cli.command import plait


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


def exported(tmp_path: Path, table: str, kv_tokens: int, policy: str) -> tuple[list[int], dict[str, Any]]:
    """Start steps by row from the file that --schedule wrote, and the row of figures that --json printed."""
    trace, out = tmp_path / "g.csv", tmp_path / "g.out.csv"
    trace.write_text(table)
    options = ["--policy", policy, "--optimize", "0.2s", "--schedule", str(out), "--json"]
    result = plait("simulate", trace, "--time", "steps", "--kv-tokens", kv_tokens, *options)
    assert result.exit_code == 0, result.output
    header, *lines = out.read_text().split()
    assert header == "request,start_step"
    rows = [[int(word) for word in line.split(",")] for line in lines]
    assert [row for row, _ in rows] == list(range(len(rows)))
    return [start for _, start in rows], json.loads(result.output)["policies"][0]


def held_tokens(lengths: list[tuple[int, int]], groups: list[tuple[int, int]], starts: list[int]) -> list[int]:
    """Tokens held at each step, counted step by step; ``groups``: number (-1: none) and shared tokens of each row."""
    held = []
    for step in range(1, max(start + o for start, (_, o) in zip(starts, lengths, strict=True)) + 1):
        total, shared = 0, dict[int, int]()
        for start, (s, o), (group, tokens) in zip(starts, lengths, groups, strict=True):
            if start < step <= start + o:
                alone = group < 0
                total += s - (0 if alone else tokens) + step - start
                if not alone:
                    shared[group] = max(shared.get(group, 0), tokens)
        held.append(total + sum(shared.values()))
    return held


@pytest.mark.parametrize("policy", [*NAMES, "sorted-f-amin", "sorted-f-online"])
def test_the_schedule_that_each_policy_exports_fits_and_has_the_figures_printed(tmp_path: Path, policy: str) -> None:
    generator = np.random.default_rng(3)
    n = 1_000 if policy == "sorted-f-quantile" else 60
    lengths = [(int(s), int(o)) for s, o in generator.integers(1, 30, (n, 2))]
    table = "prompt_tokens,output_tokens\n" + "".join(f"{s},{o}\n" for s, o in lengths)
    starts, row = exported(tmp_path, table, 150, policy)
    assert min(starts) >= 0
    assert max(held_tokens(lengths, [(-1, 0)] * n, starts)) <= 150
    done = [start + o for start, (_, o) in zip(starts, lengths, strict=True)]
    assert row["tel"] == sum(done)
    assert row["mean"] == pytest.approx(np.mean(done))
    assert (row["p50"], row["p99"]) == pytest.approx(tuple(np.percentile(done, [50, 99])))
    assert row["bound"] <= row["tel"] + 1e-6
    assert row["bound_kind"] in ("mean busy time", "Lagrangian LP")


@pytest.mark.parametrize("policy", ["fcfs", "mc-sf", "sorted-f", "dispersed", "latency"])
def test_prompts_of_a_group_are_held_once_and_nothing_gets_worse_by_it(tmp_path: Path, policy: str) -> None:
    generator = np.random.default_rng(4)
    lengths = [(int(s) + 20, int(o)) for s, o in generator.integers(1, 20, (60, 2))]
    groups = [(int(group), 18 + int(group)) for group in generator.integers(0, 4, 60)]
    pairs = zip(lengths, groups, strict=True)
    table = "prompt_tokens,output_tokens,group,shared_tokens\n" + "".join(
        f"{s},{o},g{group},{shared}\n" for (s, o), (group, shared) in pairs
    )
    starts, row = exported(tmp_path, table, 120, policy)
    held = held_tokens(lengths, groups, starts)
    alone = "prompt_tokens,output_tokens\n" + "".join(f"{s},{o}\n" for s, o in lengths)
    _, before = exported(tmp_path, alone, 120, policy)
    assert max(held) <= 120 < max(held_tokens(lengths, [(-1, 0)] * 60, starts))
    assert row["bound"] <= row["tel"] < before["tel"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("prompt_tokens,output_tokens\n1,1\n0,1\n", "t.csv:3: prompt_tokens is '0'"),
        ("prompt_tokens,output_tokens\n1,1\n1,-4\n", "t.csv:3: output_tokens is '-4'"),
        ("prompt_tokens,output_tokens\n1,1\n1,nan\n", "t.csv:3: output_tokens is 'nan'"),
        ("prompt_tokens,output_tokens\n1,1\n1,\n", "t.csv:3: output_tokens is ''"),
        ("prompt_tokens,output_tokens\n1,1\n1,1.5\n", "t.csv:3: output_tokens is '1.5'"),
        ("prompt_tokens,output_tokens\n1,1\n9,2\n", "t.csv: row 1: 9 prompt + 2 output tokens exceed"),
        ("prompt_tokens,output_tokens,arrival_s\n1,1,0\n1,1,-1\n", "t.csv:3: arrival_s is '-1'"),
        ("prompt_tokens,output_tokens\n", "no requests below the header"),
    ],
)
def test_a_row_that_cannot_run_is_named_and_the_exit_code_is_2(tmp_path: Path, table: str, said: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(table)
    result = plait("simulate", trace, "--time", "steps", "--kv-tokens", "10")
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("budget", ["0", "-5", "nan", "1e9x"])
def test_a_budget_that_is_no_number_of_tokens_is_refused(tmp_path: Path, budget: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n1,1\n")
    result = plait("simulate", trace, "--time", "steps", "--kv-tokens", budget)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
