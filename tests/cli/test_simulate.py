"""``plait simulate`` on small traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from plait.cli import cli
from plait.errors import CapacityError, UsageError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """300 requests, a third in groups that share 200 tokens."""
    rng = np.random.default_rng(0)
    lines = ["prompt_tokens,output_tokens,group,shared_tokens"]
    for i in range(300):
        prompt, output = int(rng.integers(210, 900)), int(rng.integers(1, 400))
        lines.append(f"{prompt},{output},{i % 4 if i % 3 == 0 else ''},{200 if i % 3 == 0 else 0}")
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: str) -> str:
    """Standard output of ``plait simulate``."""
    result = CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)
    return result.output


def test_json_has_the_figures_of_every_policy(trace: Path) -> None:
    found = json.loads(run(str(trace), "--policy", "dfs", "--policy", "blend", "--lengths", "known", "--json"))
    assert [row["policy"] for row in found["policies"]] == ["dfs", "blend"]
    for row in found["policies"]:
        assert row["makespan_s"] >= row["practical_bound_s"] >= row["ideal_bound_s"] > 0
        assert 0 < row["sharing"] <= row["max_sharing"] + 1e-9
        assert {"tokens_per_s", "retracted", "mean_completion_s"} <= set(row)


def test_a_table_names_policies_and_bounds(trace: Path) -> None:
    output = run(str(trace), "--policy", "fcfs", "--dp", "2", "--engine-mode", "sequential")
    assert "fcfs" in output and "bounds: ideal" in output and "300 requests" in output


def test_a_figure_is_written(trace: Path, tmp_path: Path) -> None:
    run(str(trace), "--plot", str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("knowledge", ["guess", "sampled:2", "sampled:x", "known:1"])
def test_a_wrong_knowledge_of_lengths_is_explained(trace: Path, knowledge: str) -> None:
    with pytest.raises(UsageError, match="--lengths"):
        CliRunner().invoke(cli, ["simulate", str(trace), "--lengths", knowledge], catch_exceptions=False)


def test_an_impossible_capacity_is_explained(trace: Path) -> None:
    with pytest.raises(CapacityError, match="KV"):
        CliRunner().invoke(cli, ["simulate", str(trace), "--kv-tokens", "500"], catch_exceptions=False)


def test_a_schedule_needs_the_unit_step_clock(trace: Path) -> None:
    with pytest.raises(UsageError, match="--time steps"):
        CliRunner().invoke(cli, ["simulate", str(trace), "--schedule", "out.csv"], catch_exceptions=False)
