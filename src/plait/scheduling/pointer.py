"""Arrays from addresses, and memory fetched ahead of its use, inside compiled code."""

from __future__ import annotations

from typing import Any, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

carray: Any = cast(Any, numba).carray


def _pointer(typing_context: Any, address: Any) -> Any:
    """The ``void*`` at an int64 address, for ``carray``. The caller keeps the memory alive."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_pointer)


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
