"""Trees of jobs whose tokens do not fit into memory: one pass over batches of prompts that keeps a hash a block.

A block's hash covers the prompt from its first token on, so equal hashes mean equal prefixes. The running hash has 64
bits, 32 of them are kept: prompts that differ agree on one kept hash by chance once in 4e9 pairs, and on the next one
as rarely, so an accident adds a block of sharing to a few pairs in a job of millions. Memory: 4 bytes a block and about
100 bytes a prompt, which with the default block is half of the token column.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from plait._numba import njit
from plait.errors import InputError
from plait.table import I32, I64
from plait.tree.build import tree_from_int_blocks
from plait.tree.prefix import PrefixTree

BLOCK_TOKENS = 8
"""Sharing is known to this many tokens; what prompts share beyond the last whole block is invisible to the order."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def tree_from_batches(batches: Iterable[tuple[I32, I64]], block_tokens: int = BLOCK_TOKENS) -> tuple[PrefixTree, I64]:
    """Prefix tree over all prompts of a stream, and their lengths, int64 [n]. A batch is (tokens, offsets) as for
    ``build_tree``; rows are numbered on from batch to batch. Equal prompts share all their tokens, others whole blocks.
    Raises InputError if a batch's offsets do not describe its tokens."""
    parts: list[I32] = []
    lengths: list[I64] = []
    for number, (tokens, offsets) in enumerate(batches):
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) < 0):
            raise InputError(f"batch {number}: offsets must rise from 0 to the {len(tokens)} tokens of the batch")
        prompt = np.diff(offsets).astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(-(-prompt // block_tokens)))).astype(np.int64)
        parts.append(_hash_blocks(np.ascontiguousarray(tokens, np.int32), offsets, ends, block_tokens))
        lengths.append(prompt)
    prompt_tokens = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    offsets = np.concatenate(([0], np.cumsum(-(-prompt_tokens // block_tokens)))).astype(np.int64)
    return tree_from_int_blocks(_joined(parts, int(offsets[-1])), offsets, block_tokens, prompt_tokens), prompt_tokens


def _joined(parts: list[I32], size: int) -> I32:
    """The parts in one array; each is let go once it is copied, so that hashes are never held twice."""
    out, at = np.empty(size, np.int32), 0
    parts.reverse()
    while parts:
        part = parts.pop()
        out[at : at + len(part)] = part
        at += len(part)
    return out


@njit
def _hash_blocks(tokens: I32, offsets: I64, ends: I64, block_tokens: int) -> I32:
    """Hashes of the blocks of each prompt (the last one maybe not full), int32 [ends[-1]]; prompt i has
    ``ends[i] .. ends[i + 1]``."""
    out = np.empty(ends[-1], np.int32)
    for row in range(len(offsets) - 1):
        state, at = np.uint64(1), offsets[row]
        for block in range(ends[row], ends[row + 1]):
            stop = min(at + block_tokens, offsets[row + 1])
            size = np.uint64(stop - at)
            while at < stop:
                state = (state ^ np.uint64(np.uint32(tokens[at]))) * _MULTIPLIER
                state ^= state >> np.uint64(29)
                at += 1
            mixed = (state + size) * _MULTIPLIER
            out[block] = np.int32(np.uint32(mixed >> np.uint64(32)))
    return out
