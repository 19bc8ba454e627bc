"""Length estimates: classes, sample plan, survival curves, and what may and may not be known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import InputError, UsageError
from plait.lengths import Lengths, paper_estimate
from plait.lengths.classes import MOST_CLASSES, PREFIX_LEVELS, cut_classes
from plait.lengths.survival import PRIOR_TOKENS
from plait.table import F64, I64, RequestTable
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree


def job(n: int, groups: int, seed: int = 0, max_tokens: int | None = None) -> tuple[RequestTable, PrefixTree, I64, I64]:
    """Rows in groups with a shared prefix; group g answers about 20 * 2**g tokens. Also groups, true lengths."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, groups, n)
    prompt = rng.integers(50, 400, n)
    true = np.maximum(1, rng.gamma(4.0, 5.0 * 2.0**group)).astype(np.int64)
    table = RequestTable.of(prompt, None if max_tokens is None else np.full(n, max_tokens))
    return table, tree_from_groups(prompt, group, np.full(n, 30)), group, true


def kaplan_meier(events: list[int], running: list[int], at: int) -> float:
    """P(longer than ``at``), by the textbook product over event times."""
    alive = 1.0
    for t in sorted(set(events)):
        if t <= at:
            risk = sum(e >= t for e in events) + sum(r >= t for r in running)
            alive *= 1.0 - events.count(t) / risk
    return alive


# ---------------------------------------------------------------- classes and sample


@given(st.integers(0, 3000), st.integers(1, 40), st.integers(0, 3))
def test_classes_form_a_hierarchy_that_covers_each_row_once(n: int, groups: int, seed: int) -> None:
    table, tree, _, _ = job(n, groups, seed) if n else (RequestTable.of([]), PrefixTree.without_sharing(0), None, None)
    classes = cut_classes(tree, table.prompt_tokens)
    assert classes.parent[0] == -1
    assert np.all(classes.parent[1:] < np.arange(1, len(classes.parent)))
    assert sorted(classes.rows.tolist()) == list(range(n))
    assert set(classes.of_row.tolist()).isdisjoint(classes.parent[1:].tolist())  # rows belong to leaves only
    assert classes.counts()[0] == n


def test_rows_of_one_class_cut_by_prefix_share_that_prefix() -> None:
    table, tree, group, _ = job(4000, 6)
    classes = cut_classes(tree, table.prompt_tokens)
    for c in np.unique(classes.of_row):
        assert len(np.unique(group[classes.of_row == c])) == 1


def test_the_number_of_classes_is_bounded_for_any_job() -> None:
    n = 300_000
    group = np.arange(n) // 3
    tree = tree_from_groups(np.full(n, 10), group, np.full(n, 5))
    assert len(np.unique(cut_classes(tree, np.arange(1, n + 1)).of_row)) <= MOST_CLASSES
    chain = tree_from_groups(np.full(3000, 4000), np.zeros(3000, np.int64), np.arange(3000))
    assert len(cut_classes(chain, np.full(3000, 4000)).parent) < 1000


def test_a_prefix_of_all_rows_is_no_class_of_its_own() -> None:
    tree = tree_from_groups(np.full(500, 10), np.zeros(500, np.int64), np.full(500, 5))
    assert len(cut_classes(tree, np.full(500, 10)).parent) == 1


def test_sample_is_one_percent_and_meets_every_class_cut_by_prefix() -> None:
    table, tree, group, _ = job(5000, 20)
    rows = Lengths.unknown(table, tree, seed=1).sample_rows()
    assert len(np.unique(rows)) == len(rows)
    assert 50 <= len(rows) <= 50 + 20
    assert len(np.unique(group[rows])) == 20


