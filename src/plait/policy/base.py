"""What a policy is: a named function from planning data to an order, and how strictly the scheduler follows it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from plait.errors import UsageError
from plait.events import Capacity
from plait.model.steptime import StepTime
from plait.table import F64, I64, RequestTable
from plait.tree.prefix import PrefixTree


@dataclass(frozen=True, slots=True)
class View:
    """Everything a policy may look at. Estimated output lengths only: true ones are not reachable from here."""

    table: RequestTable
    tree: PrefixTree
    expected_output_tokens: F64  # [n] current estimate, capped by max_tokens
    capacity: Capacity
    step_time: StepTime
    seed: int = 0
    now_s: float = 0.0
    """Seconds since the start: what has waited long goes first."""
    expected_square: F64 | None = None
    """[n] expected square of the output tokens; None: lengths do not vary, the square of the expectation."""
    memo: dict[str, I64] = field(default_factory=dict)
    """See ``once``."""

    def once(self, name: str, make: Callable[[], I64]) -> I64:
        """What follows from tree and seed alone is worked out in a job's first plan and kept for the next ones."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]


@dataclass(frozen=True, slots=True)
class Order:
    """A queue and how it may be served."""

    rows: I64  # [k] best first; each row of the view once
    key: F64 | None = None  # [n] by row; smaller first. Needed where window > 1
    window: int = 1
    """How many waiting rows behind a head that does not fit may be tried (1 = strict)."""
    kappa: float = 1.0
    """A later row may overtake the head only if key[row] <= kappa * key[head]."""
    throttle_prefill: bool = False
    """Steps take only so much prefill that those who decode are not delayed by more than all others gain
    (``scheduling/queues.py:prefill_room``); nothing is admitted while the backlog is at least that."""
    delay_weight: float = 1.0
    """How much a delay of those counts, beside what all gain."""
    finish_groups: bool = False
    """A new plan keeps prefix groups that have begun in front, so that no cached prefix is left behind."""
    right: I64 | None = None
    """Rows of the memory-heavy side, best first, for kernels that serve two sides; ``rows`` is then the compute-heavy
    one. A row may stand in both: whichever side comes first takes it."""
    kernel: str = "queue"
    """Decision kernel of the scheduler: "queue", "dual-scan" or "blend"."""


OrderFunction = Callable[[View], Order]

POLICIES: dict[str, str] = {
    "fcfs": "plait.policy.orders:fcfs",
    "random": "plait.policy.orders:random",
    "dfs": "plait.policy.orders:dfs",
    "dual-scan": "plait.policy.dualscan:dual_scan",
    "blend": "plait.policy.blend:blend",
    "balanced": "plait.policy.balanced:balanced",
    "mc-sf": "plait.policy.latency:mc_sf",
    "mc-sf-skip": "plait.policy.latency:mc_sf_skip",
    "size": "plait.policy.latency:size",
    "area": "plait.policy.latency:area",
    "latency": "plait.policy.latency:latency",
}
"""Name on the command line -> "module:function". Adaptive policies (dual-scan, blend) name a kernel in their Order."""
WEIGHTED = "balanced"
"""The policy that takes a weight behind a colon."""


def order_function(name: str) -> OrderFunction:
    """The function behind a policy name. Raises UsageError listing near matches, or for a weight that is none."""
    weighted, _, weight = name.partition(":")
    if weighted == WEIGHTED and weight:
        return partial(_load(weighted), weight=_weight(name, weight))
    return _load(name)


def _weight(name: str, text: str) -> float:
    """A number from 0 to 1."""
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0.0 <= weight <= 1.0:
        raise UsageError(f"policy '{name}': the weight must be a number from 0 (throughput) to 1 (latency)")
    return weight


def _load(name: str) -> Callable[..., Order]:
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UsageError(f"unknown policy '{name}'{hint or '.'} Known: {', '.join(sorted(POLICIES))}")
    module, function = POLICIES[name].split(":")
    found: Callable[..., Order] = getattr(importlib.import_module(module), function)
    return found


def identity(n: int) -> I64:
    """Rows 0..n-1, int64 [n]."""
    return np.arange(n, dtype=np.int64)
