"""The paper's equations, on its own numbers and by brute force."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.workloads import paper_cost
from plait.model.cost import comp_s, cost_of, density, mem_s, memory_split, prefill_comp_s, set_density
from plait.model.specs import device, model

COST = paper_cost()
LENGTHS = st.integers(1, 100_000)


def test_the_equations_written_out_for_llama_8b_on_an_a100() -> None:
    p, d = 1000.0, 200.0
    comp = (2 * (p + d) * 8_029_995_008 + 4 * p**2 * 4096 * 32) / 312e12
    mem = (p * d + d**2 / 2) * (8 * 128) * 32 * 4 / 2.0e12
    assert comp_s(COST, p, d) == pytest.approx(comp)
    assert mem_s(COST, p, d) == pytest.approx(mem)


def test_the_worked_example_of_the_dual_scan() -> None:
    left, right = memory_split(3.73, 0.096, 1.27)
    assert 60 * left == pytest.approx(19.3, abs=0.15)
    assert 60 * right == pytest.approx(40.7, abs=0.15)


def test_a_video_request_has_the_density_of_the_worked_example() -> None:
    assert density(comp_s(COST, 256.0, 16_000.0), mem_s(COST, 256.0, 16_000.0)) == pytest.approx(0.096, abs=0.001)


@pytest.mark.parametrize(
    ("trace", "rho"),
    [("arxiv_summarization", 3.482), ("azure_conv_2023", 4.395), ("lmsys", 3.749), ("sharegpt", 2.770)],
)
def test_densities_of_real_traces(shared: Path, trace: str, rho: float) -> None:
    with gzip.open(shared / f"data/traces/{trace}.csv.gz", "rt") as file:
        rows = [(float(row["prompt_tokens"]), float(row["output_tokens"])) for row in csv.DictReader(file)]
    prompt, output = np.array(rows).T
    assert set_density(COST, prompt, output) == pytest.approx(rho, abs=0.001)


@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=20))
def test_scalar_and_vector_forms_agree(pairs: list[tuple[int, int]]) -> None:
    prompt, output = np.array(pairs, np.float64).T
    for function in (comp_s, mem_s):
        assert function(COST, prompt, output).tolist() == [function(COST, float(p), float(d)) for p, d in pairs]
    ratio = density(comp_s(COST, prompt, output), mem_s(COST, prompt, output))
    assert ratio.tolist() == [
        density(comp_s(COST, float(p), float(d)), mem_s(COST, float(p), float(d))) for p, d in pairs
    ]


@given(LENGTHS, LENGTHS, LENGTHS)
def test_a_prompt_cut_anywhere_costs_as_much_as_the_whole(a: int, b: int, d: int) -> None:
    cut, end = float(min(a, b)), float(max(a, b))
    parts = prefill_comp_s(COST, 0.0, cut) + prefill_comp_s(COST, cut, end) + COST.token_s * d
    assert parts == pytest.approx(comp_s(COST, end, float(d)))


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_two_shares_of_memory_add_up_and_stay_within_bounds(left: float, right: float, root: float) -> None:
    share_left, share_right = memory_split(left, right, root)
    assert share_left + share_right == pytest.approx(1)
    assert 0 <= share_left <= 1


def test_sharing_lowers_the_density_of_a_set_in_proportion() -> None:
    prompt, output = np.array([100.0, 2000.0]), np.array([50.0, 1.0])
    assert set_density(COST, prompt, output, 0.3) == pytest.approx(0.7 * set_density(COST, prompt, output))


def test_density_is_infinite_without_memory_time() -> None:
    assert density(1.0, 0.0) == np.inf
    assert density(np.ones(2), np.array([0.0, 2.0])).tolist() == [np.inf, 0.5]


def test_tensor_parallelism_leaves_density_alone_while_kv_heads_can_be_split() -> None:
    a100, llama = device("A100-80"), model("Llama-3.1-70B")
    one, eight, sixteen = (cost_of(a100, llama, tp) for tp in (1, 8, 16))
    assert one.token_s / one.kv_read_s == pytest.approx(eight.token_s / eight.kv_read_s)
    assert sixteen.kv_read_s == eight.kv_read_s


def test_a_mixture_of_experts_computes_with_its_active_weights() -> None:
    moe = model("Mixtral-8x7B")
    assert cost_of(device("H100"), moe).token_s == pytest.approx(2 * moe.active_params / device("H100").flops)
