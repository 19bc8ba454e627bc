"""Pretend inference servers for ``LoopbackServer``: one with a block prefix cache, one like llama.cpp with slots.

Tokens are bytes / 4 of the prompt, times follow from what is computed. In the former, a request takes the first free
slot; what it computes is its prompt less the blocks cached when it starts; blocks are cached when its prefill ends.
Its metrics carry vLLM's names.
"""

from __future__ import annotations

import heapq
import json
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


@dataclass
class PretendSlots:
    """A behaviour like llama.cpp's: a request takes the free slot whose last prompt begins most like its own, or waits
    for the first one that gets free, and reuses what that slot holds. Slots share nothing."""

    slots: int = 4
    context_tokens: int = 8192
    prefill_s_per_token: float = 0.0
    decode_s_per_token: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens asked for so far."""
    cached_tokens: int = 0
    """Of these, reused."""
    output_tokens: int = 0
    _held: list[tuple[float, bytes]] = field(default_factory=list)  # per slot: when it is free, and its last prompt
    _spans: list[tuple[float, float]] = field(default_factory=list)  # start and end of each request

    def __call__(self, call: Call) -> Reply:
        """Answer one request."""
        if call.method == "GET":
            return self._page(call)
        self._held = self._held or [(0.0, b"")] * self.slots
        prompt = call.prompt.encode()
        tokens, wanted = max(len(prompt) // BYTES_PER_TOKEN, 1), int(call.body.get("max_tokens", 1))
        slot = self._slot(prompt, call.t_s)
        free_s, last = self._held[slot]
        start_s = max(call.t_s, free_s)
        cached = min(_common(prompt, last) // BYTES_PER_TOKEN, tokens - 1)
        end_s = start_s + (tokens - cached) * self.prefill_s_per_token + wanted * self.decode_s_per_token
        self._held[slot] = (end_s, prompt)
        self._spans.append((start_s, end_s))
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.output_tokens += wanted
        return answer(call, call.prompt, cached, wanted, end_s - call.t_s)

    def _slot(self, prompt: bytes, now_s: float) -> int:
        free = [slot for slot, (free_s, _) in enumerate(self._held) if free_s <= now_s]
        if not free:
            return min(range(self.slots), key=lambda slot: self._held[slot][0])
        best = max(free, key=lambda slot: _common(prompt, self._held[slot][1]))
        if _common(prompt, self._held[best][1]) > 0.1 * len(prompt):
            return best
        return min(free, key=lambda slot: self._held[slot][0])

    def _page(self, call: Call) -> Reply:
        if call.path.endswith("/models"):
            return models(max_model_len=self.context_tokens)
        if call.path == "/props":
            page = {"total_slots": self.slots, "default_generation_settings": {"n_ctx": self.context_tokens}}
            return Reply(body=json.dumps(page).encode())
        if call.path != "/metrics":
            return error(404, f"no route {call.path}")
        self._spans = [span for span in self._spans if span[1] > call.t_s]
        running = sum(start_s <= call.t_s for start_s, _ in self._spans)
        lines = [
            f"llamacpp:requests_processing {running}",
            f"llamacpp:requests_deferred {len(self._spans) - running}",
            f"llamacpp:prompt_tokens_total {self.prompt_tokens - self.cached_tokens}",
            f"llamacpp:tokens_predicted_total {self.output_tokens}",
        ]
        return Reply(body="\n".join(lines).encode(), content_type="text/plain; version=0.0.4")


def _common(a: bytes, b: bytes) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
