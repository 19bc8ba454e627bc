"""The decision: dispatch to the kernel of the plan's policy."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling.blend import decide_blend
from plait.scheduling.dualscan import decide_dual_scan
from plait.scheduling.queues import decide_queue, prefill_room
from plait.scheduling.state import UNLIMITED, Records
from plait.table import I64

QUEUE, DUAL_SCAN, BLEND = 0, 1, 2


@njit
def decide(c: Records, out: I64) -> tuple[int, int, int]:
    """(rows admitted: ``out[:k]``, rows to preempt: ``out[len - j:]``, prefill budget of the next step or -1). Engines
    that cannot preempt on request are never asked to."""
    if c.policy == BLEND:
        admitted, preempted, budget = decide_blend(c, out)
    elif c.policy == DUAL_SCAN:
        admitted, preempted, budget = decide_dual_scan(c, out)
    else:
        admitted, preempted = decide_queue(c, out), 0
        budget = prefill_room(c) if c.throttle and c.budgeted and c.chunk < UNLIMITED else -1
    return admitted, preempted if c.preempts else 0, budget
