"""vLLM alone against vLLM with our scheduler plug-in: the same requests, sent in the same random order.

    PLAIT_VLLM_MODEL=DIR python benchmarks/vllm_plugin.py       in the environment that has vLLM (CPU wheel is enough)

Sharing: 12 prefix groups x 8 in a KV cache that holds about a third of them, against vLLM's default given the same
requests sorted, which is depth-first. Latency: an overloaded mix of long and short answers. Each engine lives in a
process of its own; all first passes are discarded, then passes alternate between the engines. Prints medians and
ratios; JSON goes to out/vllm-plugin.json.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GROUPS, EACH = 12, 8
PREFIX_TOKENS, OWN_TOKENS = 320, 16
LATE = 64
PASSES = 2
ENGINES = {
    "default": None,
    "throughput": {"scheduler_cls": "plait.vllm.Scheduler", "additional_config": {"plait": {"goal": "throughput"}}},
    "latency": {"scheduler_cls": "plait.vllm.Scheduler", "additional_config": {"plait": {"goal": "latency"}}},
}
PLAN = [("default", "sharing"), ("throughput", "sharing"), ("default", "late"), ("latency", "late")]
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


def late_mix(seed: int) -> list[Request]:
    """Shuffled requests without sharing: three of four answer with 2 tokens, one with 64."""
    dice = random.Random(seed)
    lengths = [2, 2, 2, 64] * (LATE // 4)
    dice.shuffle(lengths)
    return [([dice.randrange(1000, 40000) for _ in range(24)], length) for length in lengths]


def mix(name: str, seed: int) -> list[Request]:
    """``sharing``, ``sorted`` (the same, depth-first) or ``late``."""
    if name == "late":
        return late_mix(seed)
    return sorted(sharing_mix(seed)) if name == "sorted" else sharing_mix(seed)


def serve(name: str) -> None:
    """One engine: a pass for each line of standard input (mix, seed, requests at most)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    own: dict[str, Any] = ENGINES[name] or {}
    arguments = EngineArgs(
        model=os.environ["PLAIT_VLLM_MODEL"],
        max_model_len=512,
        num_gpu_blocks_override=20,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.2,
        dtype="float32",  # not every CPU has fast bfloat16
        **own,
    )
    engine = LLMEngine.from_engine_args(arguments)
    for line in sys.stdin:
        kind, seed, most = line.split()
        engine.reset_prefix_cache()
        print("RESULT " + json.dumps(once(engine, mix(kind, int(seed))[: int(most)])), flush=True)


def once(engine: Any, requests: list[Request]) -> dict[str, float]:
    """All requests at once: cached prompt tokens, time, mean completion time."""
    import vllm

    start_s = time.perf_counter()
    for index, (tokens, max_tokens) in enumerate(requests):
        parameters = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"{start_s} {index}", {"prompt_token_ids": tokens}, parameters)
    ends_s: list[float] = []
    cached = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends_s.append(time.perf_counter() - start_s)
                cached += output.num_cached_tokens or 0
    assert len(ends_s) == len(requests)
    return {"cached": cached, "time_s": max(ends_s), "mean_s": sum(ends_s) / len(ends_s)}


class Contestant:
    """An engine's process."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, kind: str, seed: int, most: int = 1 << 30) -> dict[str, float]:
        """One pass."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{kind} {seed} {most}\n")
        self._process.stdin.flush()
        line = next(line for line in self._process.stdout if line.startswith("RESULT "))
        found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
        return found

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def main() -> None:
    """Warm up, alternate, compare."""
    if len(sys.argv) == 2:
        serve(sys.argv[1])
        return
    engines = {}
    for name in ENGINES:
        engines[name] = Contestant(name)
        engines[name].run("sharing", 0, 16)  # discarded
        engines[name].run("late", 0)
    runs: dict[str, list[dict[str, float]]] = {}
    for turn in range(1, PASSES + 1):
        for name, kind in PLAN:
            runs.setdefault(f"{name} {kind}", []).append(engines[name].run(kind, turn))
            print(f"{name} {kind}", runs[f"{name} {kind}"][-1], flush=True)
    runs["default sorted"] = [engines["default"].run("sorted", turn) for turn in (1,)]
    print("default sorted", runs["default sorted"][-1], flush=True)
    for engine in engines.values():
        engine.close()

    def median(run: str, figure: str) -> float:
        return statistics.median(found[figure] for found in runs[run])

    depth_first = median("default sorted", "cached")
    result = {
        "cached_share_of_depth_first": median("throughput sharing", "cached") / depth_first,
        "default_cached_share_of_depth_first": median("default sharing", "cached") / depth_first,
        "time_ratio": median("throughput sharing", "time_s") / median("default sharing", "time_s"),
        "mean_latency_ratio": median("latency late", "mean_s") / median("default late", "mean_s"),
    }
    print(json.dumps(result, indent=1))
    Path("out").mkdir(exist_ok=True)
    Path("out/vllm-plugin.json").write_text(json.dumps(result | {"runs": runs}, indent=1))


if __name__ == "__main__":
    main()
