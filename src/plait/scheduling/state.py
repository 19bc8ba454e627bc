"""Everything the scheduler knows, as record arrays and a few columns that compiled code takes as they are.

One record a row, one a tree node, and one record of scalars: a decision touches a cache line a row, and no Python
object. Token counts are exact mirrors of an engine that pages its KV in blocks of ``block`` tokens and keeps prefixes
at node granularity; for engines that report less they are estimates, corrected by every event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from plait._numba import njit
from plait.events import Capacity
from plait.model.steptime import StepTime
from plait.scheduling.pointer import carray, pointer
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
LARGEST_LIMIT = (1 << 30) - 1
"""A row without ``max_tokens`` has this; sums of two limits fit the records' integers."""

ROW = np.dtype(
    [
        ("base", "i4"),  # decode step at which the row had no token: generated = step - base while it decodes
        ("seq", "i4"),  # admission number: larger = later
        ("node", "i4"),  # deepest shared node
        ("private", "i4"),  # prompt tokens beyond the whole blocks of that node
        ("prompt", "i4"),  # prompt tokens
        ("limit", "i4"),  # max_tokens
        ("cls", "i4"),  # length class
        ("kept", "i4"),  # tokens generated before a preemption and not lost
        ("held", "i4"),  # mean footprint it counts with against its side's share (dual scan)
        ("need", "i4"),  # prefill tokens asked for at admission
        ("prev", "i4"),  # running list of the row's side
        ("next", "i4"),
        ("ahead", "i4"),  # rows in prefill, by admission
        ("behind", "i4"),
        ("profiled", "i4"),  # generated tokens when it was added to the profile; -1: not in it
        ("status", "i1"),
        ("side", "i1"),
        ("moved", "i1"),  # 1: its output was badly under-estimated, it counts on the right now
    ],
    align=True,
)
"""One cache line (LINE_BYTES) a row."""

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
    "profile_step",
    "profile_rows",
    "profile_kept",  # 0: the profile has lapsed, it must be summed up before it is asked
    "profile_peak",  # KV tokens at their ends of the rows in the profile, whole blocks (known lengths)
    "events",  # grows with every event that may free room; a blocked head is tried again when it moved
    "blocked",
    "preemptions",
    "overflowed",  # 1: memory ran out and no row has finished since
    "right_settles",  # 1: a right row was thrown out and none has finished since
    "has_steps",
    "held_left",  # mean footprints of the running rows of a side (dual scan)
    "held_right",
    "checked_step",  # step at which under-estimated rows were last looked for
    "starved_tokens",  # prefill that steps could have hidden and memory did not allow, since the last preemption
    "backlog_right",  # the part of the backlog that belongs to the right side
    "cached_tokens",  # prompt tokens reused
    "node_tokens",  # prompt tokens of shared nodes that were computed
    "first_prefill",  # of the rows in prefill, by admission
    "last_prefill",
    "prefill_need",  # sum of their needs
]
_LIMITS = ["capacity", "block", "max_seqs", "chunk", "gate", "budgeted", "preempts"]
_LIMITS += ["policy", "window", "throttle", "exact"]
_FACTS = [
    "kappa",
    "delay_weight",
    "gemm_s",
    "weights_s",
    "prefill_attn_s",
    "kv_read_s",
    "overhead_s",
    "context_per_prefill_token",  # moving average of Step.prefill_context_tokens / prefill_tokens
    "root_density",  # compute density of the whole job
    "gemm_base_s",
    "comm_s",
    "comm_base_s",
    "overlapped",
    "left_area",  # KV tokens x steps that the waiting left rows hold for each token they prefill
    "left_compute",  # seconds of the rows in the left queue when it was filled
    "left_memory",
    "right_compute",  # the same of the right queue
    "right_memory",
    "running_memory",  # seconds of KV reads that the running rows still take
    "steps_left",  # steps that the running rows will still take
]
_COLUMNS = ["rows", "nodes", "queue", "back", "key", "tier", "expected"]
_COLUMNS += ["alive", "tau", "mean", "variance", "most", "tally", "phase"]
_SIZES = ["n", "m", "classes"]
SCALARS = np.dtype(
    [(name, "i8") for name in _COUNTS + _LIMITS + _SIZES]
    + [(f"at_{name}", "i8") for name in _COLUMNS]
    + [(name, "f8") for name in _FACTS],
    align=True,
)
"""Sums, limits and the addresses of the columns. Compiled functions take this one record, ``c``: a pointer. (Passing
the arrays themselves costs a dozen atomic reference counts a call, ten times the work of most decisions.)"""

