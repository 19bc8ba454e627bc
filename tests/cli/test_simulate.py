"""``plait simulate`` on small traces and batch files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from plait.cli import cli
from plait.cli.simulate_plot import usage
from plait.errors import CapacityError, InputError, PlaitError, UsageError
from plait.model.steptime import StepTime
from plait.scheduling.virtual import STEP
from tests.builders import batch_line, write_batch

ISSUE_KEYS = {
    "policy",
    "makespan_s",
    "tokens_per_s",
    "ideal_bound_s",
    "practical_bound_s",
    "sharing",
    "max_sharing",
    "retracted",
    "mean_completion_s",
}
MORE_KEYS = {"trace", "overhead_bound_s", "share_of_practical", "recomputed_tokens", "p99_completion_s", "steps"}


def rows() -> list[list[Any]]:
    """Columns prompt_tokens, output_tokens, group, shared_tokens of 300 requests: a third share 200 tokens in groups"""
    rng = np.random.default_rng(0)
    found = []
    for i in range(300):
        prompt, output = int(rng.integers(210, 900)), int(rng.integers(1, 400))
        found.append([prompt, output, f"g{i % 4}" if i % 3 == 0 else "", 200 if i % 3 == 0 else 0])
    return found


def csv_text() -> str:
    lines = ["prompt_tokens,output_tokens,group,shared_tokens"]
    return "\n".join(lines + [",".join(str(value) for value in row) for row in rows()]) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(csv_text())
    return path


def run(*arguments: str) -> str:
    """Standard output of ``plait simulate``."""
    result = CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)
    return result.stdout


def policies(*arguments: str) -> list[dict[str, Any]]:
    """What ``--json`` says."""
    found = json.loads(run(*arguments, "--json"))
    assert set(found) == {"policies"}
    rows: list[dict[str, Any]] = found["policies"]
    return rows


def without_name(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "trace"} for row in rows]


def test_json_has_the_figures_of_every_policy(trace: Path) -> None:
    found = policies(str(trace), "--policy", "dfs", "--policy", "blend", "--lengths", "known")
    assert [row["policy"] for row in found] == ["dfs", "blend"]
    for row in found:
        assert set(row) == ISSUE_KEYS | MORE_KEYS
        assert row["makespan_s"] >= row["practical_bound_s"] >= row["ideal_bound_s"] > 0
        assert 0 < row["sharing"] <= row["max_sharing"] + 1e-9
        assert 0 < row["mean_completion_s"] <= row["p99_completion_s"] <= row["makespan_s"]


def test_a_table_names_policies_and_bounds(trace: Path) -> None:
    output = run(str(trace), "--policy", "fcfs", "--dp", "2", "--engine-mode", "sequential")
    assert "fcfs" in output and "bounds: ideal" in output and "300 requests" in output


def test_csv_parquet_and_gzip_of_the_same_rows_give_the_same_figures(trace: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    names = ["prompt_tokens", "output_tokens", "group", "shared_tokens"]
    columns = dict(zip(names, map(list, zip(*rows(), strict=True)), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "trace.parquet")
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(trace.read_bytes()))
    figures = [
        without_name(policies(str(tmp_path / name), "--policy", "dfs"))
        for name in ("trace.csv", "trace.csv.gz", "trace.parquet")
    ]
    assert figures[0] == figures[1] == figures[2]


def test_a_mooncake_trace_shares_its_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 10 * i, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 100 + i]} for i in range(50)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = policies(str(path), "--policy", "dfs")
    assert row["sharing"] == pytest.approx(1024 * 49 / (1100 * 50))


def test_the_engine_mode_matters(trace: Path) -> None:
    overlapped, sequential = (
        policies(str(trace), "--policy", "dfs", "--engine-mode", mode)[0] for mode in ("overlapped", "sequential")
    )
    assert sequential["makespan_s"] > overlapped["makespan_s"]


def test_more_ranks_take_less_time_and_run_everything(trace: Path) -> None:
    alone, ranks = (policies(str(trace), "--policy", "fcfs", "--dp", str(dp))[0] for dp in (1, 3))
    assert ranks["makespan_s"] < alone["makespan_s"]
    assert ranks["practical_bound_s"] == pytest.approx(alone["practical_bound_s"] / 3)
    assert ranks["tokens_per_s"] * ranks["makespan_s"] == pytest.approx(alone["tokens_per_s"] * alone["makespan_s"])


def test_the_same_seed_gives_the_same_figures_and_another_one_another_order(trace: Path) -> None:
    same = [policies(str(trace), "--policy", "random", "--seed", "5") for _ in range(2)]
    assert same[0] == same[1]
    assert policies(str(trace), "--policy", "random", "--seed", "6") != same[0]


def test_lengths_can_be_known_or_sampled_in_part(trace: Path) -> None:
    for knowledge in ("known", "sampled", "sampled:0.2"):
        assert policies(str(trace), "--policy", "dual-scan", "--lengths", knowledge)[0]["makespan_s"] > 0


def test_a_batch_file_is_tokenised_and_its_answers_stay_below_max_tokens(tmp_path: Path) -> None:
    prefix = "You are a careful assistant who answers with one word and never explains anything at all. " * 3
    path = write_batch(tmp_path, [batch_line(f"r{i}", prefix + f"Number {i}?", max_tokens=8) for i in range(40)])
    (row,) = policies(str(path), "--policy", "dfs")
    assert row["policy"] == "dfs" and row["max_sharing"] > 0.5
    tokens = row["tokens_per_s"] * row["makespan_s"]
    assert 40 * 40 < tokens < 40 * 200


def test_bad_lines_of_a_batch_file_are_named(tmp_path: Path) -> None:
    path = write_batch(tmp_path, [batch_line("a", "Hello"), "{not json"])
    with pytest.raises(InputError, match=r"1 of the 2 requests cannot run\n.*requests.jsonl:2"):
        run(str(path))


def test_requests_of_a_batch_file_that_never_fit_are_named(tmp_path: Path) -> None:
    path = write_batch(tmp_path, [batch_line("a", "Hello " * 200)])
    with pytest.raises(InputError, match=r"requests\.jsonl:1.*'a'|'a'.*requests\.jsonl:1"):
        run(str(path), "--kv-tokens", "100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens,output_tokens\n10,5\n10,-3\n", r"trace.csv:3: output_tokens is '-3'"),
        ("prompt_tokens,output_tokens\n10,5\nten,3\n", r"trace.csv:3: prompt_tokens is 'ten'"),
        ("prompt_tokens\n10\n", "no column output_tokens"),
        ("prompt_tokens,output_tokens\n", "no requests"),
        ("", "empty"),
    ],
)
def test_bad_rows_are_located(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(InputError, match=message) as found:
        run(str(tmp_path / "trace.csv"))
    assert found.value.exit_code == 2


@pytest.mark.parametrize("name", ["missing.csv", "missing.jsonl", "table.xlsx"])
def test_files_that_cannot_be_read_are_explained(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlaitError, match=name) as found:
        run(str(tmp_path / name))
    assert found.value.exit_code == 2


def test_a_cut_off_gzip_file_is_explained(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"hash_ids": [1]}\n' * 1000)[:40])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz"):
        run(str(path))


def test_a_figure_is_written(trace: Path, tmp_path: Path) -> None:
    run(str(trace), "--plot", str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["figure.nonsense", "no/such/folder/figure.png"])
def test_a_figure_that_cannot_be_written_is_explained(trace: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--plot"):
        run(str(trace), "--policy", "fcfs", "--plot", str(tmp_path / name))


def test_the_figure_shows_the_share_of_each_step_that_compute_and_memory_are_busy() -> None:
    steps = np.zeros(2, STEP)
    steps["t_s"], steps["duration_s"] = [2.0, 4.0], 2.0
    steps["prefill_tokens"], steps["decode_context_tokens"] = [10, 0], [0, 5]
    time_s, compute, memory = usage(steps, StepTime(0.1, 0.0, 0.0, 0.2, 0.0))
    assert time_s.tolist() == [2.0, 4.0]
    assert compute.tolist() == pytest.approx([0.5, 0.0]) and memory.tolist() == pytest.approx([0.0, 0.5])


def test_long_simulations_say_how_far_they_are_on_standard_error(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cli.simulate.SAY_EVERY_S", 0.0)
    result = CliRunner().invoke(cli, ["simulate", str(trace), "--policy", "dfs", "--json"], catch_exceptions=False)
    assert "trace.csv, dfs: 300 of 300 requests simulated" in result.stderr
    assert json.loads(result.stdout)["policies"]


@pytest.mark.parametrize("knowledge", ["guess", "sampled:2", "sampled:x", "sampled:0", "known:1"])
def test_a_wrong_knowledge_of_lengths_is_explained(trace: Path, knowledge: str) -> None:
    with pytest.raises(UsageError, match="--lengths"):
        run(str(trace), "--lengths", knowledge)


@pytest.mark.parametrize(("option", "value"), [("--policy", "bland"), ("--device", "A200"), ("--model", "Lama")])
def test_values_that_do_not_exist_are_explained(trace: Path, option: str, value: str) -> None:
    with pytest.raises(PlaitError) as found:
        run(str(trace), option, value)
    assert found.value.exit_code == 2


@pytest.mark.parametrize("arguments", [["--dp", "0"], ["--engine-mode", "parallel"], ["--kv-tokens", "0"], []])
def test_options_out_of_range_end_with_exit_code_2(trace: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["simulate", *([str(trace), *arguments] if arguments else [])])
    assert result.exit_code == 2 and "Usage" in result.stderr


@pytest.mark.parametrize("limits", [["--kv-tokens", "500"], ["--kv-tokens", "1290", "--block-tokens", "400"]])
def test_an_impossible_capacity_is_explained(trace: Path, limits: list[str]) -> None:
    with pytest.raises(CapacityError, match="KV") as found:
        run(str(trace), *limits)
    assert found.value.exit_code == 2


def test_a_schedule_needs_the_unit_step_clock(trace: Path) -> None:
    with pytest.raises(UsageError, match="--time steps"):
        run(str(trace), "--schedule", "out.csv")
