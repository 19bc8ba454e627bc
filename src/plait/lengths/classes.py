"""Classes of requests that may be expected to answer at similar length: big subtrees, cut further by prompt length.

The classes form a hierarchy. A class that has been seen too little leans on the one above it (``plait.lengths``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from plait._numba import njit
from plait.table import F64, I32, I64
from plait.tree.prefix import PrefixTree

MOST_CLASSES = 1024
"""Bound on the leaves of the hierarchy: what depends on classes x grid stays cheap at any job size."""
CLASS_TOKENS = 8
"""A class cut by prefix shares so many tokens beyond the class above: a word or two in common say nothing."""
PREFIX_LEVELS = 3
"""Classes cut by prefix count as level 0, 1 or 2 by depth; deeper ones as 2."""
FEW_ROWS, FEW_CLASSES = 8, 256
"""Subtrees at the top count from so few rows on, the biggest so many of them: a rare source may hold most of the job's
memory traffic."""
LENGTH_LEVELS = 4
"""A subtree's rows are halved by prompt length up to this many times: levels 3 to 6."""


@dataclass(frozen=True, slots=True)
class Classes:
    """c classes over n rows. Class 0 is the whole job; ``parent[c] < c``."""

    of_row: I32  # [n] class of each row; always a leaf of the hierarchy
    parent: I32  # [c] -1 for class 0
    level: I32  # [c] how it was cut: below PREFIX_LEVELS by prefix, from there on by prompt length
    rows: I64  # [n] rows class by class, siblings side by side, by prompt length inside

    def counts(self) -> F64:
        """Rows of each class and the classes below it, float64 [c]."""
        count = np.bincount(self.of_row, minlength=len(self.parent)).astype(np.float64)
        for c in range(len(count) - 1, 0, -1):
            count[self.parent[c]] += count[c]
        return count


def cut_classes(tree: PrefixTree, prompt_tokens: I64) -> Classes:
    """A subtree is a class of its own if it has at least sqrt(n) / 4 rows (n / MOST_CLASSES in big jobs; FEW_ROWS at
    the top), differs from the class above by as many and shares CLASS_TOKENS more; halves by prompt length must have
    sqrt(n) rows."""
    n = len(prompt_tokens)
    least = max(1, math.isqrt(n) // 4, n // MOST_CLASSES)
    n_rows = (tree.row_end - tree.row_begin).astype(np.int64)
    node_class, parents = _significant(tree.parent, tree.prefix_tokens, n_rows, least, min(least, _few(tree, n_rows)))
    cutter = _Cutter(max(least, math.isqrt(n)))
    for above in parents.tolist():
        cutter.add(above, 0 if above <= 0 else min(cutter.level[above] + 1, PREFIX_LEVELS - 1))
    has_child = np.zeros(len(parents), np.bool_)
    has_child[parents[1:]] = True
    subtree = node_class[tree.node_of]
    rows = np.lexsort((prompt_tokens, subtree)).astype(np.int64)
    bounds = np.searchsorted(subtree[rows], np.arange(len(parents) + 1))
    of_position = np.zeros(n, np.int32)
    for c in range(len(parents)):
        begin, end = int(bounds[c]), int(bounds[c + 1])
        if begin < end:
            # what is left of a subtree beside its own classes is a class beside them
            top = cutter.add(c, cutter.level[cutter.parent.index(c)]) if has_child[c] else c
            cutter.halve(prompt_tokens[rows[begin:end]], top, of_position[begin:end])
    of_row = np.empty(n, np.int32)
    of_row[rows] = of_position
    return Classes(of_row, np.array(cutter.parent, np.int32), np.array(cutter.level, np.int32), rows)


@dataclass(slots=True)
class _Cutter:
    """The hierarchy while it grows."""

    least: int
    parent: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)

    def add(self, parent: int, level: int) -> int:
        """A new class below ``parent``; returns its number."""
        self.parent.append(parent)
        self.level.append(level)
        return len(self.parent) - 1

    def halve(self, prompt_tokens: I64, top: int, of_position: I32) -> None:
        """Cut rows sorted by prompt length at the median, again and again; writes the class of each position."""
        todo = [(0, len(prompt_tokens), top, PREFIX_LEVELS)]
        while todo:
            begin, end, above, level = todo.pop()
            of_position[begin:end] = above
            if level == PREFIX_LEVELS + LENGTH_LEVELS or end - begin < 2 * self.least:
                continue
            middle = int(np.searchsorted(prompt_tokens[begin:end], prompt_tokens[(begin + end) // 2])) + begin
            if min(middle - begin, end - middle) < self.least // 2 or middle == begin:
                continue  # (almost) all prompts are of one length
            todo.append((middle, end, self.add(above, level), level + 1))
            todo.append((begin, middle, self.add(above, level), level + 1))


def _few(tree: PrefixTree, n_rows: I64) -> int:
    """Rows from which on a subtree of the job as a whole is a class: FEW_ROWS, more if there are too many of those."""
    tops = np.sort(n_rows[1:][tree.parent[1:] == 0])
    return max(FEW_ROWS, int(tops[-FEW_CLASSES])) if len(tops) >= FEW_CLASSES else FEW_ROWS


@njit
def _significant(parent: I32, prefix_tokens: I64, n_rows: I64, least: int, few: int) -> tuple[I32, I32]:
    """Class of every node, int32 [m], and the class above each class, int32 [c]."""
    node_class = np.zeros(len(parent), np.int32)
    above = np.full(len(parent), -1, np.int32)
    rows = np.zeros(len(parent), np.int64)
    tokens = np.zeros(len(parent), np.int64)
    rows[0] = n_rows[0]
    count = 1
    for v in range(1, len(parent)):
        c = node_class[parent[v]]
        enough = few if c == 0 else least
        if rows[c] - n_rows[v] < enough:
            tokens[c] = prefix_tokens[v]  # (almost) the same rows: the class shares this much
        elif n_rows[v] >= enough and prefix_tokens[v] - tokens[c] >= CLASS_TOKENS:
            above[count], rows[count], tokens[count] = c, n_rows[v], prefix_tokens[v]
            c = count
            count += 1
        node_class[v] = c
    return node_class, above[:count].copy()