LINE_BYTES = 64
"""Of a cache line."""
TAU_POINTS = 24
"""Future instants at which the expected footprint is watched."""

AGE_BINS = 84
"""Ages at which chances of survival are kept: four an octave, from 0 to 2**20 tokens."""


@dataclass(frozen=True, slots=True)
class State:
    """The arrays behind a ``c`` record: n rows, m nodes, C length classes, T = TAU_POINTS. Keeps them alive."""

    scalars: Records  # SCALARS [1]
    rows: Records  # ROW [n]
    nodes: Records  # NODE [m]
    queue: I32  # [2, n] rows of each side, best first; entries that are not WAITING any more are skipped
    back: I32  # [2, n] stacks of requeued rows
    key: F64  # [n] overtaking key (window > 1)
    tier: I32  # [n] larger goes first, and nothing of a smaller one passes it
    expected: F64  # [n] expected output tokens
    alive: F64  # [C, AGE_BINS, T] chance that a row of class c and that age is alive tau steps later
    tau: F64  # [T] steps from now, ascending, tau[0] == 0
    mean: F64  # [2, T] expected private KV tokens of the running rows of each side at now + tau
    variance: F64  # [2, T] its variance
    most: F64  # [T] their footprint on both sides if every row that may be alive then is
    tally: F64  # [C, AGE_BINS, 3] scratch of a refresh, all zeros between two
    phase: I64  # [block] decoding rows that need a block at steps congruent to the index

    @property
    def c(self) -> Records:
        """The record that compiled functions take."""
        return self.scalars[0]


def new_state(
    table: RequestTable, tree: PrefixTree, capacity: Capacity, step_time: StepTime, classes: int, horizon: float
) -> State:
    """A state with every row waiting, empty queues and no length estimates yet. ``horizon``: steps that the profile of
    future memory looks ahead."""
    n, block = table.n, max(1, capacity.block_tokens)
    state = State(
        scalars=np.zeros(1, SCALARS),
        rows=_row_records(table, tree, block),
        nodes=_node_records(tree, block),
        queue=np.zeros((2, n), np.int32),
        back=np.zeros((2, n), np.int32),
        key=np.zeros(n),
        tier=np.zeros(n, np.int32),
        expected=np.ones(n),
        alive=np.zeros((classes, AGE_BINS, TAU_POINTS)),
        tau=np.concatenate(([0.0], np.geomspace(1.0, max(2.0, horizon), TAU_POINTS - 1))),
        mean=np.zeros((2, TAU_POINTS)),
        variance=np.zeros((2, TAU_POINTS)),
        most=np.zeros(TAU_POINTS),
        tally=np.zeros((classes, AGE_BINS, 3)),
        phase=np.zeros(block, np.int64),
    )
    values = {
        "waiting": n,
        "capacity": capacity.kv_tokens or UNLIMITED,
        "block": block,
        "max_seqs": capacity.max_num_seqs + capacity.queued_seqs if capacity.max_num_seqs else UNLIMITED,
        "chunk": capacity.max_batched_tokens or UNLIMITED,
        "gate": capacity.prefix_lookup_at_submit,
        "budgeted": capacity.takes_prefill_budget,
        "preempts": capacity.preempts_on_request,
        "window": 1,
        "profile_kept": 1,
        "kappa": 1.0,
        "gemm_s": step_time.gemm_s_per_token,
        "weights_s": step_time.weights_s,
        "prefill_attn_s": step_time.prefill_attn_s,
        "kv_read_s": step_time.kv_read_s_per_token,
        "overhead_s": step_time.overhead_s,
        "gemm_base_s": step_time.gemm_base_s,
        "comm_s": step_time.comm_s_per_token,
        "comm_base_s": step_time.comm_base_s,
        "overlapped": step_time.overlapped,
        "n": n,
        "m": tree.n_nodes,
        "classes": classes,
    }
    for name in ("lru_oldest", "lru_newest", "tail_left", "tail_right", "blocked", "first_prefill", "last_prefill"):
        values[name] = -1
    for name in _COLUMNS:
        values[f"at_{name}"] = getattr(state, name).ctypes.data
    for name, value in values.items():
        state.scalars[name] = value
    return state


