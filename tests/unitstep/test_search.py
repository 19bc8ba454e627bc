"""Local search on a list."""

from __future__ import annotations

import numpy as np

from plait.unitstep.kernel import total_completion
from plait.unitstep.orders import starts_of


def test_search_stops_when_told_and_improves_a_hard_backlog() -> None:
    generator = np.random.default_rng(1)
    s, o = generator.integers(1, 400, 80), generator.integers(1, 200, 80)
    rounds = iter(range(200))
    before = total_completion(starts_of("latency", s, o, 1200), o)
    after = total_completion(starts_of("latency", s, o, 1200, lambda: next(rounds, None) is not None), o)
    assert after < before
    assert next(rounds, None) is None
