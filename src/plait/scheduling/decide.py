"""The decision: dispatch to the kernel of the plan's policy."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling.blend import decide_blend
from plait.scheduling.dualscan import decide_dual_scan
from plait.scheduling.queues import decide_queue
from plait.scheduling.state import Records
from plait.table import I64

QUEUE, DUAL_SCAN, BLEND = 0, 1, 2


@njit
def decide(c: Records, out: I64) -> tuple[int, int, int]:
    """(rows admitted: ``out[:k]``, rows to preempt: ``out[len - j:]``, prefill budget of the next step or -1)."""
    if c.policy == BLEND:
        return decide_blend(c, out)
    if c.policy == DUAL_SCAN:
        return decide_dual_scan(c, out)
    return decide_queue(c, out), 0, -1
