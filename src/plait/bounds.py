"""Lower bounds on the time any schedule of a job takes on an engine described by ``StepTime``.

A step with compute, memory and network time c, m, n takes longest(c, m, n) + i · (sum of the other two) + fixed, which
is (1 − i) · longest + i · (c + m + n) + fixed, with i = 1 for a sequential engine. ``longest`` is convex and
homogeneous, so the sum over steps is at least the same expression of the sums C, M, N. Every schedule has at least
these sums:

- C: each token of the prefix tree goes through the matrix products once and attends to what is before it (a cache can
  at best keep all of it), and so does every output token but the first of its request, which ends a prefill;
- M: output token j > 1 of a request reads its prompt and its j − 1 tokens so far: p (d − 1) + d (d − 1)/2 together;
- N: the tokens of C.

A request that is preempted gets one token from its second prefill and skips that token's read: ``restarts`` of them
lower M by at most ``restarts`` x the longest context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.errors import InputError
from plait.events import Capacity
from plait.model.steptime import StepTime, steps_s
from plait.table import F64, I64, RequestTable
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import unique_tokens


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds; no schedule is faster than any of them."""

    compute_s: float
    """C: compute time at the sharing of a depth-first order with an unlimited cache."""
    memory_s: float
    """M: time to read the KV of all decodes."""
    network_s: float
    """N: all-reduce time."""
    ideal_s: float
    """max(C, M, N): perfect overlap."""
    practical_s: float
    """The same with the engine's interference (overlapped), or C + M + N (sequential)."""
    overhead_s: float
    """``practical_s`` and the fixed time of the fewest steps the job can be done in."""
    critical_s: float
    """Longest single request, alone from its prefill to its last token."""

    @property
    def best_s(self) -> float:
        """The tightest of them."""
        return max(self.overhead_s, self.critical_s)


@dataclass(frozen=True, slots=True)
class _Work:
    """Sums over a job that every schedule has at least."""

    prefill_tokens: float
    prefill_pairs: float
    decodes: float
    decode_kv_tokens: float
    private_kv_steps: float
    """Sum over decodes of KV tokens that only this request holds (a shared prefix may be held for many)."""
    longest_output: int
    longest_context: int


def bounds(
    table: RequestTable,
    tree: PrefixTree,
    output_tokens: I64,
    step_time: StepTime,
    capacity: Capacity,
    restarts: int = 0,
    ranks: int = 1,
) -> Bounds:
    """Bounds of a backlog with known output lengths (int [n], >= 1) on ``ranks`` engines side by side (data parallel).

    ``restarts``: preemptions of the run that is compared, 0 for a target. Raises InputError for lengths that do not
    belong to the table. O(n).
    """
    output = np.asarray(output_tokens, np.int64)
    if output.shape != (table.n,) or np.any(output < 1):
        raise InputError(f"{len(output)} output lengths for {table.n} requests; one whole number >= 1 each is needed")
    output = np.minimum(output, table.max_tokens)
    st, work = step_time, _work(table, tree, output)
    skipped = restarts * work.longest_context  # KV tokens not read
    tokens = work.prefill_tokens + work.decodes
    compute = (st.gemm_s_per_token * tokens + st.prefill_attn_s * work.prefill_pairs) / ranks
    memory = st.kv_read_s_per_token * max(0.0, work.decode_kv_tokens - skipped) / ranks
    network = st.comm_s_per_token * tokens / ranks
    steps = _fewest_steps(work, capacity, restarts, ranks)
    floor = max(compute + st.gemm_base_s * steps, st.weights_s * steps)
    fixed = st.overhead_s * steps + st.decode_seq_s * max(0.0, work.decodes - restarts) / ranks
    critical = _critical_path(table, tree, output, st) - st.kv_read_s_per_token * skipped - st.decode_seq_s * restarts
    exchange = network + st.comm_base_s * steps
    return Bounds(
        compute_s=compute,
        memory_s=memory,
        network_s=network,
        ideal_s=max(compute, memory, network),
        practical_s=_busy(st, compute, memory, network),
        overhead_s=_busy(st, floor, memory, exchange) + fixed,
        critical_s=max(0.0, critical),
    )


