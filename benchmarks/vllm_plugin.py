"""vLLM alone against vLLM with our scheduler plug-in, the same requests in the same random order.

    PLAIT_VLLM_MODEL=DIR python benchmarks/vllm_plugin.py       in the environment that has vLLM (CPU wheel is enough)

Sharing: 12 prefix groups x 8, a KV cache that holds a few of them. Latency: an overloaded mix of long and short ones.
Each engine lives in its own process; its first pass is discarded. Prints ratios; JSON goes to out/vllm-plugin.json.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GROUPS, EACH = 12, 8
PREFIX_TOKENS, OWN_TOKENS, BLOCK_TOKENS = 320, 16, 128
Request = tuple[list[int], int]


def sharing_mix(seed: int) -> list[Request]:
    """Shuffled requests of prefix groups, two output tokens each."""
    dice = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [dice.randrange(1000, 40000) for _ in range(n)]

    openings = [tokens(PREFIX_TOKENS) for _ in range(GROUPS)]
    requests = [(opening + tokens(OWN_TOKENS), 2) for opening in openings for _ in range(EACH)]
    dice.shuffle(requests)
    return requests


def latency_mix(seed: int) -> list[Request]:
    """Shuffled requests without sharing: three of four answer with 2 tokens, one with 64."""
    dice = random.Random(seed)
    return [([dice.randrange(1000, 40000) for _ in range(24)], dice.choice([2, 2, 2, 64])) for _ in range(64)]


def serve(scheduler: str, goal: str) -> dict[str, float]:
    """Run both mixes on one engine."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    own: dict[str, Any] = {}
    if scheduler != "default":
        own = {"scheduler_cls": scheduler, "additional_config": {"plait": {"goal": goal}}}
    arguments = EngineArgs(
        model=os.environ["PLAIT_VLLM_MODEL"],
        max_model_len=512,
        num_gpu_blocks_override=20,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        **own,
    )
    engine = LLMEngine.from_engine_args(arguments)
    once(engine, sharing_mix(0)[:16], "warm")
    engine.reset_prefix_cache()
    shared = once(engine, sharing_mix(1), "s")
    engine.reset_prefix_cache()
    late = once(engine, latency_mix(1), "l")
    return {"cached": shared["cached"], "time_s": shared["time_s"], "mean_s": late["mean_s"]}


def once(engine: Any, requests: list[Request], name: str) -> dict[str, float]:
    """All requests at once: cached prompt tokens, time, mean completion time."""
    import vllm

    start_s = time.perf_counter()
    for index, (tokens, max_tokens) in enumerate(requests):
        parameters = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"{name}{index}", {"prompt_token_ids": tokens}, parameters)
    ends_s: list[float] = []
    cached = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends_s.append(time.perf_counter() - start_s)
                cached += output.num_cached_tokens or 0
    return {"cached": cached, "time_s": max(ends_s), "mean_s": sum(ends_s) / len(ends_s)}


def main() -> None:
    """One process a contestant."""
    if len(sys.argv) == 3:
        print("RESULT " + json.dumps(serve(sys.argv[1], sys.argv[2])))
        return
    found: dict[str, dict[str, float]] = {}
    for name, scheduler, goal in (
        ("default", "default", "-"),
        ("throughput", "plait.vllm.Scheduler", "throughput"),
        ("latency", "plait.vllm.Scheduler", "latency"),
    ):
        done = subprocess.run([sys.executable, __file__, scheduler, goal], capture_output=True, text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        found[name] = json.loads(line.removeprefix("RESULT "))
        print(name, found[name], flush=True)
    most = PREFIX_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS * GROUPS * (EACH - 1)
    result = {
        "cached_share_of_depth_first": found["throughput"]["cached"] / most,
        "default_cached_share_of_depth_first": found["default"]["cached"] / most,
        "time_ratio": found["throughput"]["time_s"] / found["default"]["time_s"],
        "mean_latency_ratio": found["latency"]["mean_s"] / found["default"]["mean_s"],
    }
    print(json.dumps(result, indent=1))
    Path("out").mkdir(exist_ok=True)
    Path("out/vllm-plugin.json").write_text(json.dumps(result | {"runs": found}, indent=1))


if __name__ == "__main__":
    main()
