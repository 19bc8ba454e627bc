"""Everything the scheduler knows, as three record arrays and a few columns that compiled code takes as they are.

One record a row, one a tree node, and one record of scalars: a decision touches a cache line a row, and no Python
object. Token counts are exact mirrors of an engine that pages its KV in blocks of ``block`` tokens and keeps prefixes
at node granularity; for engines that report less they are estimates, corrected by every event."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from plait.events import Capacity
from plait.model.steptime import StepTime
from plait.table import F64, I32, I64, NO_LIMIT, RequestTable
from plait.tree.prefix import PrefixTree

Records: TypeAlias = Any
"""A structured array; its fields are those of the dtype named beside it."""

WAITING, PREFILL, DECODE, DONE, ABSENT = 0, 1, 2, 3, 4
"""Status of a row. ABSENT: not arrived yet, or another rank's."""

COLD, COMPUTING, CACHED = 0, 1, 2
"""State of a node: not in KV, being prefilled by its ``owner``, in KV."""

LEFT, RIGHT = 0, 1
"""Sides of a plan: LEFT holds the compute-heavy rows (and every row of a one-sided order), RIGHT the memory-heavy
ones."""

UNLIMITED = 1 << 60

ROW = np.dtype(
    [
        ("base", "i8"),  # decode step at which the row had no token: generated = step - base while it decodes
        ("seq", "i8"),  # admission number: larger = later
        ("node", "i4"),  # deepest shared node
        ("private", "i4"),  # prompt tokens beyond the whole blocks of that node
        ("prompt", "i4"),  # prompt tokens
        ("limit", "i4"),  # max_tokens
        ("cls", "i4"),  # length class
        ("kept", "i4"),  # tokens generated before a preemption and not lost
        ("need", "i4"),  # prefill tokens asked for at admission
        ("prev", "i4"),  # running list of the row's side
        ("next", "i4"),
        ("profiled", "i4"),  # generated tokens when it was added to the profile; -1: not in it
        ("status", "i1"),
        ("side", "i1"),
        ("moved", "i1"),  # 1: its output was badly under-estimated, it counts on the right now
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("parent", "i4"),
        ("segment", "i4"),  # tokens of the node's own whole blocks
        ("refs", "i4"),  # running rows at the node + children with refs > 0
        ("owner", "i4"),  # row whose prefill computes it
        ("prev", "i4"),  # list of unreferenced cached nodes, oldest first
        ("next", "i4"),
        ("state", "i1"),
    ],
    align=True,
)

_COUNTS = [
    "step",
    "now_seq",
    "waiting",
    "prefilling",
    "decoding",
    "done",
    "backlog",  # tokens admitted and not prefilled yet
    "kv_nodes",  # KV tokens of shared nodes
    "kv_evictable",  # of those, unreferenced
    "kv_private",  # KV tokens of private suffixes and outputs, whole blocks
    "decode_context",  # sum over decoding rows of prompt + generated
    "lru_oldest",
    "lru_newest",
    "head_left",
    "head_right",
    "size_left",
    "size_right",
    "back_left",  # requeued rows, served before the queue
    "back_right",
    "tail_left",  # last admitted running row
    "tail_right",
    "private_right",  # KV tokens of running rows on the right, whole blocks, as of their last change
    "profile_step",
    "profile_rows",
    "events",  # grows with every event that may free room; a blocked head is tried again when it moved
    "blocked",
    "preemptions",
    "has_steps",
    "starving",
    "cached_tokens",  # prompt tokens reused
    "node_tokens",  # prompt tokens of shared nodes that were computed
]
_LIMITS = ["capacity", "block", "max_seqs", "chunk", "gate", "budgeted", "policy", "window", "throttle", "exact"]
_FACTS = [
    "kappa",
    "spread",  # standard deviations of the expected footprint kept free
    "gemm_s",
    "weights_s",
    "prefill_attn_s",
    "kv_read_s",
    "overhead_s",
    "context_per_prefill_token",  # moving average of Step.prefill_context_tokens / prefill_tokens
]
SCALARS = np.dtype([(name, "i8") for name in _COUNTS + _LIMITS] + [(name, "f8") for name in _FACTS], align=True)

