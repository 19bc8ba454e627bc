"""The tree over steps against plain arrays of usage."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.unitstep.steptree import add, greatest, lift, move_on, new_step_tree, next_ending

LONGEST = 20
starts = st.tuples(st.integers(1, 50), st.integers(1, LONGEST), st.integers(0, 9), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(starts, min_size=1, max_size=40))
def test_the_greatest_usage_of_any_range_is_the_one_counted_step_by_step(
    requests: list[tuple[int, int, int, bool]],
) -> None:
    """Requests (s, o) start, each some steps after the one before; some hold a prefix in their second half as well."""
    tree = new_step_tree(LONGEST)
    usage = np.zeros(10 * len(requests) + LONGEST + 1, np.int64)
    ending = np.zeros_like(usage)
    t = 0
    for s, o, later, holds in requests:
        t += later
        move_on(tree, t, LONGEST)
        add(tree, s, o, t)
        usage[t + 1 : t + o + 1] += s + np.arange(1, o + 1)
        ending[t + o] += 1
        if holds:
            lift(tree, t + o // 2 + 1, t + o, 0, 7)
            usage[t + o // 2 + 1 : t + o + 1] += 7
        for first in range(t + 1, t + LONGEST + 1, 3):
            for last in range(first, t + LONGEST + 1, 4):
                top, at = greatest(tree, first, last)
                assert top == np.max(usage[first : last + 1] + np.arange(first, last + 1))
                assert first <= at <= last and top == usage[at] + at
        coming = np.flatnonzero(ending[t + 1 :])
        assert next_ending(tree, t + 1) == t + 1 + coming[0]


def test_many_requests_of_one_span_are_counted_exactly() -> None:
    generator = np.random.default_rng(2)
    tree = new_step_tree(300)
    usage = np.zeros(301, np.int64)
    for s, o in generator.integers(1, 300, (2_000, 2)):
        add(tree, s, o, 0)
        usage[1 : o + 1] += s + np.arange(1, o + 1)
        first = int(generator.integers(1, 300))
        last = int(generator.integers(first, 301))
        assert greatest(tree, first, last)[0] == np.max(usage[first : last + 1] + np.arange(first, last + 1))