def _busy(st: StepTime, compute: float, memory: float, network: float) -> float:
    """(1 − i) · longest + i · sum."""
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    return (1 - exposed) * max(compute, memory, network) + exposed * (compute + memory + network)


def _work(table: RequestTable, tree: PrefixTree, output: I64) -> _Work:
    prompt, d = table.prompt_tokens.astype(np.float64), output.astype(np.float64)
    shared = tree.prefix_tokens[tree.node_of].astype(np.float64)
    node_end = tree.prefix_tokens.astype(np.float64)
    node_begin = (tree.prefix_tokens - tree.segment_tokens).astype(np.float64)
    grown = d * (d - 1) / 2
    return _Work(
        prefill_tokens=float(unique_tokens(tree, table.prompt_tokens)),
        prefill_pairs=float(_pairs(node_begin, node_end).sum() + _pairs(shared, prompt).sum()),
        decodes=float((d - 1).sum()),
        decode_kv_tokens=float((prompt * (d - 1) + grown).sum()),
        private_kv_steps=float(((prompt - shared) * (d - 1) + grown).sum()),
        longest_output=int(output.max(initial=0)),
        longest_context=int((table.prompt_tokens + output).max(initial=0)),
    )


def _pairs(begin: F64, end: F64) -> F64:
    """(token, context token) pairs of tokens begin + 1 .. end, each of which attends to itself and all before it."""
    return (end * (end + 1) - begin * (begin + 1)) / 2


def _fewest_steps(work: _Work, capacity: Capacity, restarts: int, ranks: int) -> float:
    """Steps a rank takes at least: the longest answer needs one a token; a step holds ``kv_tokens`` of KV at most, so
    the KV held over all steps needs its share of them; so do the limits on sequences and tokens of a step. The mean
    over ranks is bounded, hence so is the slowest rank."""
    held = work.private_kv_steps - restarts * work.longest_context
    steps = [float(work.longest_output)]
    if capacity.kv_tokens:
        steps.append(held / (ranks * capacity.kv_tokens))
    if capacity.max_num_seqs:
        steps.append((work.decodes - restarts) / (ranks * capacity.max_num_seqs))
    if capacity.max_batched_tokens:
        steps.append((work.prefill_tokens + work.decodes) / (ranks * capacity.max_batched_tokens))
    return max(steps)


def _critical_path(table: RequestTable, tree: PrefixTree, output: I64, st: StepTime) -> float:
    """Seconds of the longest request, if others have computed all it shares and nobody else is in its steps.

    Its prefill in one step costs no more than in several (the floor of a step is paid once), and a step's time grows
    with everything in it. Decode step g = 1 .. d − 1 reads p + g tokens; the reads outlast the rest from some g on.
    """
    prompt, steps = table.prompt_tokens.astype(np.float64), (output - 1).astype(np.float64)
    shared = tree.prefix_tokens[tree.node_of].astype(np.float64)
    prefill = steps_s(st, prompt - shared, _pairs(shared, prompt), np.zeros(table.n), np.zeros(table.n))
    compute = max(st.gemm_base_s + st.gemm_s_per_token, st.weights_s)
    network = st.comm_base_s + st.comm_s_per_token
    longest, read = max(compute, network), max(st.kv_read_s_per_token, 1e-300)
    hidden_steps = np.clip(np.floor(longest / read - prompt), 0, steps)
    all_reads = read * (prompt * steps + steps * (steps + 1) / 2)
    hidden_reads = read * (prompt * hidden_steps + hidden_steps * (hidden_steps + 1) / 2)
    exposed = st.interference if st.overlapped > 0.5 else 1.0
    busy = (1 - exposed) * (longest * hidden_steps + all_reads - hidden_reads)
    busy += exposed * ((compute + network) * steps + all_reads)
    path = prefill + busy + (st.overhead_s + st.decode_seq_s) * steps
    return float(path.max(initial=0.0))
