"""Devices and models by name: the figures that every cost, step time and memory size is derived from.

A model row is its Hugging Face ``config.json`` reduced to the keys that matter, so a row by name and a config from disk
go through the same arithmetic. The source of every figure is listed in ``docs/hardware.md``.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.errors import CapacityError, InputError, UsageError
from plait.model.rows import DEVICES, MODEL_CONFIGS, Device

DTYPE_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "u8": 1.0,
    "q8_0": 34 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "int4": 0.5,
}
"""Bytes a value. q*: GGUF blocks of 32 values with their scales."""

_NOT_GATED = {"phi", "gpt2", "gpt_neox", "opt", "falcon", "bloom", "gptj", "starcoder2"}
"""``model_type`` of families whose MLP has two matrices instead of three."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the cost of a model depends on. Sizes are counts of values, not bytes."""

    name: str
    params: float
    """All weights, embeddings included (P of the paper's equations for a dense model)."""
    active_params: float
    """Weights that one token is multiplied with: fewer than ``params`` for a mixture of experts."""
    layers: int
    hidden: int
    attention_width: float
    """heads x head_dim (MLA: heads x mean of key and value widths): the H of prefill attention."""
    kv_values: int
    """KV values a token and layer: 2 x kv_heads x head_dim, or the latent width for MLA."""
    kv_shards: int
    """Ways tensor parallelism can split the KV cache: its KV heads; 1 for MLA, whose latent every rank keeps."""
    layer_params: float
    """Weights in the matrix products of one layer that a token is multiplied with (no embeddings, no LM head)."""
    embedding_params: float
    """Weights outside the layers: input embedding and LM head, once where they are tied."""
    head_params: float
    """Weights of the LM head, which only sampled tokens meet."""
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0


def device(name: str) -> Device:
    """Device row by (partial, loosely spelled) name. Raises UsageError with the nearest names."""
    return DEVICES[_find(name, DEVICES, "device")]


def model(name: str | Path | Mapping[str, Any], weights: str = "bf16", kv: str | None = None) -> Model:
    """Model by row name, by path of an HF ``config.json`` (or the folder that holds it), or from a parsed config.

    ``weights``, ``kv``: data types (keys of DTYPE_BYTES); KV is kept in 16 bits unless said otherwise. Raises
    UsageError for an unknown name or type, InputError for a config that lacks something.
    """
    found = _model(name)
    return replace(found, weight_bytes=_dtype_bytes(weights), kv_bytes=_dtype_bytes(kv or "bf16"))


def _model(name: str | Path | Mapping[str, Any]) -> Model:
    if isinstance(name, Mapping):
        return model_from_config(name, "config")
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return _model_from_file(path / "config.json" if path.is_dir() else path)
    row = _find(str(name), MODEL_CONFIGS, "model", " or give the path of an HF config.json")
    return model_from_config(MODEL_CONFIGS[row], row)


def peak_flops(device: Device, model: Model) -> float:
    """FLOP/s at the precision of the weights: 8-bit weights use 8-bit units where the device has them."""
    return device.flops_8bit if model.weight_bytes == 1.0 and device.flops_8bit > 0 else device.flops


def kv_bytes_per_token(model: Model) -> float:
    """Bytes of KV cache one token takes, summed over layers, on one unsplit copy (H_kv · L · 4 at 16 bits)."""
    return model.kv_values * model.layers * model.kv_bytes


def kv_bytes_per_token_and_rank(model: Model, tp: int) -> float:
    """Bytes of KV one token takes on each of ``tp`` ranks: KV heads are split as far as they go, then copied."""
    return kv_bytes_per_token(model) / min(tp, model.kv_shards)


def kv_tokens_that_fit(device: Device, model: Model, tp: int = 1, utilisation: float = 0.9) -> int:
    """KV tokens beside the weights in ``utilisation`` of the memory of each of ``tp`` devices.

    Raises CapacityError if the weights alone do not fit.
    """
    if not (0 < utilisation <= 1 and tp >= 1):
        raise UsageError(f"utilisation is {utilisation} and tp is {tp}; a share in (0, 1] and a count >= 1 are needed")
    room = device.memory_bytes * utilisation - model.params * model.weight_bytes / tp
    tokens = math.floor(room / kv_bytes_per_token_and_rank(model, tp))
    if tokens < 1:
        raise CapacityError(
            f"{model.name} needs {model.params * model.weight_bytes / tp / 2**30:.1f} GiB of weights on each of {tp} x "
            f"{device.name}, which has {device.memory_bytes * utilisation / 2**30:.1f} GiB to give: "
            "use a higher TP degree, smaller weights (fp8, int4) or a larger device"
        )
    return tokens


