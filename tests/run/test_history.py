"""Output lengths of earlier runs: found again by what prompts begin with, and never worth failing for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.lengths import Lengths
from plait.run.history import History, basis
from plait.table import I64, RequestTable
from plait.tree.build import build_tree
from plait.tree.prefix import PrefixTree


def job(kinds: list[int], each: int, cap: int, seed: int = 0) -> tuple[RequestTable, PrefixTree]:
    """``each`` prompts of 60 tokens for each kind; those of a kind share 40 that only it has."""
    rng = np.random.default_rng(seed)
    prompts = [np.concatenate((np.full(40, 1000 + k), rng.integers(0, 900, 20))) for k in kinds for _ in range(each)]
    tokens = np.concatenate(prompts).astype(np.int32)
    offsets = np.arange(len(prompts) + 1, dtype=np.int64) * 60
    n = len(prompts)
    table = RequestTable.of(np.full(n, 60), np.full(n, cap), tokens=tokens, offsets=offsets)
    return table, build_tree(tokens, offsets)


def ran(folder: Path, kinds: list[int], output: I64, cap: int = 400) -> None:
    table, tree = job(kinds, len(output) // len(kinds), cap)
    History(folder, "m").learn(Lengths.unknown(table, tree), table, tree, output)


def begun(folder: Path, kinds: list[int], cap: int = 400) -> tuple[Lengths, float]:
    """Estimates of another job, other prompts of these kinds."""
    table, tree = job(kinds, 30, cap, seed=7)
    lengths = Lengths.unknown(table, tree)
    return lengths, History(folder, "m").seed(lengths, table, tree)


def test_prompts_that_begin_as_earlier_ones_are_expected_to_be_answered_as_long(tmp_path: Path) -> None:
    ran(tmp_path, [1, 2], np.repeat([20, 200], 30))
    lengths, familiar = begun(tmp_path, [2, 1])
    assert familiar == 1.0
    assert lengths.expected[:30] == pytest.approx(200, rel=0.15)
    assert lengths.expected[30:] == pytest.approx(20, rel=0.3)


def test_prompts_of_another_kind_teach_nothing(tmp_path: Path) -> None:
    before, nothing = begun(tmp_path, [3])
    ran(tmp_path, [1], np.full(30, 20))
    lengths, familiar = begun(tmp_path, [3])
    assert nothing == familiar == 0.0 and np.array_equal(lengths.expected, before.expected)


def test_a_chat_template_alone_is_enough_to_be_alike(tmp_path: Path) -> None:
    """Prompts that share too little for a class of their own are found by their first tokens."""

    def chats(seed: int) -> tuple[RequestTable, PrefixTree]:
        rng = np.random.default_rng(seed)
        prompts = [np.concatenate((np.full(18, 5), rng.integers(0, 900, 20))) for _ in range(30)]
        tokens = np.concatenate(prompts).astype(np.int32)
        offsets = np.arange(31, dtype=np.int64) * 38
        table = RequestTable.of(np.full(30, 38), np.full(30, 400), tokens=tokens, offsets=offsets)
        return table, PrefixTree.without_sharing(30)

    table, tree = chats(1)
    History(tmp_path, "m").learn(Lengths.unknown(table, tree), table, tree, np.full(30, 20))
    table, tree = chats(2)
    lengths = Lengths.unknown(table, tree)
    assert History(tmp_path, "m").seed(lengths, table, tree) == 1.0
    assert lengths.expected.mean() == pytest.approx(20, rel=0.5)


def test_answers_cut_off_count_as_longer(tmp_path: Path) -> None:
    ran(tmp_path, [1], np.full(30, 50), cap=50)
    lengths, _ = begun(tmp_path, [1])
    assert lengths.expected.mean() > 150


def test_new_answers_outweigh_old_ones(tmp_path: Path) -> None:
    ran(tmp_path, [1], np.full(30, 20))
    lengths, _ = begun(tmp_path, [1])
    lengths.observe_rows(np.arange(25), np.full(25, 200))
    lengths.refresh()
    assert lengths.expected.mean() > 110


def test_rows_without_an_answer_and_rows_of_fixed_length_teach_nothing(tmp_path: Path) -> None:
    ran(tmp_path, [1], np.full(30, -1))
    table, tree = job([1], 30, 400)
    fixed = RequestTable.of(
        table.prompt_tokens, table.max_tokens, tokens=table.tokens, offsets=table.offsets, min_tokens=table.max_tokens
    )
    History(tmp_path, "m").learn(Lengths.unknown(fixed, tree), fixed, tree, fixed.max_tokens)
    assert begun(tmp_path, [1])[1] == 0.0


@given(st.binary(max_size=40) | st.just(b'{"a": {"3": "x"}}') | st.just(b'{"a": [1]}') | st.just(b"[]"))
def test_a_damaged_file_counts_as_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "lengths").mkdir()
    (folder / "lengths" / "m.json").write_bytes(data)
    assert begun(folder, [1])[1] == 0.0


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("a file")
    ran(tmp_path, [1], np.full(30, 20))


def test_it_is_said_what_lengths_rest_on() -> None:
    fixed = RequestTable.of([5, 5], [9, 9], min_tokens=[9, 9])
    half = RequestTable.of([5, 5], [9, 9], min_tokens=[9, 0])
    assert "fixed" in basis(fixed, 1.0) and "guess" not in basis(fixed, 1.0)
    assert "50%" in basis(half, 0.0) and "guess" in basis(half, 0.0)
    assert "guess" not in basis(half, 0.5)