def records(count: int, of: np.dtype[np.void]) -> Records:
    """Records, all zeros, the first of which begins a cache line."""
    space = np.zeros(count * of.itemsize + LINE_BYTES, np.uint8)
    begin = -space.ctypes.data % LINE_BYTES
    return space[begin : begin + count * of.itemsize].view(of)


def _row_records(table: RequestTable, tree: PrefixTree, block: int) -> Records:
    """ROW [n], all waiting."""
    rows = records(table.n, ROW)
    _fill_rows(rows, tree.node_of, table.prompt_tokens, tree.prefix_tokens // block * block, table.max_tokens)
    return rows


@njit
def _fill_rows(rows: Records, node_of: I32, prompt_tokens: I64, shared_end: I64, max_tokens: I64) -> None:
    """Field by field would go through the records' memory once a field."""
    for i in range(len(rows)):
        r = rows[i]
        r.node = node_of[i]
        r.prompt = prompt_tokens[i]
        r.private = prompt_tokens[i] - shared_end[node_of[i]]
        r.limit = min(max_tokens[i], LARGEST_LIMIT)
        r.prev = r.next = r.ahead = r.behind = r.profiled = -1


def _node_records(tree: PrefixTree, block: int) -> Records:
    """NODE [m], none in KV."""
    nodes = np.zeros(tree.n_nodes, NODE)
    shared_end = tree.prefix_tokens // block * block
    nodes["parent"] = tree.parent
    nodes["segment"][1:] = shared_end[1:] - shared_end[tree.parent[1:]]
    nodes["owner"] = nodes["prev"] = nodes["next"] = -1
    return nodes


def longest_output(limits: I64, expected: F64) -> float:
    """Horizon of the profile in steps: no row is expected to live longer."""
    bounded = limits[limits < NO_LIMIT]
    horizon = float(expected.max(initial=1.0)) * 16.0
    return min(horizon, float(bounded.max())) if len(bounded) == len(limits) and len(bounded) else horizon


@njit
def rows_of(c: Records) -> Records:
    """ROW [n]"""
    found: Records = carray(pointer(c.at_rows), c.n, ROW)
    return found


@njit
def nodes_of(c: Records) -> Records:
    """NODE [m]"""
    found: Records = carray(pointer(c.at_nodes), c.m, NODE)
    return found


@njit
def queue_of(c: Records) -> I32:
    """int32 [2, n]"""
    found: I32 = carray(pointer(c.at_queue), (2, c.n), np.int32)
    return found


@njit
def back_of(c: Records) -> I32:
    """int32 [2, n]"""
    found: I32 = carray(pointer(c.at_back), (2, c.n), np.int32)
    return found


@njit
def key_of(c: Records) -> F64:
    """float64 [n]"""
    found: F64 = carray(pointer(c.at_key), c.n, np.float64)
    return found


@njit
def tier_of(c: Records) -> I32:
    """int32 [n]"""
    found: I32 = carray(pointer(c.at_tier), c.n, np.int32)
    return found


@njit
def expected_of(c: Records) -> F64:
    """float64 [n]"""
    found: F64 = carray(pointer(c.at_expected), c.n, np.float64)
    return found


@njit
def alive_of(c: Records) -> F64:
    """float64 [C, AGE_BINS, T]"""
    found: F64 = carray(pointer(c.at_alive), (c.classes, AGE_BINS, TAU_POINTS), np.float64)
    return found


@njit
def tau_of(c: Records) -> F64:
    """float64 [T]"""
    found: F64 = carray(pointer(c.at_tau), TAU_POINTS, np.float64)
    return found


@njit
def mean_of(c: Records) -> F64:
    """float64 [2, T]"""
    found: F64 = carray(pointer(c.at_mean), (2, TAU_POINTS), np.float64)
    return found


@njit
def variance_of(c: Records) -> F64:
    """float64 [2, T]"""
    found: F64 = carray(pointer(c.at_variance), (2, TAU_POINTS), np.float64)
    return found


@njit
def most_of(c: Records) -> F64:
    """float64 [T]"""
    found: F64 = carray(pointer(c.at_most), TAU_POINTS, np.float64)
    return found


@njit
def tally_of(c: Records) -> F64:
    """float64 [C, AGE_BINS, 3]"""
    found: F64 = carray(pointer(c.at_tally), (c.classes, AGE_BINS, 3), np.float64)
    return found


@njit
def phase_of(c: Records) -> I64:
    """int64 [block]"""
    found: I64 = carray(pointer(c.at_phase), c.block, np.int64)
    return found
