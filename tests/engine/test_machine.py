"""Settings of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.machine import GIB, KV_MAX_BYTES, EngineSettings, available_bytes, resolve, usable_cores
from plait.engine.models import LocalModel
from plait.engine.shadow import BLOCK_TOKENS
from plait.errors import UsageError

MODEL = LocalModel("m", Path("m.gguf"), context_tokens=2048, kv_bytes_per_token=13680)


def test_the_default_cache_fits_the_memory_that_is_free() -> None:
    limits = resolve(EngineSettings(), MODEL)
    kv_bytes = limits.kv_blocks * BLOCK_TOKENS * MODEL.kv_bytes_per_token
    assert 0 < kv_bytes <= min(KV_MAX_BYTES, available_bytes())
    assert limits.threads == usable_cores() >= 1


@given(st.integers(2 * BLOCK_TOKENS, 1 << 24))
def test_a_cache_in_tokens_is_never_rounded_up(kv_tokens: int) -> None:
    held = resolve(EngineSettings(kv_tokens=kv_tokens), MODEL).kv_blocks * BLOCK_TOKENS
    assert kv_tokens - BLOCK_TOKENS < held <= kv_tokens


@given(st.floats(0.01, 64))
def test_a_cache_in_gib_is_filled_to_the_last_block(kv_gib: float) -> None:
    held = resolve(EngineSettings(kv_gib=kv_gib), MODEL).kv_blocks * BLOCK_TOKENS * MODEL.kv_bytes_per_token
    assert kv_gib * GIB - (BLOCK_TOKENS + 1) * MODEL.kv_bytes_per_token < held <= kv_gib * GIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"kv_gib": -1.0}, "kv_gib is -1"),
        ({"threads": -2}, "threads is -2"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_batched_tokens": 0}, "max_batched_tokens is 0"),
        ({"kv_tokens": 64, "kv_gib": 1.0}, "give one"),
        ({"kv_tokens": 63}, "too small; at least 64"),
        ({"kv_gib": 1e-6}, "too small; at least 64"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(EngineSettings(**settings), MODEL)
