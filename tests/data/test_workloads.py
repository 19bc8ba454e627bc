"""Workloads have the density and the sharing they are named for, and are the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.data.sources import PUBLISHED, burstgpt_like, mmlu_like, openvid_like
from plait.data.workloads import (
    PREFIX_RICH,
    REAL,
    SYNTHETIC,
    achieved,
    assemble,
    grid,
    paper_cost,
    synthetic,
    workload,
)
from plait.errors import UsageError
from plait.model.cost import set_density


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("n", [20_000, 100_000])
def test_the_papers_mixes_have_its_density_and_sharing(name: str, n: int) -> None:
    trace = workload(name, n)
    assert trace.table.n == n
    assert achieved(trace) == pytest.approx(SYNTHETIC[name], rel=0.03)


@pytest.mark.parametrize("name", REAL)
def test_mixes_of_real_lengths_have_their_density_and_sharing(shared: Path, name: str) -> None:
    trace = workload(name, 50_000, traces=shared / "data/traces")
    assert achieved(trace) == pytest.approx(REAL[name][1:], rel=0.05)


@pytest.mark.parametrize("name", PREFIX_RICH)
def test_prefix_rich_jobs_have_4000_groups_with_long_prefixes(name: str) -> None:
    trace = workload(name, 40_000)
    density, sharing = achieved(trace)
    assert density == pytest.approx(PREFIX_RICH[name], rel=0.01)
    assert sharing > 0.6
    prefixes = trace.tree.prefix_tokens[2:]  # behind the root and the system prompt
    assert len(prefixes) == 4000 and prefixes.min() >= 500 and prefixes.max() <= 3000


@pytest.mark.parametrize(("density", "sharing"), [(0.8, 0.05), (1.4, 0.45), (1.1, 0.25)])
def test_the_corners_of_the_grid_can_be_reached(density: float, sharing: float) -> None:
    assert len(set(grid())) == 65
    assert (density, sharing) in grid()
    assert achieved(synthetic(density, sharing, 40_000)) == pytest.approx((density, sharing), rel=0.03)


@pytest.mark.parametrize(
    ("source", "name"), [(burstgpt_like, "burstgpt"), (openvid_like, "openvid"), (mmlu_like, "mmlu")]
)
def test_sources_are_like_the_published_ones(source: object, name: str) -> None:
    assert callable(source)
    part = source(50_000, np.random.default_rng(0))
    sharing, density = PUBLISHED[name]
    prompt, output = part.prompt_tokens.astype(np.float64), part.output_tokens.astype(np.float64)
    assert set_density(paper_cost(), prompt, output) == pytest.approx(density, rel=0.15)
    if sharing > 0.5:
        assert achieved(assemble([part], 0, name))[1] == pytest.approx(sharing, abs=0.02)


def test_video_requests_answer_with_16000_tokens_on_average() -> None:
    part = openvid_like(50_000, np.random.default_rng(0))
    assert part.output_tokens.mean() == pytest.approx(16_000, rel=0.02)
    assert np.all(part.output_tokens % 256 == 0)


def test_the_same_seed_gives_the_same_job_and_another_seed_another_one() -> None:
    first, again, other = (workload("T1", 20_000, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.output_tokens, again.output_tokens)
    assert np.array_equal(first.table.prompt_tokens, again.table.prompt_tokens)
    assert not np.array_equal(first.output_tokens, other.output_tokens)


def test_requests_come_shuffled() -> None:
    trace = workload("T1", 20_000)
    node = trace.tree.node_of
    assert (node[1:] == node[:-1]).mean() < 0.5


def test_impossible_and_unknown_workloads_are_refused() -> None:
    with pytest.raises(UsageError, match="no mix of these sources"):
        synthetic(30.0, 0.95, 20_000)
    with pytest.raises(UsageError, match="unknown workload 'T9'; known: T1, T2"):
        workload("T9")
    with pytest.raises(UsageError, match="name the folder of the traces"):
        workload("X1")
