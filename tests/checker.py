"""An independent, slow check of a simulated schedule: plain loops and its own arithmetic, nothing of the scheduler's.

What a run without preemption did can be rebuilt from three facts a request (the step that ended its prefill, the step
that made its last token, its lengths), so every record of every step is checked exactly. With preemptions the steps in
between are unknown, and totals and limits are checked instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from plait.events import Capacity
from plait.model.steptime import StepTime
from plait.simulate import Result
from plait.table import I64, RequestTable
from plait.tree.prefix import PrefixTree


def check_schedule(
    run: Result,
    table: RequestTable,
    tree: PrefixTree,
    output_tokens: I64,
    capacity: Capacity,
    step_time: StepTime,
    gaps: bool = False,
) -> None:
    """Assert that the run is a schedule: each request once, KV within capacity, tokens conserved, time adding up.
    ``gaps``: the engine may stand idle between steps (a data-parallel rank that waits for work)."""
    _check_engine(run, table.n, capacity, step_time, gaps)
    output = _output(table, output_tokens)
    steps = _steps(run)
    _tokens_are_conserved(run, steps, table, tree, output)
    _each_request_gets_its_tokens(run, table, tree, output)
    if run.preemptions == 0:
        _every_step_decodes_what_it_says(run, steps, table, output)
        _kv_holds_at_least_what_runs(run, steps, table, tree, output, max(1, capacity.block_tokens))


def check_ranks(
    runs: Sequence[Result],
    table: RequestTable,
    tree: PrefixTree,
    output_tokens: I64,
    capacity: Capacity,
    step_time: StepTime,
) -> None:
    """Assert that data-parallel ranks ran each request once, each of them within its limits, and that tokens are
    conserved over all ranks: a request that was preempted may end on another one than it began on."""
    assert sorted(np.concatenate([run.rows for run in runs]).tolist()) == list(range(table.n))
    for run in runs:
        _check_engine(run, len(run.rows), capacity, step_time, gaps=True)
    joined, output = _joined(runs), _output(table, output_tokens)
    _tokens_are_conserved(joined, _steps(joined), table, tree, output)
    _each_request_gets_its_tokens(joined, table, tree, output)


def _joined(runs: Sequence[Result]) -> Result:
    """What the ranks did together, as far as ``_tokens_are_conserved`` and ``_each_request_gets_its_tokens`` look."""
    order = np.argsort(np.concatenate([run.rows for run in runs]))
    by_row = ("computed_tokens", "cached_tokens", "lost_tokens", "row_preemptions")
    sums = ("prefill_tokens", "recomputed_tokens", "preemptions")
    changes: dict[str, Any] = {name: np.concatenate([getattr(run, name) for run in runs])[order] for name in by_row}
    changes |= {name: sum(getattr(run, name) for run in runs) for name in sums}
    return dataclasses.replace(runs[0], steps=np.concatenate([run.steps for run in runs]), **changes)


def _output(table: RequestTable, output_tokens: I64) -> list[int]:
    return [int(min(d, cap)) for d, cap in zip(output_tokens, table.max_tokens, strict=True)]


def _steps(run: Result) -> list[dict[str, Any]]:
    return [{name: step[name].item() for name in run.steps.dtype.names} for step in run.steps]


def _check_engine(run: Result, n: int, capacity: Capacity, step_time: StepTime, gaps: bool) -> None:
    """What one engine did: each of its n requests once, within its limits."""
    steps = _steps(run)
    _each_request_once(run, n)
    _time_adds_up(run, steps, step_time, gaps)
    _limits_hold(steps, capacity)


def _each_request_once(run: Result, n: int) -> None:
    assert sorted(int(row) for row in run.completion_order) == list(range(n))
    finish = [float(run.finish_s[row]) for row in run.completion_order]
    assert all(a <= b for a, b in pairwise(finish)), "completed out of order"
    for row in range(n):
        assert 0 <= run.admit_s[row] <= run.start_s[row] <= run.finish_s[row] <= run.makespan_s, f"row {row}"


def _time_adds_up(run: Result, steps: list[dict[str, Any]], st: StepTime, gaps: bool) -> None:
    """Each step takes what the machine needs for its tokens; steps follow one another without a gap."""
    now = 0.0
    for k, step in enumerate(steps):
        tokens = step["prefill_tokens"] + step["decode_seqs"]
        gemm = max(st.weights_s, st.gemm_base_s + st.gemm_s_per_token * tokens)
        sides = [
            gemm + st.prefill_attn_s * step["prefill_context_tokens"],
            st.kv_read_s_per_token * step["decode_context_tokens"],
            st.comm_base_s + st.comm_s_per_token * tokens,
        ]
        sides.sort()
        rest = sides[0] + sides[1]
        seconds = sides[2] + (st.interference if st.overlapped == 1.0 else 1.0) * rest
        seconds += st.overhead_s + st.decode_seq_s * step["decode_seqs"]
        now = max(now + seconds, step["t_s"] if gaps else 0.0)
        assert abs(step["duration_s"] - seconds) <= 1e-9 + 1e-9 * seconds, f"step {k} took {step['duration_s']}"
        assert abs(step["t_s"] - now) <= 1e-6 + 1e-9 * now, f"step {k} ended at {step['t_s']}, not {now}"
        assert tokens > 0, f"step {k} did nothing"
    assert abs(run.makespan_s - now) <= 1e-6 + 1e-9 * now


def _limits_hold(steps: list[dict[str, Any]], capacity: Capacity) -> None:
    for k, step in enumerate(steps):
        if capacity.kv_tokens:
            assert 0 <= step["kv_tokens"] <= capacity.kv_tokens, f"step {k}: {step['kv_tokens']} KV tokens"
        if capacity.max_num_seqs:
            assert step["decode_seqs"] <= capacity.max_num_seqs, f"step {k}: {step['decode_seqs']} sequences"
        if capacity.max_batched_tokens:
            # a decode batch is never cut: prefill gets what is left of the chunk
            assert step["prefill_tokens"] <= max(0, capacity.max_batched_tokens - step["decode_seqs"]), f"step {k}"


def _tokens_are_conserved(
    run: Result, steps: list[dict[str, Any]], table: RequestTable, tree: PrefixTree, output: list[int]
) -> None:
    """All prefill is accounted for, and lies between everything shared and nothing shared."""
    prefilled = sum(step["prefill_tokens"] for step in steps)
    assert prefilled == run.prefill_tokens
    segments, parents = tree.prefix_tokens, tree.parent
    used: set[int] = set()
    for node in tree.node_of:
        v = int(node)
        while v > 0:
            used.add(v)
            v = int(parents[v])
    unique = sum(int(segments[v] - segments[parents[v]]) for v in used)
    unique += sum(int(p) - int(segments[v]) for p, v in zip(table.prompt_tokens, tree.node_of, strict=True))
    whole = sum(max(1, int(p)) for p in table.prompt_tokens)
    assert prefilled >= unique, f"{prefilled} tokens prefilled, {unique} distinct ones exist"
    if run.preemptions == 0:
        assert prefilled <= whole
        assert run.recomputed_tokens == 0
    decoded = sum(step["decode_seqs"] for step in steps)
    needed = sum(d - 1 for d in output)
    assert needed - run.preemptions <= decoded <= needed, f"{decoded} decodes for {needed} tokens"


def _each_request_gets_its_tokens(run: Result, table: RequestTable, tree: PrefixTree, output: list[int]) -> None:
    """Every prompt token is computed for its request or found in KV, and found only where it is shared; what preemption
    threw away adds up and is computed or found once more."""
    assert sum(int(k) for k in run.computed_tokens) == run.prefill_tokens
    assert sum(int(k) for k in run.lost_tokens) == run.recomputed_tokens
    assert sum(int(k) for k in run.row_preemptions) == run.preemptions
    for row in range(table.n):
        prompt, shared = int(table.prompt_tokens[row]), int(tree.prefix_tokens[tree.node_of[row]])
        computed, cached = int(run.computed_tokens[row]), int(run.cached_tokens[row])
        times = int(run.row_preemptions[row])
        assert computed >= 1 and 0 <= cached <= shared * (times + 1), f"row {row}: {cached} cached tokens"
        if times == 0:
            assert run.lost_tokens[row] == 0
            assert computed + cached == max(1, prompt), f"row {row}: {computed} computed, {cached} cached of {prompt}"
        else:
            assert computed + cached >= prompt, f"row {row}: {computed} computed, {cached} cached of {prompt}"
            assert run.lost_tokens[row] <= times * (prompt + output[row])


def _step_of(run: Result, steps: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Number of the step that gave each request its first token, and its last one."""
    at = {step["t_s"]: k for k, step in enumerate(steps)}
    assert len(at) == len(steps), "two steps end at the same time"
    return [at[float(t)] for t in run.start_s], [at[float(t)] for t in run.finish_s]