TAU_POINTS = 24
"""Future instants at which the expected footprint is watched."""


class State(NamedTuple):
    """n rows, m nodes, C length classes, G points of their curves, T = TAU_POINTS."""

    rows: Records  # ROW [n]
    nodes: Records  # NODE [m]
    scalars: Records  # SCALARS [1]
    queue: I32  # [2, n] rows of each side, best first; entries that are not WAITING any more are skipped
    back: I32  # [2, n] stacks of requeued rows
    key: F64  # [n] overtaking key (window > 1), else [1]
    expected: F64  # [n] expected output tokens
    survival: F64  # [C, G] share of a class's outputs longer than grid[g] tokens
    grid: F64  # [G]
    tau: F64  # [T] steps from now, ascending, tau[0] == 0
    mean: F64  # [T] expected private KV tokens of the profiled rows at now + tau
    variance: F64  # [T] its variance
    phase: I64  # [block] decoding rows that need a block at steps congruent to the index


def new_state(table: RequestTable, tree: PrefixTree, capacity: Capacity, step_time: StepTime, arrived: bool) -> State:
    """A state with every row waiting (``arrived``) or absent, empty queues and no length estimates yet."""
    n, block = table.n, max(1, capacity.block_tokens)
    rows = np.zeros(n, ROW)
    nodes = np.zeros(tree.n_nodes, NODE)
    shared_end = tree.prefix_tokens // block * block
    nodes["parent"] = tree.parent
    nodes["segment"][1:] = shared_end[1:] - shared_end[tree.parent[1:]]
    nodes["owner"] = nodes["prev"] = nodes["next"] = -1
    rows["node"] = tree.node_of
    rows["prompt"] = table.prompt_tokens
    rows["private"] = table.prompt_tokens - shared_end[tree.node_of]
    rows["limit"] = np.minimum(table.max_tokens, np.iinfo(np.int32).max // 2)
    rows["prev"] = rows["next"] = rows["profiled"] = -1
    rows["status"] = WAITING if arrived else ABSENT
    scalars = np.zeros(1, SCALARS)
    scalars["waiting"] = n if arrived else 0
    for name in ("lru_oldest", "lru_newest", "tail_left", "tail_right"):
        scalars[name] = -1
    scalars["blocked"] = -1
    scalars["capacity"] = capacity.kv_tokens or UNLIMITED
    scalars["block"] = block
    scalars["max_seqs"] = capacity.max_num_seqs or UNLIMITED
    scalars["chunk"] = capacity.max_batched_tokens or UNLIMITED
    scalars["gate"] = capacity.prefix_lookup_at_submit
    scalars["budgeted"] = capacity.takes_prefill_budget
    scalars["window"] = 1
    scalars["kappa"] = 1.0
    for ours, theirs in (
        ("gemm_s", step_time.gemm_s_per_token),
        ("weights_s", step_time.weights_s),
        ("prefill_attn_s", step_time.prefill_attn_s),
        ("kv_read_s", step_time.kv_read_s_per_token),
        ("overhead_s", step_time.overhead_s),
    ):
        scalars[ours] = theirs
    empty = np.zeros((2, n), np.int32)
    return State(
        rows=rows,
        nodes=nodes,
        scalars=scalars,
        queue=empty,
        back=empty.copy(),
        key=np.zeros(1),
        expected=np.ones(n),
        survival=np.ones((1, 1)),
        grid=np.zeros(1),
        tau=np.zeros(TAU_POINTS),
        mean=np.zeros(TAU_POINTS),
        variance=np.zeros(TAU_POINTS),
        phase=np.zeros(block, np.int64),
    )


def longest_output(limits: I64, expected: F64) -> float:
    """Horizon of the profile in steps: no row is expected to live longer."""
    bounded = limits[limits < NO_LIMIT]
    horizon = float(expected.max(initial=1.0)) * 16.0
    return min(horizon, float(bounded.max())) if len(bounded) == len(limits) and len(bounded) else horizon
