"""The expected footprint of what runs: recomputed in bulk, and left alone where it cannot matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.events import Capacity
from plait.lengths import Lengths
from plait.model.steptime import paper_a100_8b
from plait.policy.base import View
from plait.scheduling import moves
from plait.scheduling.plan import Planner
from plait.scheduling.profile import add, fits_at_ends, fits_later, refresh, sum_up
from plait.scheduling.state import LINE_BYTES, ROW, WAITING, State, records
from plait.scheduling.virtual import RUN
from plait.table import NO_LIMIT, RequestTable
from plait.tree.prefix import PrefixTree

ROWS = st.lists(
    st.tuples(
        st.integers(1, 3000),  # prompt tokens
        st.integers(1, 5000),  # output tokens
        st.floats(0, 1),  # share of them that is there
        st.booleans(),  # memory-heavy side
        st.booleans(),  # max_tokens: just the output tokens, or none
    ),
    min_size=2,
    max_size=30,
)


def state_of(
    rows: list[tuple[int, int, float, bool, bool]], known: bool, kv_tokens: int, block: int, waiting: int
) -> State:
    """All but the first ``waiting`` rows decode, some of them overdue."""
    prompt, output = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    limit = np.array([row[1] if row[4] else NO_LIMIT for row in rows])
    table, tree = RequestTable.of(prompt, max_tokens=limit), PrefixTree.without_sharing(len(rows))
    lengths = Lengths.known(table, output) if known else Lengths.unknown(table, tree)
    view = View(table, tree, lengths.expected, Capacity(kv_tokens, block), paper_a100_8b())
    planner = Planner(view, lengths, "fcfs")
    planner.replan()
    c = planner.state.c
    for row in range(waiting, len(rows)):
        moves.admit(c, row, int(rows[row][3]), True)
        moves.progress(c, row, generated(rows[row]))
    return planner.state


def generated(row: tuple[int, int, float, bool, bool]) -> int:
    """Tokens that a decoding row has."""
    return 1 + int(row[2] * (row[1] - 1))


@given(rows=ROWS, known=st.booleans(), block=st.sampled_from([1, 16]))
def test_in_bulk_the_rows_make_the_profile_that_they_make_one_by_one(
    rows: list[tuple[int, int, float, bool, bool]], known: bool, block: int
) -> None:
    state = state_of(rows, known, 10**6, block, 0)
    c, arrays = state.c, (state.mean, state.variance, state.most)
    running, peak = len(rows), int(c["profile_peak"])
    for row in range(running):
        add(c, row, -1.0)
    assert c["profile_rows"] == 0 and c["profile_peak"] == 0
    for array in arrays:
        array[...] = 0.0
    for row in range(running):
        add(c, row, 1.0)
    one_by_one = [array.copy() for array in arrays]
    for _ in range(2):  # nothing is left over for the next time
        refresh(c)
        for array, wanted in zip(arrays, one_by_one, strict=True):
            assert array == pytest.approx(wanted, rel=1e-9, abs=1e-6)
    assert c["profile_rows"] == running and c["profile_peak"] == peak


@given(rows=ROWS, kv_tokens=st.integers(3000, 200_000), block=st.sampled_from([1, 16]))
def test_a_row_that_fits_beside_the_ends_of_all_others_fits_by_any_profile(
    rows: list[tuple[int, int, float, bool, bool]], kv_tokens: int, block: int
) -> None:
    assume(all(generated(row) < row[1] for row in rows[1:]))  # who has all its tokens has ended
    state = state_of(rows, True, kv_tokens, block, 1)
    c = state.c
    ends = sum(-(-(prompt + output) // block) * block for prompt, output, *_ in rows)
    if fits_at_ends(c, 0):
        assert ends <= kv_tokens
        refresh(c)
        assert fits_later(c, 0, 0.0)
    else:
        assert ends + len(rows) * block > kv_tokens


@given(rows=ROWS, known=st.booleans(), steps=st.integers(1, 40))
def test_a_profile_summed_up_late_is_that_of_the_step_at_which_it_lapsed(
    rows: list[tuple[int, int, float, bool, bool]], known: bool, steps: int
) -> None:
    state = state_of(rows, known, 10**6, 1, 0)
    refresh(state.c)
    then = [array.copy() for array in (state.mean, state.variance, state.most)]
    for _ in range(steps):
        moves.advance(state.c)
    sum_up(state.c)
    for array, wanted in zip((state.mean, state.variance, state.most), then, strict=True):
        assert array == pytest.approx(wanted, rel=1e-9, abs=1e-6)
    refresh(state.c)
    assert state.mean[:, 0].sum() == pytest.approx(then[0][:, 0].sum() + steps * len(rows), rel=1e-9)


def test_nothing_is_known_of_ends_where_lengths_are_estimated() -> None:
    assert not fits_at_ends(state_of([(10, 10, 0.5, False, True)] * 3, False, 10**6, 1, 1).c, 0)


def test_a_strict_fit_counts_what_rows_have_grown_by_since_the_last_refresh() -> None:
    state = state_of([(100, 10, 0.0, False, False)] + [(1000, 5000, 0.999, False, True)] * 20, False, 10**9, 1, 1)
    c = state.c
    refresh(c)
    too_small, enough = 1, 10**9
    while enough - too_small > 1:
        c["capacity"] = (too_small + enough) // 2
        if fits_later(c, 0, 0.0, 3.0, 1.5, 1.5, True):
            enough = int(c["capacity"])
        else:
            too_small = int(c["capacity"])
    c["capacity"] = enough
    moves.advance(c)
    assert fits_later(c, 0, 0.0, 3.0, 1.5, 1.5, False)
    assert not fits_later(c, 0, 0.0, 3.0, 1.5, 1.5, True)
    c["capacity"] = enough + 20
    assert fits_later(c, 0, 0.0, 3.0, 1.5, 1.5, True)


def test_a_record_of_a_row_is_one_cache_line() -> None:
    assert ROW.itemsize == RUN.itemsize == LINE_BYTES
    for of in (ROW, RUN):
        found = records(3, of)
        assert found.ctypes.data % LINE_BYTES == 0 and len(found) == 3 and not found.view(np.uint8).any()
    assert len(records(0, ROW)) == 0 and (records(2, ROW)["status"] == WAITING).all()
