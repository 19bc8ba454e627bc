"""Numba's ``njit`` with the settings used everywhere here, typed so that strict type checking sees through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def njit(function: F) -> F:
    """Compile in nopython mode on first call and keep the machine code on disk (``cache=True``)."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))