def _every_step_decodes_what_it_says(
    run: Result, steps: list[dict[str, Any]], table: RequestTable, output: list[int]
) -> None:
    """A request decodes once in each step after its first token, and reads its prompt and the tokens it has."""
    seqs, context = [0] * len(steps), [0] * len(steps)
    first, last = _step_of(run, steps)
    for row in range(table.n):
        assert last[row] - first[row] == output[row] - 1, f"row {row}: steps {first[row]} to {last[row]}"
        for generated, k in enumerate(range(first[row] + 1, last[row] + 1), start=1):
            seqs[k] += 1
            context[k] += int(table.prompt_tokens[row]) + generated
    assert seqs == [step["decode_seqs"] for step in steps]
    assert context == [step["decode_context_tokens"] for step in steps]


def _kv_holds_at_least_what_runs(
    run: Result, steps: list[dict[str, Any]], table: RequestTable, tree: PrefixTree, output: list[int], block: int
) -> None:
    """After a step KV holds every decoding request's own tokens, in whole blocks, and each shared prefix once."""
    own = [0] * len(steps)
    nodes: list[set[int]] = [set() for _ in steps]
    first, last = _step_of(run, steps)

    def segment(v: int) -> int:
        """Tokens of a node's own segment that lie in whole blocks."""
        above = int(tree.prefix_tokens[tree.parent[v]])
        return int(tree.prefix_tokens[v]) // block * block - above // block * block

    for row in range(table.n):
        path, v = set(), int(tree.node_of[row])
        while v > 0:
            path.add(v)
            v = int(tree.parent[v])
        private = int(table.prompt_tokens[row]) - sum(segment(v) for v in path)
        for generated, k in enumerate(range(first[row], last[row]), start=1):
            own[k] += -(-(private + generated) // block) * block
            nodes[k] |= path
    for k, step in enumerate(steps):
        held = own[k] + sum(segment(v) for v in nodes[k])
        assert step["kv_tokens"] >= held, f"step {k}: {step['kv_tokens']} KV tokens, {held} are in use"
