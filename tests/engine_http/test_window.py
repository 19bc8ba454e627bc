"""The window and the rate limits as arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.engine.window import MERGE_S, MINUTE_S, QUEUE_DEPTH, RateLimit, Window


def serve(window: Window, slots: int, epochs: int) -> None:
    """A server of ``slots`` places that answers each request in one second; the window is always full."""
    now_s = 0.0
    for _ in range(epochs):
        window.room(10**9)
        per_s = min(int(window.limit), slots)
        for _ in range(2 * int(window.limit) + 8):
            now_s += 1 / per_s
            window.answered(1.0, now_s)


def test_without_metrics_the_window_climbs_to_what_the_server_can_use_and_not_far_beyond() -> None:
    window = Window()
    serve(window, slots=100, epochs=40)
    assert 100 * 0.9 <= window.limit <= 100 * 1.5**2


def test_without_metrics_a_window_that_helps_nothing_stays_small() -> None:
    window = Window()
    serve(window, slots=4, epochs=40)
    assert window.limit <= 16


def test_with_metrics_the_window_is_the_running_set_and_a_short_queue() -> None:
    window = Window()
    for _ in range(20):
        window.room(10**9)
        in_flight = int(window.limit)
        window.load(running=min(in_flight, 64), waiting=max(in_flight - 64, 0))
    assert 64 <= window.limit <= 64 + 2 * QUEUE_DEPTH


def test_one_burst_of_refusals_cuts_once_and_answers_bring_it_back() -> None:
    window = Window(limit=100)
    for _ in range(50):
        window.refused(sent_s=0.0, now_s=1.0, in_flight=99)
    assert window.limit == 60
    answers = 0
    while window.limit < 100:
        window.answered(1.0, 2.0)
        answers += 1
    assert answers > 1000, "one more a window, not a jump"


@given(
    st.lists(
        st.tuples(st.sampled_from(["refused", "answered", "load"]), st.floats(0, 500), st.floats(0, 500)), max_size=60
    )
)
def test_the_limit_stays_between_one_and_the_ceiling(calls: list[tuple[str, float, float]]) -> None:
    window = Window(ceiling=50)
    for step, (kind, a, b) in enumerate(calls):
        window.room(int(a))
        if kind == "refused":
            window.refused(step - 0.5, step, int(a))
        elif kind == "answered":
            window.answered(a, step)
        else:
            window.load(a, b)
        assert 1 <= window.limit <= 50


@given(
    per_minute=st.integers(1, 50),
    gaps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 30)), min_size=1, max_size=80),
)
def test_no_sixty_seconds_hold_more_than_the_limit(per_minute: int, gaps: list[tuple[float, int]]) -> None:
    limit = RateLimit(per_minute)
    now_s, spent = 0.0, []
    for gap_s, units in gaps:
        units = min(units, per_minute)
        now_s += gap_s
        now_s += limit.wait_s(units, now_s)
        assert limit.wait_s(units, now_s + 1e-6) == 0
        limit.spend(units, now_s + 1e-6)
        spent.append((now_s, units))
    for start_s, _ in spent:
        assert sum(units for t_s, units in spent if start_s <= t_s < start_s + MINUTE_S - MERGE_S) <= per_minute


def test_corrections_give_tokens_back_within_the_minute_only() -> None:
    limit = RateLimit(100)
    entry = limit.spend(100, 0.0)
    assert limit.wait_s(1, 1.0) > 0
    limit.correct(entry, -60)
    assert limit.wait_s(60, 1.0) == 0
    assert limit.wait_s(100, 61.0) == 0
    limit.correct(entry, 1000)
    assert limit.wait_s(100, 61.0) == 0


def test_more_than_a_minutes_worth_goes_alone() -> None:
    limit = RateLimit(10)
    assert limit.wait_s(500, 0.0) == 0
    limit.spend(500, 0.0)
    assert limit.wait_s(1, 1.0) == MINUTE_S - 1
