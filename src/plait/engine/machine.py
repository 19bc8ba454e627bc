"""Settings of the embedded engine and their defaults, found from the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from plait.engine.models import LocalModel
from plait.engine.shadow import BLOCK_TOKENS
from plait.errors import UsageError

GIB = 1 << 30
KV_SHARE = 0.25
"""Of the available memory, for the KV cache."""
KV_MAX_BYTES = 2 * GIB
MAX_NUM_SEQS = 256
"""32 take up to a quarter longer than 64; more cost nothing (docs/embedded.md), so the KV cache decides."""
MAX_BATCHED_TOKENS = 512
"""Prefill takes 1.3 times the CPU seconds in steps of 256 tokens; beyond 512 nothing is gained (docs/embedded.md)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a user can say about the embedded engine; None: found from the machine."""

    kv_tokens: int | None = None
    kv_gib: float | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    threads: int | None = None
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings in the engine's own units, all known."""

    kv_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    threads: int
    prefix_caching: bool


def resolve(settings: EngineSettings, model: LocalModel) -> Limits:
    """Fill in defaults. Raises UsageError for the first setting that cannot work."""
    for name in ("kv_tokens", "kv_gib", "max_num_seqs", "max_batched_tokens", "threads"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise UsageError(f"{name} is {value}; a number > 0 is needed")
    if settings.kv_tokens is not None and settings.kv_gib is not None:
        raise UsageError("kv_tokens and kv_gib both set the size of the KV cache; give one")
    if settings.kv_tokens is not None:
        kv_tokens = settings.kv_tokens
    else:
        kv_bytes = (
            settings.kv_gib * GIB if settings.kv_gib is not None else min(KV_SHARE * available_bytes(), KV_MAX_BYTES)
        )
        kv_tokens = int(kv_bytes) // model.kv_bytes_per_token
    if kv_tokens < 2 * BLOCK_TOKENS:
        raise UsageError(f"a KV cache of {kv_tokens} tokens is too small; at least {2 * BLOCK_TOKENS} are needed")
    return Limits(
        kv_blocks=kv_tokens // BLOCK_TOKENS,
        max_num_seqs=settings.max_num_seqs or MAX_NUM_SEQS,
        max_batched_tokens=settings.max_batched_tokens or MAX_BATCHED_TOKENS,
        threads=settings.threads or usable_cores(),
        prefix_caching=settings.prefix_caching,
    )


def available_bytes() -> int:
    """Memory that can be had without swapping: the kernel's estimate, less where a cgroup allows less."""
    free = int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(limit_file).strip(), _read(used_file).strip()
        if limit.isdigit() and used.isdigit():
            free = min(free, max(int(limit) - int(used), 0))
    return free


def usable_cores() -> int:
    """Physical cores this process may use: its affinity, counted once per core, less where a cgroup allows less."""
    cpus = os.sched_getaffinity(0)
    siblings = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    cores = max(1, len(siblings))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def has_amx() -> bool:
    """Whether the processor has matrix units that the engine uses; False where the system does not say."""
    return " amx_tile" in _read("/proc/cpuinfo")


def _read(path: str) -> str:
    """A kernel file's text; empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
