"""Arrays from addresses, inside compiled code."""

from __future__ import annotations

from typing import Any

from numba import carray, types
from numba.extending import intrinsic

__all__ = ["carray", "pointer"]


@intrinsic  # type: ignore[misc, untyped-decorator, unused-ignore]
def pointer(typing_context: Any, address: Any) -> Any:
    """The ``void*`` at an int64 address, for ``carray``. The caller keeps the memory alive."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate
