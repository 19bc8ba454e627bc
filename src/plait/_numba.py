"""Numba's ``njit`` with the settings used everywhere here, typed so that strict type checking sees through it; memory
fetched ahead of its use.

Numba's own cache notices when a function's file changes, but not when a function that it calls does, and then goes on
running the old machine code; and two versions of Numba throw away each other's. So the cache lies in a folder of the
user's cache that is named after the state of all compiled sources and Numba's version: a change anywhere compiles anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.core.config
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_config: Any = numba.core.config
F = TypeVar("F", bound=Callable[..., Any])

KEPT_STATES = 8
"""Folders of earlier states of the sources that are kept, newest first: other checkouts may use them."""


def _cache_folder() -> str:
    """Where compiled code of this state of the sources belongs; makes room by removing the oldest other states. Empty
    (Numba's own choice) where the user's cache cannot be written."""
    root = Path(os.environ.get("PLAIT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "plait")
    package = Path(__file__).parent
    state = hashlib.blake2b(f"{package}\n{numba.__version__}".encode(), digest_size=8)
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        if b"njit" in text:
            state.update(text)
    folder = root.expanduser() / "numba" / state.hexdigest()
    if not folder.exists() and folder.parent.exists():
        others = sorted(folder.parent.iterdir(), key=lambda other: -other.stat().st_mtime)
        for old in others[KEPT_STATES:]:
            shutil.rmtree(old, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


_CACHE_FOLDER = _config.CACHE_DIR or _cache_folder()


def compiled_before() -> bool:
    """Whether anything that these sources compile to is in the cache: if not, a first plan takes about a minute."""
    return bool(_CACHE_FOLDER) and any(Path(_CACHE_FOLDER).rglob("*.nbc"))


def njit(function: F) -> F:
    """Compile in nopython mode on first call and keep the machine code on disk (``cache=True``)."""
    given = _config.CACHE_DIR
    _config.CACHE_DIR = _CACHE_FOLDER  # read while decorating; other users of Numba keep their own
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    finally:
        _config.CACHE_DIR = given


def _prefetch(typing_context: Any, address: Any) -> Any:
    """Bring the cache line at an int64 address near; a hint that never faults."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), (line, number, number, number))
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (line,), function)
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(fetch, (builder.inttoptr(arguments[0], line), read, keep, data))
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch: Any = intrinsic(_prefetch)
"""Jobs are larger than the caches and their order is not that of the rows: without it every row is waited for."""
