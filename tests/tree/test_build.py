"""The compiled tree against a brute-force trie."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import InputError
from plait.tree.build import build_tree, tree_from_blocks, tree_from_groups
from plait.tree.sharing import sharing_ratio
from tests.tree import oracle

PROMPTS = st.lists(st.lists(st.integers(-1, 2), min_size=1, max_size=12), max_size=24)
"""Few distinct tokens: duplicates, prefixes of one another and deep trees are the rule."""


@given(PROMPTS)
def test_nodes_are_the_maximal_common_prefixes(prompts: list[list[int]]) -> None:
    tree = build_tree(*oracle.columns(prompts))
    oracle.check_structure(tree, len(prompts))
    assert sorted(oracle.node_prefixes(tree, prompts)[1:]) == sorted(oracle.shared_prefixes(prompts))


@given(PROMPTS)
def test_depth_first_order_is_lexicographic_and_equal_prompts_keep_their_order(prompts: list[list[int]]) -> None:
    tree = build_tree(*oracle.columns(prompts))
    assert tree.dfs_rows.tolist() == sorted(range(len(prompts)), key=lambda row: (prompts[row], row))


@given(PROMPTS)
def test_a_row_hangs_off_the_deepest_node_that_is_a_prefix_of_it(prompts: list[list[int]]) -> None:
    tree = build_tree(*oracle.columns(prompts))
    nodes = oracle.node_prefixes(tree, prompts)
    for row, prompt in enumerate(prompts):
        fitting = [node for node in nodes if tuple(prompt[: len(node)]) == node]
        assert nodes[tree.node_of[row]] == max(fitting, key=len)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=20, max_size=120))
def test_long_ranges_are_sorted_like_short_ones(prompts: list[list[int]]) -> None:
    tree = build_tree(*oracle.columns(prompts))
    assert tree.dfs_rows.tolist() == sorted(range(len(prompts)), key=lambda row: (prompts[row], row))


@given(PROMPTS, st.integers(2, 5))
def test_block_mode_shares_whole_blocks_only(prompts: list[list[int]], block: int) -> None:
    tree = build_tree(*oracle.columns(prompts), block_tokens=block)
    oracle.check_structure(tree, len(prompts))
    blocks = [[tuple(p[i : i + block]) for i in range(0, len(p) - block + 1, block)] for p in prompts]
    ids = {b: i for i, b in enumerate(sorted({b for row in blocks for b in row}))}
    whole = oracle.shared_prefixes([[ids[b] for b in row] for row in blocks])
    assert sorted(tree.prefix_tokens[1:].tolist()) == sorted(len(prefix) * block for prefix in whole)


@given(PROMPTS, st.integers(2, 6))
def test_short_segments_are_folded_into_the_node_above(prompts: list[list[int]], shortest: int) -> None:
    exact = build_tree(*oracle.columns(prompts))
    tree = build_tree(*oracle.columns(prompts), min_segment_tokens=shortest)
    oracle.check_structure(tree, len(prompts))
    assert np.all(tree.segment_tokens[1:] >= shortest)
    assert np.all(exact.prefix_tokens[exact.node_of] - tree.prefix_tokens[tree.node_of] < shortest)
    assert set(oracle.node_prefixes(tree, prompts)) <= set(oracle.node_prefixes(exact, prompts))


def test_no_rows_and_one_row_make_a_bare_root() -> None:
    for prompts in ([], [[5, 6, 7]]):
        tree = build_tree(*oracle.columns(prompts))
        oracle.check_structure(tree, len(prompts))
        assert tree.n_nodes == 1


def test_empty_prompts_come_first_and_share_nothing() -> None:
    tree = build_tree(*oracle.columns([[1, 2], [], [1, 3], []]))
    oracle.check_structure(tree, 4)
    assert tree.dfs_rows.tolist() == [1, 3, 0, 2]
    assert tree.n_nodes == 2


def test_a_chain_of_prompts_each_extending_the_last_is_one_node_deep_per_prompt() -> None:
    prompts = [list(range(k)) for k in range(1, 1500)]
    tree = build_tree(*oracle.columns(prompts))
    assert tree.n_nodes == 1499  # every prompt but the longest is a prefix of another
    assert np.array_equal(tree.parent, np.arange(-1, 1498))


def test_extreme_token_ids_do_not_confuse_the_sort() -> None:
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    prompts = [[high, 1], [low], [high], [low, low], [0]]
    tree = build_tree(*oracle.columns(prompts))
    assert tree.dfs_rows.tolist() == [1, 3, 4, 2, 0]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [], [0, 5]])
def test_offsets_that_do_not_cover_the_column_are_refused(offsets: list[int]) -> None:
    with pytest.raises(InputError, match="offsets must run from 0 to the 3 tokens"):
        build_tree(np.zeros(3, np.int32), np.array(offsets, np.int64))


def test_decreasing_offsets_are_refused_naming_the_row() -> None:
    with pytest.raises(InputError, match="row 1: its prompt ends before it begins"):
        build_tree(np.zeros(3, np.int32), np.array([0, 2, 1, 3], np.int64))


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 6), st.integers(1, 6)), max_size=20))
def test_group_traces_equal_a_tree_over_spelled_out_prompts(rows: list[tuple[int, int, int]]) -> None:
    group = np.array([g for g, _, _ in rows], np.int64)
    shared = np.array([s for _, s, _ in rows], np.int64)
    prompt = np.array([p for _, _, p in rows], np.int64)
    spelled = []
    for row, (g, s, p) in enumerate(rows):
        known = min(s, p) if g >= 0 else 0
        spelled.append([1000 * (g + 1) + k for k in range(known)] + [100_000 + 100 * row + k for k in range(p - known)])
    tree, expected = tree_from_groups(prompt, group, shared), build_tree(*oracle.columns(spelled))
    oracle.check_structure(tree, len(rows))
    assert sorted(tree.prefix_tokens.tolist()) == sorted(expected.prefix_tokens.tolist())
    assert np.array_equal(tree.prefix_tokens[tree.node_of], expected.prefix_tokens[expected.node_of])


@given(PROMPTS, st.integers(1, 4))
def test_block_traces_share_what_their_whole_blocks_share(ids: list[list[int]], block: int) -> None:
    flat, offsets = oracle.columns(ids)
    prompt = oracle.lengths(ids) * block - (np.arange(len(ids)) % block)
    tree = tree_from_blocks(flat, offsets, block, prompt)
    oracle.check_structure(tree, len(ids))
    assert np.all(tree.prefix_tokens[tree.node_of] <= prompt)
    best = [
        max((min(oracle.common(a, b) * block, prompt[i], prompt[j]) for j, b in enumerate(ids) if j != i), default=0)
        for i, a in enumerate(ids)
    ]
    assert np.array_equal(tree.prefix_tokens[tree.node_of], np.array(best, np.int64))


@pytest.mark.parametrize(("trace", "sharing"), [("mooncake_conversation_tail", 0.328), ("mooncake_synthetic", 0.651)])
def test_mooncake_traces_share_what_their_description_says(shared: Path, trace: str, sharing: float) -> None:
    with gzip.open(shared / "data" / "traces" / f"{trace}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    flat, offsets = oracle.columns([row["hash_ids"] for row in rows])
    prompt = np.array([row["input_length"] for row in rows], np.int64)
    tree = tree_from_blocks(flat, offsets, 512, prompt)
    assert sharing_ratio(tree, prompt) == pytest.approx(sharing, abs=0.005)


def test_words_of_the_bbh_prompts_share_about_what_their_tokens_do(shared: Path) -> None:
    with gzip.open(shared / "data" / "prompts" / "bbh_cot_3shot_15tasks.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    words = [row["prompt"].split() for row in rows]
    numbers = {word: i for i, word in enumerate(sorted({word for row in words for word in row}))}
    prompts = [[numbers[word] for word in row] for row in words]
    tree = build_tree(*oracle.columns(prompts))
    assert sharing_ratio(tree, oracle.lengths(prompts)) == pytest.approx(0.9186, abs=0.02)
    tasks = [{rows[r]["group"] for r in tree.dfs_rows[b:e]} for b, e in zip(tree.row_begin, tree.row_end, strict=True)]
    assert any(len(task) == 1 and e - b >= 200 for task, b, e in zip(tasks, tree.row_begin, tree.row_end, strict=True))
