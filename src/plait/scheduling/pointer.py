"""Arrays from addresses, inside compiled code."""

from __future__ import annotations

from typing import Any, cast

import numba
from numba import types
from numba.extending import intrinsic

carray: Any = cast(Any, numba).carray


def _pointer(typing_context: Any, address: Any) -> Any:
    """The ``void*`` at an int64 address, for ``carray``. The caller keeps the memory alive."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_pointer)
