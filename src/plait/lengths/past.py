"""Output lengths seen before, by what the prompts began with: requests come again with the same instructions, and their
answers are about as long then.

Kept are counts only, no text: how many answers ended in each bin of ``plait.lengths``' grid, and how many were cut off
there, for prompts whose first 16, 32, ... 1024 tokens have a certain digest. How long a model's answers to other
prompts were says nothing: seeded with a short batch of another kind, a mix of long answers was forecast worse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from plait.lengths.estimate import Lengths
from plait.table import F64, I64, RequestTable
from plait.tree.prefix import PrefixTree

DEPTHS = (1024, 512, 256, 128, 64, 32, 16)
FEW_ROWS = 4
"""Prompts of which nothing but the first tokens are equal are a group from so many on."""
MOST_ANSWERS = 256.0
"""Counts of a prefix are scaled down to so many: later runs weigh more."""
MOST_PREFIXES = 2000
SAME_PREFIX = 16.0
"""Answers that the past counts for, at most, in a class of prompts that begin alike."""

Counts = F64
"""float64 [3, g]: answers that ended in each bin, their tokens, and answers cut off in it."""


class Past:
    """What one model said, in the order in which it was last seen."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def seed(self, lengths: Lengths, table: RequestTable, tree: PrefixTree) -> float:
        """Let ``lengths`` begin with what was seen; the share of the rows whose prompts begin as earlier ones did."""
        if lengths.exact:
            return 1.0
        at, known = lengths.grid_tokens, 0
        for c, rows, share, digests in _prefixes(lengths, table, tree):
            found = next((digest for digest in digests if digest in self._seen), None)
            if found is not None:
                lengths.begin_with(c, share * _at_most(dense(self._seen[found], len(at)), SAME_PREFIX))
                known += len(rows)
        lengths.refresh()
        return known / table.n if table.n else 0.0

    def learn(self, lengths: Lengths, table: RequestTable, tree: PrefixTree, output_tokens: I64) -> None:
        """Add answers: ``output_tokens`` int64 [n], below 0 where there is none."""
        if lengths.exact:
            return
        says = (output_tokens >= 0) & (np.maximum(output_tokens, 1) > table.min_tokens)
        at = lengths.grid_tokens
        for _, rows, _, digests in _prefixes(lengths, table, tree):
            own = rows[says[rows]]
            for digest in digests if len(own) else ():
                self._add(digest, _count(at, output_tokens[own], table.max_tokens[own]))
        for old in list(self._seen)[: max(0, len(self._seen) - MOST_PREFIXES)]:
            del self._seen[old]

    def _add(self, name: str, counts: Counts) -> None:
        """The latest come last: the first are dropped when there are too many."""
        if name in self._seen:
            counts = counts + dense(self._seen.pop(name), counts.shape[1])
        counts = _at_most(counts, MOST_ANSWERS)
        used = np.flatnonzero(counts.any(axis=0))
        if len(used):
            self._seen[name] = {str(j): np.round(counts[:, j], 3).tolist() for j in used.tolist()}


def _prefixes(lengths: Lengths, table: RequestTable, tree: PrefixTree) -> Iterator[tuple[int, I64, float, list[str]]]:
    """Groups of rows whose prompts begin alike: the class cut by prefix that they are in, the rows, their share of the
    class's, and the digests of what all of them begin with, longest first. What is left beside such classes may still
    begin with a few equal tokens (a chat template's): it is cut by those."""
    of_row = lengths.prefix_class()[tree.dfs_rows]
    by_class = np.argsort(of_row, kind="stable")
    for positions in np.split(by_class, np.flatnonzero(np.diff(of_row[by_class])) + 1) if len(of_row) else ():
        rows = tree.dfs_rows[positions].astype(np.int64)
        digests = _digests(table, rows[0], rows[-1])
        groups = [rows] if digests else _beginnings(table, rows)
        for group in groups:
            found = digests or _digests(table, group[0], group[-1])
            yield int(of_row[positions[0]]), group, len(group) / len(rows), found


def _digests(table: RequestTable, first: int, last: int) -> list[str]:
    """Of the tokens that two prompts begin with: for rows in depth-first order, those that all between begin with."""
    assert table.tokens is not None and table.offsets is not None
    one, other = (table.tokens[table.offsets[row] : table.offsets[row + 1]] for row in (first, last))
    short = min(len(one), len(other))
    differ = np.flatnonzero(one[:short] != other[:short])
    shared = int(differ[0]) if len(differ) else short
    return [hashlib.sha256(one[:d].astype("<i4").tobytes()).hexdigest()[:24] for d in DEPTHS if d <= shared]


def _beginnings(table: RequestTable, rows: I64) -> list[I64]:
    """Rows by their first DEPTHS[-1] tokens; rows of shorter prompts are in none of the groups."""
    assert table.tokens is not None and table.offsets is not None
    rows = rows[table.prompt_tokens[rows] >= DEPTHS[-1]]
    if not len(rows):
        return []
    weights = np.random.default_rng(0).integers(1, 1 << 62, DEPTHS[-1], np.int64)
    key = np.zeros(len(rows), np.int64)
    for k, weight in enumerate(weights):
        key += table.tokens[table.offsets[rows] + k] * weight
    order = np.argsort(key, kind="stable")
    groups = np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1)
    return [group for group in groups if len(group) >= FEW_ROWS]


def _count(at: I64, output_tokens: I64, max_tokens: I64) -> Counts:
    tokens = np.clip(output_tokens, 1, at[-1] - 1)
    cut = output_tokens >= max_tokens
    counts = np.zeros((3, len(at)))
    bins = np.searchsorted(at, tokens[~cut], side="left") - 1
    np.add.at(counts[0], bins, 1.0)
    np.add.at(counts[1], bins, tokens[~cut])
    np.add.at(counts[2], np.searchsorted(at, tokens[cut], side="right") - 1, 1.0)
    return counts


def dense(stored: dict[str, list[float]], bins: int) -> Counts:
    """Raises ValueError, TypeError or AttributeError for what was never stored by ``Past``."""
    counts = np.zeros((3, bins))
    for j, column in stored.items():
        if 0 <= int(j) < bins:
            counts[:, int(j)] = np.asarray(column, np.float64)
    return counts


def _at_most(counts: Counts, answers: float) -> Counts:
    total = float(counts[0].sum() + counts[2].sum())
    return counts * min(1.0, answers / total) if total > 0 else counts