def test_sample_is_the_same_under_a_seed_and_differs_between_seeds() -> None:
    table, tree, _, _ = job(5000, 3)
    first, again, other = (Lengths.unknown(table, tree, seed=s).sample_rows() for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_impossible_sample_fractions_are_refused(fraction: float) -> None:
    table, tree, _, _ = job(100, 2)
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        Lengths.unknown(table, tree).sample_rows(fraction)


# ---------------------------------------------------------------- curves


@given(
    st.lists(st.integers(1, 12), min_size=200, max_size=400),
    st.lists(st.integers(1, 12), max_size=100),
    st.integers(1, 12),
)
def test_curve_is_kaplan_meier_where_data_are_plenty(events: list[int], running: list[int], at: int) -> None:
    n = len(events) + len(running)
    lengths = Lengths.unknown(RequestTable.of(np.full(n, 7)), PrefixTree.without_sharing(n))
    lengths.observe_rows(np.arange(len(events)), np.array(events))
    lengths.observe_rows(np.arange(len(events), n), np.array(running, np.int64), finished=False)
    lengths.refresh()
    # bins hold single tokens here; a running answer seen at t is at risk up to t
    point = int(np.searchsorted(lengths.grid_tokens, at))
    assert lengths.survival[0, point] == pytest.approx(kaplan_meier(events, running, at), abs=0.02)


@given(st.integers(0, 400), st.integers(1, 6), st.integers(0, 5))
def test_curves_fall_from_one_and_expectations_stay_between_one_and_max_tokens(n: int, groups: int, seed: int) -> None:
    table, tree, _, true = job(n + 1, groups, seed, max_tokens=100)
    lengths = Lengths.unknown(table, tree, seed)
    rng = np.random.default_rng(seed)
    for row in rng.permutation(n + 1)[: n // 2]:
        lengths.observe(int(row), int(min(true[row], 100)), bool(rng.integers(2)))
    lengths.refresh()
    assert np.all(lengths.survival[:, 0] == 1.0)
    assert np.all(np.diff(lengths.survival, axis=1) <= 1e-12)
    assert np.all((lengths.expected >= 1.0) & (lengths.expected <= 100.0))
    for generated in (0, 1, 50, 99):
        assert 1.0 <= lengths.expected_remaining(0, generated) <= 100 - generated


def test_with_every_answer_seen_the_expectation_is_the_mean_of_the_class() -> None:
    table, tree, group, true = job(20_000, 5)
    lengths = Lengths.unknown(table, tree)
    lengths.observe_rows(np.arange(table.n), true)
    lengths.refresh()
    for g in range(5):
        assert lengths.expected[group == g].mean() == pytest.approx(true[group == g].mean(), rel=0.01)


def test_running_answers_keep_the_estimate_from_falling_to_the_short_ones() -> None:
    rng = np.random.default_rng(0)
    true = rng.geometric(1 / 200, 4000).astype(np.int64)
    table, tree = RequestTable.of(np.full(4000, 9)), PrefixTree.without_sharing(4000)
    lengths = Lengths.unknown(table, tree)
    done = true <= 60  # everything started together and ran 60 steps
    lengths.observe_rows(np.flatnonzero(done), true[done])
    lengths.observe_rows(np.flatnonzero(~done), np.full(int((~done).sum()), 60), finished=False)
    lengths.refresh()
    naive = true[done].mean()
    assert naive < 35
    assert 120 < lengths.expected[0] < 400


def test_an_answer_cut_by_max_tokens_counts_as_longer() -> None:
    table, tree = RequestTable.of(np.full(50, 9), np.full(50, 64)), PrefixTree.without_sharing(50)
    lengths = Lengths.unknown(table, tree)
    lengths.observe_rows(np.arange(40), np.full(40, 64))
    lengths.refresh()
    point = int(np.searchsorted(lengths.grid_tokens, 64))
    assert lengths.survival[0, point] > 0.95
    assert lengths.expected[45] == pytest.approx(64, rel=0.02)


def test_a_thin_class_leans_on_the_class_above_and_a_seen_one_stands_alone() -> None:
    table, tree, group, true = job(6000, 4)
    lengths = Lengths.unknown(table, tree)
    lengths.observe_rows(np.flatnonzero(group < 3)[:900], true[group < 3][:900])
    lengths.refresh()
    seen = lengths.expected[group < 3].mean()
    unseen = lengths.expected[group == 3].mean()
    assert unseen == pytest.approx(seen, rel=0.25)  # group 3 is far longer, but nothing says so yet
    lengths.observe_rows(np.flatnonzero(group == 3)[:300], true[group == 3][:300])
    lengths.refresh()
    assert lengths.expected[group == 3].mean() == pytest.approx(true[group == 3].mean(), rel=0.1)


def test_order_of_serving_classes_does_not_bias_the_rest() -> None:
    """Twelve groups with equal lengths but one long: serving the long group first must not make the others long."""
    table, tree, group, _ = job(6000, 12)
    true = np.where(group == 0, 2000, 100)
    lengths = Lengths.sampled(table, tree, lambda rows: true[rows])
    first = np.flatnonzero(group == 0)
    lengths.observe_rows(first, true[first])
    lengths.refresh()
    assert lengths.expected[group > 0].mean() == pytest.approx(100, rel=0.5)


def test_progress_of_a_row_is_counted_once_and_nothing_counts_after_it_finished() -> None:
    table, tree, _, _ = job(10, 1)
    lengths = Lengths.unknown(table, tree)
    for tokens in (1, 5, 9):
        lengths.observe(3, tokens, finished=False)
    assert lengths.state.running.sum() == 1
    lengths.observe(3, 11, finished=True)
    lengths.observe(3, 12, finished=False)
    assert lengths.state.running.sum() == 0
    assert lengths.state.finished.sum() == 1
    assert lengths.state.finished_tokens.sum() == 11


def test_nothing_seen_means_the_prior_and_remaining_grows_with_age() -> None:
    table, tree, _, _ = job(100, 2)
    lengths = Lengths.unknown(table, tree)
    assert np.all(np.abs(lengths.expected / PRIOR_TOKENS - 1) < 0.05)
    assert lengths.expected_remaining(0, 5000) > lengths.expected_remaining(0, 500) > lengths.expected_remaining(0, 5)


def test_whoever_asks_for_few_tokens_is_expected_to_use_half_of_them_whatever_others_ask() -> None:
    caps = np.repeat([32, 2000], 20)
    table = RequestTable.of(np.full(40, 10), caps)
    lengths = Lengths.unknown(table, PrefixTree.without_sharing(40))
    assert 0.4 * 32 < lengths.expected[0] < 0.7 * 32
    assert lengths.expected[39] > 100


def test_a_few_early_short_answers_do_not_shorten_what_nobody_has_seen() -> None:
    table = RequestTable.of(np.full(40, 10), np.full(40, 64))
    lengths = Lengths.unknown(table, PrefixTree.without_sharing(40))
    before = lengths.expected_remaining(39, 4)
    lengths.observe_rows(np.arange(10), np.full(10, 2))
    lengths.observe_rows(np.arange(10, 40), np.full(30, 4), finished=False)
    lengths.refresh()
    assert lengths.expected_remaining(39, 4) > 0.95 * before


def ended_short_and_running(n_running: int) -> Lengths:
    """Group 0 has ended after 20 to 60 tokens; so many of group 1 run and have 100."""
    group = np.repeat([0, 1], 100)
    table = RequestTable.of(np.full(200, 100), np.full(200, 10_000))
    lengths = Lengths.unknown(table, tree_from_groups(table.prompt_tokens, group, np.full(200, 30)))
    lengths.observe_rows(np.arange(100), np.linspace(20, 60, 100).astype(np.int64))
    lengths.observe_rows(np.arange(100, 100 + n_running), np.full(n_running, 100), finished=False)
    lengths.refresh()
    return lengths


def test_the_more_answers_go_on_where_others_ended_the_longer_they_are_expected() -> None:
    few, some, many = (ended_short_and_running(n).expected_remaining(150, 100) for n in (1, 10, 100))
    assert 1.2 * few < some < many


def test_how_long_answers_go_on_unlike_others_is_not_taken_for_granted() -> None:
    few, many = ended_short_and_running(1), ended_short_and_running(100)
    c, at = many.classes[150], many.grid_tokens
    hazard = [1.0 - lengths.survival[c, 1:] / lengths.survival[c, :-1] for lengths in (many, few)]
    ratio = hazard[0] / np.maximum(hazard[1], 1e-12)
    assert ratio[np.searchsorted(at, 110)] < 0.5
    assert ratio[np.searchsorted(at, 8_000)] > 0.9


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_past_the_longest_answer_that_ended_a_class_is_as_the_class_above(true: list[int]) -> None:
    table, tree, group, _ = job(400, 2)
    lengths = Lengths.unknown(table, tree)
    rows = np.flatnonzero(group == 0)[: len(true)]
    lengths.observe_rows(rows, np.array(true[: len(rows)]))
    lengths.refresh()
    c, state = lengths.classes[rows[0]], lengths.state
    beyond = slice(int(np.searchsorted(lengths.grid_tokens, max(true))) + 1, -40)
    own, above = state.survival[c], state.survival[state.parent[c]]
    assert own[1:][beyond] / own[:-1][beyond] == pytest.approx(above[1:][beyond] / above[:-1][beyond])


# ---------------------------------------------------------------- known lengths, the paper's rule


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=60))
def test_known_lengths_are_exact_and_their_curves_drop_where_the_answers_end(true: list[int]) -> None:
    table = RequestTable.of(np.full(len(true), 3), np.full(len(true), 50_000))
    lengths = Lengths.known(table, np.array(true))
    capped = np.clip(true, 1, 50_000)
    assert lengths.exact
    assert np.array_equal(lengths.expected, capped)
    assert lengths.expected_remaining(0, 0) == capped[0]
    for row, length in enumerate(capped):
        curve = lengths.survival[lengths.classes[row]]
        assert np.all(curve[lengths.grid_tokens < length] == 1.0)
        assert np.all(curve[lengths.grid_tokens >= length][1:] == 0.0)
    lengths.observe(0, 1, finished=True)
    lengths.refresh()
    assert np.array_equal(lengths.expected, capped)


