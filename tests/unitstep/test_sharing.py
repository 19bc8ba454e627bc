"""Schedules of requests whose prompts begin alike, against a step-by-step count of what is held."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.table import I64
from plait.tree.build import tree_from_groups
from plait.tree.prefix import PrefixTree
from plait.unitstep.kernel import area, decode, decode_shared


class Grouped(NamedTuple):
    s: I64
    o: I64
    group: I64
    shared: I64
    kv_tokens: int

    @property
    def tree(self) -> PrefixTree:
        return tree_from_groups(self.s, self.group, self.shared)


@st.composite
def grouped(draw: st.DrawFn, most: int = 25, longest: int = 12) -> Grouped:
    """Rows of up to three groups, or none (-1); each shares its own number of first tokens."""
    length = st.integers(1, longest)
    row = st.tuples(length, length, st.integers(-1, 2), st.integers(0, longest))
    s, o, group, shared = np.array(draw(st.lists(row, min_size=1, max_size=most)), np.int64).T
    budget = int(np.max(s + o)) + draw(st.integers(0, 3 * longest))
    return Grouped(s.copy(), o.copy(), group.copy(), np.minimum(shared, s), budget)


def usage(g: Grouped, starts: I64) -> I64:
    """Tokens held at each step: own ones of each running row, and of each group the longest shared beginning."""
    held = np.zeros(int(np.max(starts + g.o)) + 1, np.int64)
    for step in range(1, len(held)):
        running = (starts < step) & (step <= starts + g.o)
        alone = running & (g.group < 0)
        held[step] += np.sum(g.s[alone] + step - starts[alone])
        for number in np.unique(g.group[running & (g.group >= 0)]):
            rows = running & (g.group == number)
            held[step] += np.sum(g.s[rows] - g.shared[rows] + step - starts[rows]) + np.max(g.shared[rows])
    return held


policies = st.sampled_from([(1, 1.0), (4, 1.3), (64, 2.0), (64, np.inf)])


@settings(max_examples=150, deadline=None)
@given(grouped(), policies)
def test_shared_memory_never_exceeds_the_budget_and_jumping_agrees_with_stepping(
    g: Grouped, policy: tuple[int, float]
) -> None:
    key = area(g.s, g.o)
    order = np.argsort(key, kind="stable")
    starts = decode_shared(g.s, g.o, order, key, g.kv_tokens, *policy, g.tree)
    assert np.array_equal(starts, decode_shared(g.s, g.o, order, key, g.kv_tokens, *policy, g.tree, every_step=True))
    assert np.min(starts) >= 0
    assert np.max(usage(g, starts)) <= g.kv_tokens


@settings(max_examples=100, deadline=None)
@given(grouped())
def test_a_strict_list_starts_each_row_at_the_first_step_that_fits_beside_what_is_shared(g: Grouped) -> None:
    n = len(g.s)
    starts = decode_shared(g.s, g.o, np.arange(n), np.ones(n), g.kv_tokens, 1, 1.0, g.tree)
    t = 0
    for row in range(n):
        until = slice(row + 1)
        first = Grouped(g.s[until], g.o[until], g.group[until], g.shared[until], g.kv_tokens)
        while np.max(usage(first, np.append(starts[:row], t))) > g.kv_tokens:
            t += 1
        assert starts[row] == t


@settings(max_examples=60, deadline=None)
@given(grouped(), policies)
def test_without_groups_sharing_changes_nothing(g: Grouped, policy: tuple[int, float]) -> None:
    key = area(g.s, g.o)
    order = np.argsort(-key, kind="stable")
    alone = PrefixTree.without_sharing(len(g.s))
    starts = decode_shared(g.s, g.o, order, key, g.kv_tokens, *policy, alone)
    assert np.array_equal(starts, decode(g.s, g.o, order, key, g.kv_tokens, *policy))
