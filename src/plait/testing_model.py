"""A pretend inference server for ``LoopbackServer``: slots, a block prefix cache, times that follow from both, metrics.

Tokens are bytes / 4 of the prompt. A request takes the first free slot; what it computes is its prompt less the blocks
cached when it starts; blocks are cached when its prefill ends. Metrics carry vLLM's names.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from plait.testing_server import Call, Reply, answer, error, models

BYTES_PER_TOKEN = 4


@dataclass
class PretendModel:
    """A behaviour: pass an instance to ``LoopbackServer``."""

    slots: int = 4
    kv_blocks: int = 1024
    block_tokens: int = 16
    prefill_s_per_token: float = 0.0
    decode_s_per_token: float = 0.0
    with_metrics: bool = True
    prompt_tokens: int = 0
    """Prompt tokens asked for so far."""
    cached_tokens: int = 0
    """Of these, reused."""
    output_tokens: int = 0
    _free_s: list[float] = field(default_factory=list)
    _cache: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # block -> when its prefill ends
    _spans: list[tuple[float, float]] = field(default_factory=list)  # start and end of each request

    def __call__(self, call: Call) -> Reply:
        """Answer one request."""
        if call.method == "GET":
            return self._page(call)
        prompt = call.prompt.encode()
        tokens = max(len(prompt) // BYTES_PER_TOKEN, 1)
        wanted = int(call.body.get("max_tokens", 1))
        start_s = call.t_s
        if len(self._free_s) >= self.slots:
            start_s = max(start_s, heapq.heappop(self._free_s))
        cached = self._lookup(prompt, start_s)
        prefill_s = (tokens - cached) * self.prefill_s_per_token
        end_s = start_s + prefill_s + wanted * self.decode_s_per_token
        heapq.heappush(self._free_s, end_s)
        self._store(prompt, start_s + prefill_s)
        self._spans.append((start_s, end_s))
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.output_tokens += wanted
        return answer(call, call.prompt, cached, wanted, end_s - call.t_s)

    def _blocks(self, prompt: bytes) -> list[bytes]:
        size = self.block_tokens * BYTES_PER_TOKEN
        return [prompt[:end] for end in range(size, len(prompt) + 1, size)]

    def _lookup(self, prompt: bytes, now_s: float) -> int:
        hits = 0
        for block in self._blocks(prompt):
            if self._cache.get(block, now_s + 1) > now_s:
                break
            self._cache.move_to_end(block)
            hits += 1
        return hits * self.block_tokens

    def _store(self, prompt: bytes, when_s: float) -> None:
        for block in self._blocks(prompt):
            self._cache.setdefault(block, when_s)
            self._cache.move_to_end(block)
        while len(self._cache) > self.kv_blocks:
            self._cache.popitem(last=False)

    def _page(self, call: Call) -> Reply:
        if call.path.endswith("/models"):
            return models()
        if not (call.path == "/metrics" and self.with_metrics):
            return error(404, f"no route {call.path}")
        self._spans = [span for span in self._spans if span[1] > call.t_s]
        running = sum(start_s <= call.t_s for start_s, _ in self._spans)
        label = '{engine="0",model_name="echo"}'
        config = f'block_size="{self.block_tokens}",num_gpu_blocks="{self.kv_blocks}"'
        lines = [
            f"vllm:num_requests_running{label} {running}",
            f"vllm:num_requests_waiting{label} {len(self._spans) - running}",
            f"vllm:kv_cache_usage_perc{label} {len(self._cache) / self.kv_blocks}",
            f"vllm:prompt_tokens_total{label} {self.prompt_tokens}",
            f"vllm:generation_tokens_total{label} {self.output_tokens}",
            f"vllm:prefix_cache_queries_total{label} {self.prompt_tokens}",
            f"vllm:prefix_cache_hits_total{label} {self.cached_tokens}",
            f'vllm:cache_config_info{{engine="0",{config}}} 1.0',
        ]
        return Reply(body="\n".join(lines).encode(), content_type="text/plain; version=0.0.4")