def test_known_lengths_must_cover_every_row() -> None:
    with pytest.raises(InputError, match="2 output lengths for 3 rows"):
        Lengths.known(RequestTable.of([1, 1, 1]), np.array([4, 5]))


def test_only_the_planned_sample_is_ever_asked_for() -> None:
    table, tree, _, true = job(2000, 4)
    asked: list[I64] = []

    def answer(rows: I64) -> I64:
        asked.append(rows)
        return true[rows]

    Lengths.sampled(table, tree, answer, fraction=0.02)
    assert len(asked) == 1
    assert len(asked[0]) <= 0.02 * 2000 + 4


def test_paper_rule_is_the_mean_of_the_subtree_or_of_the_next_one_above() -> None:
    group = np.array([0, 0, 0, 1, 1, -1])
    tree = tree_from_groups(np.full(6, 10), group, np.full(6, 5))
    estimate: F64 = paper_estimate(tree, np.array([0, 1, 5]), np.array([10, 20, 90]))
    assert estimate.tolist() == [15, 15, 15, 40, 40, 40]


def test_levels_name_prefix_cuts_and_length_cuts() -> None:
    table, tree, _, _ = job(4000, 3)
    classes = cut_classes(tree, table.prompt_tokens)
    by_prefix = np.flatnonzero(classes.level[1:] < PREFIX_LEVELS) + 1
    assert len(by_prefix) >= 3
    assert np.all(classes.level[classes.of_row] >= 0)


