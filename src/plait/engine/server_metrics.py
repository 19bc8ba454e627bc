"""What a server says about itself: Prometheus metrics, /v1/models, and the info pages of llama.cpp, SGLang and TGI.

Metric names as the servers' own manuals give them: vLLM (usage/metrics), SGLang (references/production_metrics),
llama.cpp (tools/server/README), TGI (reference/metrics).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "tokens": ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        "preemptions": ("vllm:num_preemptions_total",),
    },
    "sglang": {
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
        "tokens": ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
        "preemptions": ("sglang:num_retracted_reqs",),
    },
    "llama.cpp": {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_usage": ("llamacpp:kv_cache_usage_ratio",),
        "tokens": ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
        "preemptions": (),
    },
    "tgi": {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "kv_usage": (),
        "tokens": ("tgi_request_generated_tokens_sum", "tgi_request_input_length_sum"),
        "preemptions": (),
    },
}
"""Kind of server -> quantity -> names. ``tokens`` are summed; of the others the first that exists counts."""

SHARES_WITHIN_A_BATCH = frozenset({"vllm"})
"""Servers whose requests share a prefix even when they start together."""


@dataclass(frozen=True, slots=True)
class Load:
    """One reading of a server's metrics."""

    kind: str
    running: float
    waiting: float
    kv_usage: float
    tokens: float
    """Tokens processed since the server started: rises while anything moves."""
    preemptions: float


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is known about a server before the first request; zeros where it did not say."""

    kind: str = ""
    models: tuple[str, ...] = ()
    max_context_tokens: int = 0
    kv_tokens: int = 0
    block_tokens: int = 0
    max_num_seqs: int = 0

    @property
    def slot_caches(self) -> int:
        """Slots that each cache what they ran last, and share nothing; 0: one cache for all."""
        return self.max_num_seqs if self.kind == "llama.cpp" else 0

    @property
    def shares_within_a_batch(self) -> bool:
        """True if a prefix need not be primed."""
        return self.kind in SHARES_WITHIN_A_BATCH


Samples = dict[str, tuple[float, str]]


def parse_metrics(text: str) -> Samples:
    """Prometheus text -> name -> (sum over label sets, labels of the last one). Histogram buckets are left out."""
    found: Samples = {}
    for line in text.splitlines():
        if not line or line[0] == "#" or "_bucket{" in line:
            continue
        name, brace, rest = line.partition("{")
        labels, _, value = rest.rpartition("}") if brace else ("", "", "")
        if not brace:
            name, _, value = line.partition(" ")
        try:
            number = float(value.split()[0])
        except (ValueError, IndexError):
            continue
        if number == number:  # NaN: no data yet
            found[name] = (found.get(name, (0.0, ""))[0] + number, labels)
    return found


def read_load(samples: Samples) -> Load | None:
    """The load of any known kind of server, or None."""
    for kind, names in NAMES.items():
        if not any(name in samples for name in names["running"]):
            continue

        def value(quantity: str, names: Mapping[str, tuple[str, ...]] = names) -> float:
            return next((samples[name][0] for name in names[quantity] if name in samples), 0.0)

        tokens = sum(samples[name][0] for name in names["tokens"] if name in samples)
        return Load(kind, value("running"), value("waiting"), value("kv_usage"), tokens, value("preemptions"))
    return None


def with_metrics(info: ServerInfo, samples: Samples) -> ServerInfo:
    """Add what metrics say: the kind of server, vLLM's KV blocks, SGLang's token pool."""
    load = read_load(samples)
    if load is None:
        return info
    info = replace(info, kind=load.kind)
    if "vllm:cache_config_info" in samples:
        engines, labels = samples["vllm:cache_config_info"]
        block, blocks = _label(labels, "block_size"), _label(labels, "num_gpu_blocks")
        return replace(info, block_tokens=block, kv_tokens=int(engines) * block * blocks)
    if "sglang:max_total_num_tokens" in samples:
        return replace(info, kv_tokens=int(samples["sglang:max_total_num_tokens"][0]), block_tokens=1)
    return info


def with_models(info: ServerInfo, page: Mapping[str, Any]) -> ServerInfo:
    """Add what GET /v1/models says."""
    entries = [entry for entry in page.get("data") or () if isinstance(entry, dict)]
    contexts = [
        _whole(entry.get("max_model_len")) or _whole((entry.get("meta") or {}).get("n_ctx")) for entry in entries
    ]
    names = tuple(str(entry["id"]) for entry in entries if "id" in entry)
    return replace(
        info, models=names, max_context_tokens=min((c for c in contexts if c), default=info.max_context_tokens)
    )


def with_props(info: ServerInfo, page: Mapping[str, Any]) -> ServerInfo:
    """Add llama.cpp's GET /props: slots and context per slot. A slot keeps the KV of its last request, and a request
    reuses what its slot holds. Whether the slots share one context (``kv_unified``) or have one each is not told: what
    is sure to be there is one."""
    slots = _whole(page.get("total_slots"))
    context = _whole((page.get("default_generation_settings") or {}).get("n_ctx"))
    if not slots or not context:
        return info
    return replace(
        info,
        kind="llama.cpp",
        max_num_seqs=slots,
        max_context_tokens=context,
        kv_tokens=info.kv_tokens or context,
        block_tokens=1,
    )


def with_server_info(info: ServerInfo, page: Mapping[str, Any]) -> ServerInfo:
    """Add SGLang's GET /get_server_info or TGI's GET /info."""
    pool = _whole(page.get("max_total_num_tokens")) or _whole(page.get("max_batch_total_tokens"))
    if not pool:
        return info
    return replace(
        info,
        kv_tokens=info.kv_tokens or pool,
        block_tokens=_whole(page.get("page_size")) or 1,
        max_num_seqs=_whole(page.get("max_running_requests")) or _whole(page.get("max_batch_size")),
        max_context_tokens=info.max_context_tokens or _whole(page.get("max_total_tokens")),
    )


def _label(labels: str, name: str) -> int:
    """A whole-number label, 0 if absent or not a number."""
    _, _, rest = f",{labels}".partition(f',{name}="')
    return _whole(rest.partition('"')[0])


def _whole(value: object) -> int:
    """A positive whole number, or 0."""
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
