"""How much prefill a step takes beside the rows that decode."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.events import Capacity, Started, Step
from plait.lengths import Lengths
from plait.model.specs import device, model
from plait.model.steptime import StepTime, for_machine, step_s
from plait.policy.base import View
from plait.scheduler import Scheduler
from plait.scheduling.queues import prefill_room
from plait.simulate import simulate
from plait.table import RequestTable
from plait.tree.prefix import PrefixTree
from tests.simulation import STEP_TIME

CHUNK = 4096
PROMPT, OUTPUT = 40, 60


def running(n: int, decoding: int, step_time: StepTime, policy: str = "latency") -> Scheduler:
    """n equal rows; that many decode, the others wait or are in prefill."""
    table = RequestTable.of(np.full(n, PROMPT))
    lengths = Lengths.known(table, np.full(n, OUTPUT))
    capacity = Capacity(1_000_000, max_batched_tokens=CHUNK, takes_prefill_budget=True)
    view = View(table, PrefixTree.without_sharing(n), lengths.expected, capacity, step_time)
    scheduler = Scheduler(view, lengths, policy)
    started = 0
    while started < decoding:
        for row in scheduler.decide(0.0).admit.tolist()[: decoding - started]:
            scheduler.update(Started(row, 0.0))
            started += 1
        scheduler.update(Step(0.0, 0.0, 10**6, 0, 0))
    return scheduler


@given(st.integers(1, 400), st.floats(0, 1), st.booleans(), st.floats(0, 2e-2))
def test_decoding_rows_are_delayed_by_no_more_than_all_rows_share(
    n: int, part: float, overlapped: bool, base: float
) -> None:
    step_time = STEP_TIME._replace(overlapped=float(overlapped), interference=0.0, prefill_attn_s=0.0, gemm_base_s=base)
    c = running(n, 1 + int(part * (n - 1)), step_time).state.c
    empty_s = max(step_time.weights_s, base) + step_time.overhead_s
    most_s = empty_s + n * empty_s / (c["delay_weight"] * c["decoding"])
    if overlapped:  # the time to read the KV cache hides prefill that costs nobody anything
        most_s = max(most_s, step_time.kv_read_s_per_token * c["decode_context"] + step_time.overhead_s)

    def takes_s(tokens: int) -> float:
        return step_s(step_time, tokens, 0.0, c["decoding"], c["decode_context"])

    room = prefill_room(c)
    assert 0 < c["delay_weight"] <= 1 <= room
    assert room == 1 or takes_s(room) <= most_s * (1 + 1e-9)
    assert room == CHUNK or takes_s(room + 1) > most_s * (1 - 1e-9)


def test_other_policies_and_engines_without_a_chunk_have_no_such_limit() -> None:
    assert prefill_room(running(400, 200, STEP_TIME, "size").state.c) == CHUNK
    table = RequestTable.of(np.full(3, PROMPT))
    lengths = Lengths.known(table, np.full(3, OUTPUT))
    view = View(table, PrefixTree.without_sharing(3), lengths.expected, Capacity(1000), STEP_TIME)
    assert len(Scheduler(view, lengths, "latency").decide(0.0).admit) == 3


def test_where_memory_does_not_bind_requests_still_take_turns() -> None:
    rng = np.random.default_rng(0)
    s, o = rng.integers(10, 3000, 1000), rng.integers(10, 400, 1000)
    table, tree = RequestTable.of(s), PrefixTree.without_sharing(1000)
    step_time = for_machine(device("A100-80"), model("Llama-3.1-8B"), "sequential")
    capacity = Capacity(int(np.sum(s + o)), max_batched_tokens=2048, takes_prefill_budget=True)
    area, latency = (
        simulate(table, tree, o, Lengths.known(table, o), capacity, step_time, policy) for policy in ("area", "latency")
    )
    assert latency.finish_s.mean() < 0.9 * area.finish_s.mean() and latency.makespan_s < 1.1 * area.makespan_s