# ---------------------------------------------------------------- min_tokens


def test_a_request_that_must_use_its_whole_cap_is_known_and_teaches_nothing() -> None:
    most = np.full(40, 70)
    table = RequestTable.of(np.full(40, 20), most, min_tokens=np.where(np.arange(40) < 20, 70, 0))
    lengths = Lengths.unknown(table, PrefixTree.without_sharing(40))
    before = lengths.survival.copy()
    assert np.all(lengths.expected[:20] == 70) and np.all(lengths.expected[20:] < 70)
    assert lengths.expected_remaining(0, 30) == 40
    lengths.observe_rows(np.arange(10), np.full(10, 70))
    lengths.observe_rows(np.arange(10, 20), np.full(10, 35), finished=False)
    lengths.refresh()
    assert np.array_equal(lengths.survival, before)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_expected_length_lies_between_min_and_max_tokens(a: int, b: int, generated: int) -> None:
    least, most = min(a, b), max(a, b)
    table = RequestTable.of([9, 9], [most, most], min_tokens=[least, 0])
    lengths = Lengths.unknown(table, PrefixTree.without_sharing(2))
    assert least - 1e-9 <= lengths.expected[0] <= most + 1e-9 and lengths.expected[0] >= lengths.expected[1] - 1e-9
    if generated < most:
        left = lengths.expected_remaining(0, generated)
        assert 1.0 <= left <= most - generated + 1e-9 and left >= least - generated - 1e-9


def test_rows_that_cannot_end_before_their_cap_are_known() -> None:
    caps = np.array([5, 90, 300])
    tree = PrefixTree.without_sharing(3)
    forced = Lengths.unknown(RequestTable.of([1, 2, 3], caps, min_tokens=caps), tree)
    assert forced.exact and forced.expected.tolist() == [5.0, 90.0, 300.0]
    assert not Lengths.unknown(RequestTable.of([1, 2, 3], caps, min_tokens=caps - 1), tree).exact


def test_no_row_is_sampled_whose_length_is_fixed_or_whose_class_is_known() -> None:
    prompt, group = np.full(400, 60), np.arange(400) % 2
    tree = tree_from_groups(prompt, group, np.full(400, 30))
    fixed = np.where(group == 0, 50, 0)
    lengths = Lengths.unknown(RequestTable.of(prompt, np.full(400, 50), min_tokens=fixed), tree)
    assert len(lengths.sample_rows()) and np.all(group[lengths.sample_rows()] == 1)
    known = np.zeros((3, len(lengths.grid_tokens)))
    known[:2, 20] = 8, 8 * 21
    lengths.begin_with(int(lengths.prefix_class()[1]), known)
    assert not len(lengths.sample_rows())


def test_drawn_lengths_are_spread_as_their_curve_is() -> None:
    table, tree, group, true = job(3000, 3, seed=5)
    lengths = Lengths.unknown(table, tree)
    lengths.observe_rows(np.arange(1500), true[:1500])
    lengths.refresh()
    rows = np.arange(1500, 3000)
    drawn = lengths.drawn(rows, np.zeros(1500, np.int64))
    for g in range(3):
        own = group[rows] == g
        assert np.quantile(drawn[own], [0.25, 0.5, 0.75]) == pytest.approx(
            np.quantile(true[rows][own], [0.25, 0.5, 0.75]), rel=0.15
        )
    assert np.all(lengths.drawn(rows, true[rows] // 2) >= true[rows] // 2)
    assert not np.array_equal(lengths.drawn(rows, np.zeros(1500, np.int64), 0.5), drawn)
