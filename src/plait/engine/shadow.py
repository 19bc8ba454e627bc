"""What the embedded engine's prefix cache holds, kept beside it: the engine itself has no counter of reused tokens.

Rules observed of OpenVINO GenAI 2026.4: blocks of 32 tokens are known by the hash of everything up to their end; a
request looks them up once, when it is added; a block can be found from the step on that computes it; blocks of ended
requests stay until they are overwritten, least recently used first. Partly filled blocks are not followed here, so the
count may be up to 31 tokens short for a prompt that ends inside a block someone else has filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from plait.table import I32

BLOCK_TOKENS = 32


def chain(ids: I32, parent: int = 0) -> list[int]:
    """A number for each full block that stands for it and all before it (``parent``: the block before the first)."""
    keys, data = [], np.ascontiguousarray(ids, np.int32)
    for start in range(0, len(data) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hash((parent, data[start : start + BLOCK_TOKENS].tobytes()))
        keys.append(parent)
    return keys


class PrefixShadow:
    """Blocks by key: in use by running requests, or idle until overwritten."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: Sequence[int]) -> int:
        """How many leading blocks are cached; they are in use from now on (``release`` gives them back)."""
        count = 0
        for key in keys:
            if key not in self._users and key not in self._idle:
                break
            self._use(key)
            count += 1
        return count

    def fill(self, keys: Sequence[int]) -> None:
        """Blocks that are computed in this step; they are in use from now on."""
        for key in keys:
            self._use(key)

    def release(self, keys: Sequence[int]) -> None:
        """A request ended or lost its KV: its blocks, deepest first, become idle unless others use them."""
        for key in reversed(keys):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None

    def shrink(self, used_blocks: int) -> None:
        """The engine holds ``used_blocks`` for running requests: what no longer fits beside them is overwritten."""
        while self._idle and used_blocks + len(self._idle) > self._blocks:
            self._idle.popitem(last=False)

    def _use(self, key: int) -> None:
        self._idle.pop(key, None)
        self._users[key] = self._users.get(key, 0) + 1
