"""Share of answers of the embedded engine that stay the same when only the order or the company changes.

    python benchmarks/determinism.py [--requests 48] [--in-flight 16] [--seed 1]

The BBH, GSM8K and MMLU prompts of ../shared/data/prompts, greedy and then sampled with a seed of their own, each set
run in a fresh engine: one after the other (twice), and with several in flight in file order and in two shuffled orders.
Answers are compared by text. JSON goes to out/determinism.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedded import prefix_rich
from plait.engine.machine import EngineSettings
from plait.engine.models import find_model
from plait.engine.openvino import OpenVinoEngine
from plait.events import EngineRequest, Failed, Finished, Preempted


def run(bodies: Sequence[dict[str, Any]], order: Sequence[int], in_flight: int, kv_tokens: int) -> list[str]:
    """Text of each answer, with at most ``in_flight`` requests in a fresh engine at once."""
    engine = OpenVinoEngine(find_model(), EngineSettings(kv_tokens=kv_tokens))
    texts: dict[int, str] = {}
    waiting, flying = list(reversed(order)), set[int]()
    try:
        while len(texts) < len(order):
            new = [waiting.pop() for _ in range(min(len(waiting), in_flight - len(flying)))]
            flying.update(new)
            engine.submit([_request(row, bodies[row]) for row in new])
            for event in engine.poll(1.0):
                if isinstance(event, Failed):
                    raise SystemExit(f"request {event.row}: {event.message}")
                if isinstance(event, Finished):
                    texts[event.row] = json.loads(event.body)["choices"][0]["text"]
                    flying.discard(event.row)
                elif isinstance(event, Preempted) and event.requeue:
                    waiting.append(event.row)
                    flying.discard(event.row)
    finally:
        engine.close()
    return [texts[row] for row in range(len(bodies))]


def _request(row: int, body: dict[str, Any]) -> EngineRequest:
    return EngineRequest(row, "/v1/completions", body, None, body["max_tokens"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--max-output", type=int, default=32)
    parser.add_argument("--kv-tokens", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    bodies = prefix_rich(options.requests, options.max_output, rng)
    file_order = list(range(len(bodies)))
    shuffled = [rng.permutation(len(bodies)).tolist() for _ in range(2)]
    print(
        f"{options.requests} requests, {options.in_flight} in flight, outputs <= {options.max_output}, "
        f"seed {options.seed}; answers equal to those one after the other:"
    )
    found: dict[str, dict[str, float]] = {}
    for kind in ("greedy", "seeded"):
        asked = [body if kind == "greedy" else {**body, "temperature": 1.0, "seed": i} for i, body in enumerate(bodies)]
        alone = run(asked, file_order, 1, options.kv_tokens)
        others = {"alone again": run(asked, file_order, 1, options.kv_tokens)}
        for name, order in zip(("file order", "shuffled 1", "shuffled 2"), (file_order, *shuffled), strict=True):
            others[name] = run(asked, order, options.in_flight, options.kv_tokens)
        shares = {name: float(np.mean([a == b for a, b in zip(alone, texts, strict=True)]))
                  for name, texts in others.items()}  # fmt: skip
        shares["all the same"] = float(
            np.mean([len(set(texts)) == 1 for texts in zip(alone, *others.values(), strict=True)])
        )
        found[kind] = shares
        print(f"{kind}: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), flush=True)
    out = Path("out")
    out.mkdir(exist_ok=True)
    (out / "determinism.json").write_text(json.dumps({"options": vars(options), "shares": found}, indent=1))


if __name__ == "__main__":
    main()
