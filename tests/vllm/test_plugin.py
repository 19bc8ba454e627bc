"""The scheduler plug-in inside a real vLLM on a CPU.

Needs a virtual environment with the CPU wheel of vLLM and a small model in Hugging Face form, named by PLAIT_VLLM_MODEL
(``benchmarks/gguf_to_hf.py`` makes one from the built-in model); skipped elsewhere.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

MODEL = os.environ.get("PLAIT_VLLM_MODEL", "")
if not MODEL:
    pytest.skip("PLAIT_VLLM_MODEL names no model", allow_module_level=True)
vllm = pytest.importorskip("vllm")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PREFIX_TOKENS, OWN_TOKENS, BLOCK_TOKENS = 320, 16, 128


def engine(scheduler: str | None, goal: str, **more: Any) -> Any:
    """An engine in this process, so that its scheduler can be looked at."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    own = {} if scheduler is None else {"scheduler_cls": scheduler, "additional_config": {"plait": {"goal": goal}}}
    arguments = EngineArgs(
        model=MODEL,
        max_model_len=1024,
        num_gpu_blocks_override=48,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        **own,
        **more,
    )
    return LLMEngine.from_engine_args(arguments)


def scheduler_of(made: Any) -> Any:
    return made.engine_core.engine_core.scheduler


def add(made: Any, name: str, tokens: list[int], max_tokens: int = 2, priority: int = 0) -> None:
    parameters = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    made.add_request(name, {"prompt_token_ids": tokens}, parameters, priority=priority)


def run(made: Any) -> dict[str, Any]:
    """Step until nothing is left; each request must finish once."""
    found: dict[str, Any] = {}
    while made.has_unfinished_requests():
        for output in made.step():
            if output.finished:
                assert output.request_id not in found
                found[output.request_id] = output
    return found


def mix(seed: int, groups: int = 6, each: int = 8) -> list[tuple[int, list[int]]]:
    """(group, tokens) of shuffled prompts with shared openings."""
    dice = random.Random(seed)
    openings = [[dice.randrange(1000, 40000) for _ in range(PREFIX_TOKENS)] for _ in range(groups)]
    rows = [(g, openings[g] + [dice.randrange(1000, 40000) for _ in range(OWN_TOKENS)]) for g in range(groups)] * each
    rows = [
        (g, tokens[:PREFIX_TOKENS] + [dice.randrange(1000, 40000) for _ in range(OWN_TOKENS)]) for g, tokens in rows
    ]
    dice.shuffle(rows)
    return rows


@pytest.fixture(scope="module")
def throughput() -> Iterator[Any]:
    made = engine("plait.vllm.Scheduler", "throughput")
    yield made


def test_every_request_is_answered_once_and_nearly_all_sharing_is_kept(throughput: Any) -> None:
    throughput.reset_prefix_cache()
    rows = mix(1)
    for index, (_, tokens) in enumerate(rows):
        add(throughput, f"a{index}", tokens)
    found = run(throughput)
    assert len(found) == len(rows)
    cached = sum(output.num_cached_tokens for output in found.values())
    whole_blocks = PREFIX_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached >= 0.9 * whole_blocks * (len(rows) - 6)


def test_the_order_observed_is_the_order_asked_for(throughput: Any) -> None:
    rows = mix(2)
    taken: list[tuple[int, ...]] = []
    queue = scheduler_of(throughput).waiting
    pop = queue.pop_request

    def noted() -> Any:
        request = pop()
        taken.append(tuple(request.prompt_token_ids))
        return request

    queue.pop_request = noted
    for index, (_, tokens) in enumerate(rows):
        add(throughput, f"b{index}", tokens)
    start = queue.order._cursor[0]
    run(throughput)
    del queue.pop_request

    def place(tokens: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
        as_bytes = b"".join(token.to_bytes(4, "big") for token in tokens)
        return as_bytes <= start, tokens

    assert taken == sorted(taken, key=place)


def test_random_aborts_lose_nobody_else(throughput: Any) -> None:
    dice = random.Random(3)
    rows = mix(3, groups=5, each=40)
    aborted: set[str] = set()
    found: dict[str, Any] = {}
    waiting = [(f"c{index}", tokens[:100]) for index, (_, tokens) in enumerate(rows)]
    added: list[str] = []
    while waiting or throughput.has_unfinished_requests():
        for _ in range(min(dice.randrange(12), len(waiting))):
            name, tokens = waiting.pop()
            add(throughput, name, tokens, max_tokens=dice.randrange(1, 4))
            added.append(name)
        for name in dice.sample(added, min(2, len(added))):
            if name not in found and name not in aborted:
                aborted.add(name)
                throughput.abort_request([name])
        for output in throughput.step():
            if output.finished and output.request_id not in aborted:
                assert output.request_id not in found
                found[output.request_id] = output
    assert aborted and set(found) | aborted == {f"c{index}" for index in range(len(rows))}
    assert not set(found) & aborted and len(scheduler_of(throughput).waiting) == 0


def test_priorities_and_the_latency_goal_put_short_work_first() -> None:
    made = engine("plait.vllm.Scheduler", "latency", scheduling_policy="priority")
    dice = random.Random(4)
    order: list[str] = []
    for index in range(24):
        tokens = [dice.randrange(1000, 40000) for _ in range(20)]
        add(made, f"d{index}", tokens, max_tokens=24 if index % 2 else 1, priority=index % 3 // 2)
    while made.has_unfinished_requests():
        order += [output.request_id for output in made.step() if output.finished]
    assert sorted(order) == sorted(f"d{index}" for index in range(24))
    numbers = [int(name[1:]) for name in order]
    urgent = [numbers.index(index) for index in range(24) if index % 3 < 2]
    later = [numbers.index(index) for index in range(24) if index % 3 == 2]
    assert sum(urgent) / len(urgent) < sum(later) / len(later)
    short = [numbers.index(index) for index in range(0, 24, 2) if index % 3 < 2]
    long = [numbers.index(index) for index in range(1, 24, 2) if index % 3 < 2]
    assert max(short) < min(long)


def test_an_interface_that_changed_leaves_vllms_own_order(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import plait.vllm

    monkeypatch.setattr(plait.vllm, "QUEUE_METHODS", frozenset({"something_else"}))
    fault = plait.vllm.interface_fault(object())
    assert fault is not None and "something_else" in fault
