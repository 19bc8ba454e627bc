"""The scheduler plug-in inside a real vLLM on a CPU.

Needs a virtual environment with the CPU wheel of vLLM and a small model in Hugging Face form, named by PLAIT_VLLM_MODEL
(``benchmarks/gguf_to_hf.py`` makes one from the built-in model); skipped elsewhere.

One engine serves all tests; each puts a scheduler of its own into it, made as the engine makes its first. Its model is
the named one with two layers and weights of no sense, since what is looked at is the order of requests and not what is
answered: steps take a tenth of the time. The whole model answers in test_server.py and test_engine.py.
"""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

MODEL = os.environ.get("PLAIT_VLLM_MODEL", "")
if not MODEL:
    pytest.skip("PLAIT_VLLM_MODEL names no model", allow_module_level=True)
vllm = pytest.importorskip("vllm")


from llvmlite.binding import ffi  # noqa: E402

from plait.policy.base import POLICIES  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PREFIX_TOKENS, OWN_TOKENS, BLOCK_TOKENS = 320, 16, 128


@pytest.fixture(autouse=True, scope="module")
def numba_is_here_before_the_engine() -> Iterator[None]:
    """POLICIES above load it. The CPU wheel would stumble over llvmlite (see ``plait.vllm``), which answers to any
    name, also to ``__dict__``."""
    kind = type(ffi.lib)
    found = kind.__getattr__

    def named(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(self, name)

    kind.__getattr__ = named
    yield
    kind.__getattr__ = found


@pytest.fixture(scope="module")
def engine() -> Any:
    """In this process, so that its scheduler can be looked at. It is what the plug-in is named to on the command line,
    and has room for all that the tests ask of it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=MODEL,
        hf_overrides={"num_hidden_layers": 2},
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=16,
        num_gpu_blocks_override=48,
        enforce_eager=True,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.2,
        dtype="float32",  # not every CPU has fast bfloat16
        scheduler_cls="plait.vllm.Scheduler",
        additional_config={"plait": {"goal": "throughput"}},
    )
    made = LLMEngine.from_engine_args(arguments)
    assert type(scheduler_of(made)).__name__ == "Scheduler" and scheduler_of(made).plait is not None
    return made


def renew(
    made: Any,
    goal: str,
    plait: dict[str, Any] | None = None,
    scheduler: str = "plait.vllm.Scheduler",
    blocks: int = 48,
    **settings: Any,
) -> Any:
    """A new scheduler in the engine, with nothing cached, as ``EngineCore`` makes it: of vLLM's settings with these
    changed. ``blocks``: of the KV cache, at most what the engine has."""
    core, used = made.engine_core.engine_core, scheduler_of(made)
    made.step()  # the model runner hears of the last that ended
    assert not used.has_requests()
    config, cache = copy.copy(core.vllm_config), copy.copy(used.kv_cache_config)
    config.additional_config = {"plait": {"goal": goal, **(plait or {})}}
    config.scheduler_config = copy.copy(config.scheduler_config)
    for name, value in {"scheduler_cls": scheduler, "max_num_seqs": 4, **settings}.items():
        assert hasattr(config.scheduler_config, name)
        setattr(config.scheduler_config, name, value)
    cache.num_blocks = blocks
    core.scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=core.structured_output_manager,
        block_size=used.block_size,
        hash_block_size=BLOCK_TOKENS,
    )
    return core.scheduler


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


def test_every_request_is_answered_once_and_nearly_all_sharing_is_kept(engine: Any) -> None:
    renew(engine, "throughput")
    rows = mix(1)
    for index, (_, tokens) in enumerate(rows):
        add(engine, f"a{index}", tokens)
    found = run(engine)
    assert len(found) == len(rows)
    cached = sum(output.num_cached_tokens for output in found.values())
    whole_blocks = PREFIX_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached >= 0.9 * whole_blocks * (len(rows) - 6)


def test_the_order_observed_is_the_order_asked_for(engine: Any) -> None:
    """Asked for: what our scheduler admits. Observed: what vLLM hands to its model runner."""
    rows = mix(2)
    scheduler = renew(engine, "throughput")
    asked: list[str] = []
    seen: list[str] = []
    decide, schedule = scheduler.plait.online.decide, scheduler.schedule

    def asking(backlog: int) -> Any:
        admitted, budget = decide(backlog)
        asked.extend(request.request_id for request in admitted)
        return admitted, budget

    def seeing(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.extend(new.req_id for new in output.scheduled_new_reqs)
        return output

    scheduler.plait.online.decide, scheduler.schedule = asking, seeing
    group = {}
    for index, (opening, tokens) in enumerate(rows):
        add(engine, f"b{index}", tokens)
        group[f"b{index}"] = opening
    run(engine)
    del scheduler.plait.online.decide, scheduler.schedule
    assert seen == asked and len(set(seen)) == len(rows)
    groups = [group[name.partition("-")[0]] for name in seen]
    assert sum(a != b for a, b in pairwise(groups)) == len(set(groups)) - 1, "one after the other"


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_each_request_is_answered_once(engine: Any, policy: str) -> None:
    renew(engine, "throughput", plait={"policy": policy})
    for index, (_, tokens) in enumerate(mix(3, groups=3, each=5)):
        add(engine, f"{policy}{index}", tokens, max_tokens=1 + index % 4)
    found = run(engine)
    assert sorted(found) == sorted(f"{policy}{index}" for index in range(15))
    assert all(len(output.outputs[0].token_ids) == 1 + int(name[len(policy) :]) % 4 for name, output in found.items())


def test_steps_may_be_scheduled_ahead_as_under_async_scheduling(engine: Any) -> None:
    """vLLM switches async scheduling off on CPUs; so its pipeline is played here on the scheduler that it takes then: a
    step is scheduled before the tokens of the last one are there."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = renew(engine, "throughput")
    assert isinstance(scheduler, AsyncScheduler)
    generated = {f"h{index}": 0 for index in range(12)}
    for index, name in enumerate(generated):
        parameters = vllm.SamplingParams(temperature=0, max_tokens=3 + index, ignore_eos=True)
        scheduler.add_request(Request(name, [1000 + index] * 20, parameters, None))
    under_way: deque[Any] = deque()
    ahead = 0
    while scheduler.has_requests():
        under_way.append(scheduler.schedule())
        ahead += any(request.num_output_placeholders > 1 for request in scheduler.running)
        if len(under_way) == 2:
            done = under_way.popleft()
            names = list(done.num_scheduled_tokens)
            places = {name: place for place, name in enumerate(names)}
            made = ModelRunnerOutput(names, places, sampled_token_ids=[[7] for _ in names])
            for each in scheduler.update_from_output(done, made).values():
                for output in each.outputs:
                    generated[output.request_id] += len(output.new_token_ids)
    assert generated == {f"h{index}": 3 + index for index in range(12)}
    assert ahead > 10, "steps were scheduled while tokens were still to come"
    online = scheduler.plait.online
    assert len(online) == 0 and online.scheduler.running == 0 and online.scheduler.state.c["has_steps"]


@pytest.mark.parametrize("goal", ["throughput", "latency"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_thousand_random_requests_with_aborts_all_end_once_and_free_their_blocks(
    engine: Any, goal: str, policy: str
) -> None:
    """KV cache so small that requests are preempted; priorities and aborts at random; nothing is left behind."""
    scheduler = renew(engine, goal, blocks=12, policy=policy, max_num_seqs=16)
    dice = random.Random(f"{goal} {policy}")
    waiting = [f"c{index}" for index in range(1000)]
    added: list[str] = []
    aborted: set[str] = set()
    found: set[str] = set()
    openings = [[dice.randrange(1000, 40000) for _ in range(6)] for _ in range(8)]
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(dice.randrange(60), len(waiting))):
            added.append(waiting.pop())
            tokens = dice.choice(openings) + [dice.randrange(1000, 40000) for _ in range(dice.randrange(1, 12))]
            priority = dice.randrange(3) if policy == "priority" else 0
            add(
                engine,
                added[-1],
                tokens,
                max_tokens=130 if dice.random() < 0.02 else dice.randrange(1, 4),
                priority=priority,
            )
        for name in dice.sample(added, min(4, len(added))):
            if name not in found and name not in aborted:
                aborted.add(name)
                engine.abort_request([name])
        for output in engine.step():
            if output.finished and output.request_id not in aborted:
                assert output.request_id not in found
                found.add(output.request_id)
    assert aborted and not found & aborted and found | aborted == {f"c{index}" for index in range(1000)}
    assert type(scheduler.waiting).__name__ == "OrderedQueue" and len(scheduler.waiting) == 0
    assert not scheduler.running and not scheduler.requests
    assert scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_nobody_starves_behind_a_stream_of_better_placed_arrivals(engine: Any, goal: str) -> None:
    """The victim shares nothing with the others, which go on for longer than it does under ``throughput``, where long
    answers go first, and for less long under ``latency``; two of them arrive for each that ends."""
    scheduler = renew(engine, goal, max_num_seqs=2)
    dice = random.Random(5)
    opening = [2000] * BLOCK_TOKENS
    for index in range(8):
        add(engine, f"s{index}", [*opening, dice.randrange(1000, 40000)], max_tokens=2)
    add(
        engine,
        "victim",
        [45000] + [dice.randrange(1000, 40000) for _ in range(20)],
        max_tokens=8 if goal == "latency" else 1,
    )
    ends = arrivals = 0
    while True:
        for output in engine.step():
            if output.finished:
                if output.request_id == "victim":
                    break
                ends += 1
                for _ in range(2):
                    arrivals += 1
                    add(engine, f"t{arrivals}", [*opening, dice.randrange(1000, 40000)], max_tokens=2)
        else:
            assert ends < 1500
            continue
        break
    engine.abort_request([f"t{index}" for index in range(1, arrivals + 1)] + [f"s{index}" for index in range(8)])
    run(engine)
    assert ends > 8 and len(scheduler.waiting) == 0


def test_a_prefill_budget_holds_while_others_generate_and_only_then(engine: Any) -> None:
    scheduler = renew(engine, "throughput", plait={"prefill_tokens": 64})
    steps: list[tuple[int, int]] = []
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        generating = sum(request.num_output_tokens > 0 for request in scheduler.running)
        output = schedule(*args, **kwargs)
        steps.append((generating, output.total_num_scheduled_tokens))
        return output

    scheduler.schedule = noted
    dice = random.Random(6)
    add(engine, "p0", [dice.randrange(1000, 40000) for _ in range(300)], max_tokens=30)
    engine.step()
    engine.step()
    add(engine, "p1", [dice.randrange(1000, 40000) for _ in range(500)], max_tokens=2)
    assert set(run(engine)) == {"p0", "p1"}
    assert max(tokens for generating, tokens in steps if not generating) >= 300
    assert all(tokens <= generating + 64 for generating, tokens in steps if generating)
    assert sum(tokens == generating + 64 for generating, tokens in steps if generating) >= 5


def test_it_works_without_async_scheduling(engine: Any) -> None:
    renew(engine, "latency", scheduler="plait.vllm.SyncScheduler", async_scheduling=False)
    for index, (_, tokens) in enumerate(mix(7, groups=2, each=4)):
        add(engine, f"g{index}", tokens[-40:], max_tokens=5)
    found = run(engine)
    assert len(found) == 8 and all(len(output.outputs[0].token_ids) == 5 for output in found.values())


def test_priorities_and_the_latency_goal_put_short_work_first(engine: Any) -> None:
    renew(engine, "latency", policy="priority")
    dice = random.Random(4)
    order: list[str] = []
    for index in range(24):
        tokens = [dice.randrange(1000, 40000) for _ in range(20)]
        add(engine, f"d{index}", tokens, max_tokens=24 if index % 2 else 1, priority=index % 3 // 2)
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert sorted(order) == sorted(f"d{index}" for index in range(24))
    numbers = [int(name[1:]) for name in order]
    urgent = [numbers.index(index) for index in range(24) if index % 3 < 2]
    later = [numbers.index(index) for index in range(24) if index % 3 == 2]
    assert sum(urgent) / len(urgent) < sum(later) / len(later)
    short = [numbers.index(index) for index in range(0, 24, 2) if index % 3 < 2]
    long = [numbers.index(index) for index in range(1, 24, 2) if index % 3 < 2]
    assert max(short) < min(long)


@pytest.mark.parametrize("name", ["QUEUE_METHODS", "ATTRIBUTES"])
def test_an_interface_that_changed_leaves_vllms_own_order_with_one_warning(
    engine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a real engine: a queue that asks for a method we do not have, or a scheduler without an attribute we read."""
    import plait.vllm

    told: list[str] = []
    monkeypatch.setattr(plait.vllm.log, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(plait.vllm, name, frozenset({*getattr(plait.vllm, name), "no_such_name"}))
    scheduler = renew(engine, "latency")
    assert len(told) == 1 and "no_such_name" in told[0]
    assert type(scheduler.waiting).__name__ == "FCFSRequestQueue"
    for index in range(6):
        add(engine, f"e{index}", [1000 + index] * 20, max_tokens=1 + index % 3)
    assert len(run(engine)) == 6 and len(told) == 1


@pytest.mark.parametrize("own", [{"goal": "speed"}, {"policy": "blnd"}, {"prefill_tokens": -1}])
def test_settings_that_cannot_work_are_refused_at_the_start(own: dict[str, Any]) -> None:
    import plait.vllm

    with pytest.raises(ValueError, match="plait: "):
        plait.vllm.chosen(SimpleNamespace(additional_config={"plait": own}))