def model_from_config(config: Mapping[str, Any], name: str) -> Model:
    """Count the weights of an HF config. Raises InputError naming ``name`` and the missing or wrong key."""
    config = config.get("text_config", config)
    get = _Reader(config, name)
    hidden, layers, heads = get.whole("hidden_size"), get.whole("num_hidden_layers"), get.whole("num_attention_heads")
    if "kv_lora_rank" in config:
        attention, width, kv_values, shards = _latent_attention(get, hidden, heads)
    else:
        kv_heads = get.whole("num_key_value_heads", heads)
        head_dim = get.whole("head_dim", hidden // heads)
        attention = head_dim * hidden * (2 * heads + 2 * kv_heads)
        width, kv_values, shards = float(heads * head_dim), 2 * kv_heads * head_dim, kv_heads
    mlp_all, mlp_active = _mlp(get, hidden, layers)
    head = hidden * get.whole("vocab_size")
    embeddings = head if config.get("tie_word_embeddings") else 2 * head
    return Model(
        name=str(name),
        params=float(embeddings + layers * attention + mlp_all),
        active_params=float(embeddings + layers * attention + mlp_active),
        layers=layers,
        hidden=hidden,
        attention_width=width,
        kv_values=kv_values,
        kv_shards=shards,
        layer_params=attention + mlp_active / layers,
        embedding_params=float(embeddings),
        head_params=float(head),
    )


def _latent_attention(get: _Reader, hidden: int, heads: int) -> tuple[int, float, int, int]:
    """Multi-head latent attention (DeepSeek-V2/V3): weights a layer, attention width, KV values, shards."""
    latent, rope = get.whole("kv_lora_rank"), get.whole("qk_rope_head_dim")
    nope, value = get.whole("qk_nope_head_dim"), get.whole("v_head_dim")
    queries = heads * (nope + rope)
    query_rank = get.whole("q_lora_rank", 0)
    weights = query_rank * (hidden + queries) if query_rank else hidden * queries
    weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return weights, heads * (nope + rope + value) / 2, latent + rope, 1


def _mlp(get: _Reader, hidden: int, layers: int) -> tuple[int, int]:
    """MLP weights of all layers: all of them, and those one token meets."""
    matrices = 2 if get.config.get("model_type") in _NOT_GATED else 3
    experts = get.whole("num_local_experts", get.whole("n_routed_experts", get.whole("num_experts", 0)))
    if not experts:
        dense = layers * matrices * hidden * get.whole("intermediate_size")
        return dense, dense
    width = get.whole("moe_intermediate_size", get.whole("intermediate_size", 0))
    expert = matrices * hidden * width
    shared = expert * get.whole("n_shared_experts", 0) + hidden * experts  # the router is met by every token
    dense_layers = min(get.whole("first_k_dense_replace", 0), layers)
    dense = dense_layers * matrices * hidden * get.whole("intermediate_size", width)
    sparse_layers = layers - dense_layers
    active = get.whole("num_experts_per_tok")
    return dense + sparse_layers * (experts * expert + shared), dense + sparse_layers * (active * expert + shared)


class _Reader:
    """Whole numbers of a config, with errors that say which key of which config is wrong."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default is None else 0):
            raise InputError(f"{self.name}: {key} is {value!r}; a whole number >= 1 is needed (an HF config.json)")
        return value


def _model_from_file(path: Path) -> Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give an HF config.json") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: a JSON object is needed, got {type(config).__name__}")
    return model_from_config(config, str(path))


def _dtype_bytes(name: str) -> float:
    if name.lower() not in DTYPE_BYTES:
        raise UsageError(f"unknown data type '{name}'; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name.lower()]


def _words(name: str) -> frozenset[str]:
    """``Meta-Llama-3.1-8B-Instruct`` -> {meta, llama, 3.1, 8, b, instruct}."""
    return frozenset(re.findall(r"[a-z]+|\d+(?:\.\d+)?", name.lower()))


def _find(name: str, rows: Mapping[str, Any], kind: str, hint: str = "") -> str:
    """The row whose words all occur in ``name`` (the one with most words, the first of equals)."""
    fits = [row for row in rows if _words(row) <= _words(name)]
    if fits:
        return max(fits, key=lambda row: len(_words(row)))
    near = difflib.get_close_matches(name.lower(), {row.lower() for row in rows}, n=1, cutoff=0.5)
    mean = next((f"; did you mean '{row}'?" for row in rows if near and row.lower() == near[0]), ";")
    raise UsageError(f"unknown {kind} '{name}'{mean} known: {', '.join(rows)}{hint}")
