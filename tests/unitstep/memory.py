"""Independent check of a run in the unit-step model, from its spells alone."""

from __future__ import annotations

import numpy as np

from plait.table import I64
from plait.unitstep.flow import Flow, spells_of


def check_flow(flow: Flow, kv_tokens: int, arrival: I64 | None = None, keeps_progress: bool = True) -> None:
    """Memory is never over ``kv_tokens``, every request ends once with all its tokens, no spell overlaps another of
    its row or begins before the arrival."""
    spells = spells_of(flow)
    usage = np.zeros(int(spells[:, 3].max(initial=0)) + 1, np.int64)
    free_from = np.zeros(len(flow.s), np.int64) if arrival is None else arrival.copy()
    made = np.zeros(len(flow.s), np.int64)
    for row, start, before, end in spells[np.argsort(spells[:, 1], kind="stable")]:
        assert free_from[row] <= start < end
        assert before == (made[row] if keeps_progress else 0)
        for step in range(start + 1, end + 1):
            usage[step] += flow.s[row] + before + step - start
        free_from[row] = end
        made[row] = before + end - start
    assert np.array_equal(made, flow.o)
    assert np.array_equal(free_from, flow.finish)
    assert usage.max(initial=0) <= kv_tokens
