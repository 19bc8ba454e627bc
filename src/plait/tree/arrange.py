"""BlendServe's order: compute-heavy left, memory-heavy right, prefixes kept together (its section 5.2).

The children of every node are sorted by density. A leaf (request) that is then out of place may leave its subtree for
the root, where it can lie anywhere, if the prefix tokens that must be computed once more fit a ledger; a subtree that
is out of place as a whole leaves as a whole. Sort and split alternate until the leaves are monotone or no split is
affordable. In the end neighbours that share a prefix are one unit again: that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from plait._numba import njit
from plait.table import F64, I32, I64
from plait.tree.annotate import Annotation, annotate_arrays, density
from plait.tree.build import tree_from_order
from plait.tree.prefix import PrefixTree
from plait.tree.sharing import shared_with_previous, unique_tokens

Mask = npt.NDArray[np.bool_]
AnyArray = TypeVar("AnyArray", I64, F64, Mask)
KEEP_SHARING = 0.99
"""Share of the saved prompt tokens that splitting must leave (BlendServe: 99 %)."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Left-to-right order of n rows in u units."""

    rows: I64  # [n] densest first
    density: F64  # [n] by row: compute it adds at its place (prefix cached) over its memory time, to single precision
    unit_begin: I64  # [u + 1] unit k is rows[unit_begin[k]:unit_begin[k + 1]]; rows of one unit share a prefix
    unit_density: F64  # [u] rho of each unit
    tree: PrefixTree  # prefixes as this order shares them: dfs_rows is rows
    split: Mask  # [n] by row: left its subtree for the root, at most once
    out_of_place: Mask  # [n] by row: still breaks the monotone order; all False if the leaves are monotone
    budget_tokens: int  # prompt tokens that splits might cost
    split_tokens: int  # what they cost before merging
    recompute_tokens: int  # what the order costs against a depth-first one, after merging


def arrange(
    tree: PrefixTree, prompt_tokens: I64, compute_s: F64, memory_s: F64, keep_sharing: float = KEEP_SHARING
) -> Arrangement:
    """Arrange rows by density. ``compute_s``, ``memory_s`` [n]: seconds of each row without sharing."""
    unique = unique_tokens(tree, prompt_tokens)
    work, places, misplaced = _settled(tree, prompt_tokens, compute_s, memory_s, keep_sharing, unique)
    return work.finish(places, misplaced, tree, unique)


def densest_first(tree: PrefixTree, prompt_tokens: I64, compute_s: F64, memory_s: F64) -> tuple[I64, F64]:
    """``rows`` and ``density`` of the arrangement alone, [n] each."""
    unique = unique_tokens(tree, prompt_tokens)
    work, places, _ = _settled(tree, prompt_tokens, compute_s, memory_s, KEEP_SHARING, unique)
    return tree.dfs_rows[places], work.by_row(work.row_density)


def _settled(
    tree: PrefixTree, prompt_tokens: I64, compute_s: F64, memory_s: F64, keep_sharing: float, unique: int
) -> tuple[_Working, I64, Mask]:
    """Sort and split until the leaves are monotone or no split is affordable: (tree as it is then, places of the rows
    from left to right, mask by place of those that are out of place)."""
    budget = int((1.0 - keep_sharing) * (int(prompt_tokens.sum()) - unique))
    work = _Working(tree, prompt_tokens, compute_s, memory_s, budget)
    places, misplaced = work.sorted_places()
    while misplaced.any() and work.split_out(misplaced):
        places, misplaced = work.sorted_places()
    return work, places, misplaced


class _Working:
    """The tree while subtrees and rows move to the root. Rows go by their places in depth-first order here: so what
    belongs to a node lies together in memory."""

    def __init__(self, tree: PrefixTree, prompt_tokens: I64, compute_s: F64, memory_s: F64, budget_tokens: int) -> None:
        self.dfs_rows, self.prefix_tokens = tree.dfs_rows, tree.prefix_tokens
        self.place = self.by_row(np.arange(len(self.dfs_rows)))
        self.parent, self.home = tree.parent.copy(), tree.node_of[self.dfs_rows]
        self.prompt_tokens = prompt_tokens[self.dfs_rows]
        self.compute_s, self.memory_s = compute_s[self.dfs_rows], memory_s[self.dfs_rows]
        self.budget, self.spent = budget_tokens, 0
        self.split = np.zeros(len(self.home), np.bool_)
        self.row_density = np.zeros(0)
        self.nodes: Annotation

    def by_row(self, values: AnyArray) -> AnyArray:
        """Values by place -> values by row."""
        out = np.empty_like(values)
        out[self.dfs_rows] = values
        return out

    def sorted_places(self) -> tuple[I64, Mask]:
        """Places after sorting the children of every node, and a mask by place of those that break the monotone order:
        the fewest below the root's own rows whose absence leaves densities that never rise."""
        self.nodes = annotate_arrays(
            self.parent, self.prefix_tokens, self.home, self.prompt_tokens, self.compute_s, self.memory_s
        )
        self.row_density = _row_density(
            self.home, self.prefix_tokens, self.prompt_tokens, self.compute_s, self.memory_s
        )
        # ties keep depth-first order: rows before nodes, each in their own order
        items = _falling(np.concatenate((self.row_density, _single(self.nodes.added_density))))
        places = _emit(items, self.parent, self.home)
        return places, _breaks_order(self.row_density, self.home == 0, places)

    def split_out(self, misplaced: Mask) -> bool:
        """Move what is out of place to the root, most misplaced work per recomputed token first, while the ledger
        allows. Returns whether anything moved."""
        nodes, rows = _candidates(self.parent, self.home, misplaced & ~self.split, self.place)
        top = _top_nodes(self.parent)
        work = self.nodes.compute_s[nodes] + self.nodes.memory_s[nodes]
        work = np.concatenate((work, self.compute_s[rows] + self.memory_s[rows]))
        off = np.concatenate(
            (
                _log(self.nodes.added_density[nodes]) - _log(self.nodes.added_density[top[nodes]]),
                _log(self.row_density[rows]) - _log(self.nodes.added_density[top[self.home[rows]]]),
            )
        )
        cost = self.prefix_tokens[np.concatenate((self.parent[nodes], self.home[rows]))]
        first = _falling(work * np.abs(off) / np.maximum(cost, 1))
        items = np.concatenate((-1 - nodes, rows))[first]  # nodes as negative numbers
        left = _move(items, self.parent, self.home, self.prefix_tokens, self.split, self.budget - self.spent)
        moved = left[1] > 0
        self.spent = self.budget - left[0]
        return moved

    def finish(self, places: I64, misplaced: Mask, original: PrefixTree, unique: int) -> Arrangement:
        """Merge neighbours back and put the result together."""
        rows, prompt_tokens = self.dfs_rows[places], self.by_row(self.prompt_tokens)
        shared = shared_with_previous(original, rows)
        tree = tree_from_order(rows, shared)
        cuts = np.flatnonzero(shared[1:] == 0) + 1
        unit_begin = np.concatenate(([0], cuts, [len(rows)] if len(rows) else [])).astype(np.int64)
        return Arrangement(
            rows=rows,
            density=self.by_row(self.row_density),
            unit_begin=unit_begin,
            unit_density=_unit_density(
                tree, rows, unit_begin, (prompt_tokens, self.by_row(self.compute_s), self.by_row(self.memory_s))
            ),
            tree=tree,
            split=self.by_row(self.split),
            out_of_place=self.by_row(misplaced),
            budget_tokens=self.budget,
            split_tokens=self.spent,
            recompute_tokens=unique_tokens(tree, prompt_tokens) - unique,
        )


def _unit_density(tree: PrefixTree, rows: I64, unit_begin: I64, work: tuple[I64, F64, F64]) -> F64:
    """rho of each unit: of a node below the root, or of a row alone. ``work``: prompt tokens, compute and memory
    seconds by row."""
    _, compute_s, memory_s = work
    nodes = annotate_arrays(tree.parent, tree.prefix_tokens, tree.node_of, *work)
    first = rows[unit_begin[:-1]]
    top = _top_nodes(tree.parent)[tree.node_of[first]]
    alone = density(compute_s[first], memory_s[first], np.zeros(len(first)))
    return np.where(top > 0, nodes.density[top], alone)


def _single(values: F64) -> F64:
    """Values >= 0 rounded to single precision: what differs by less is a tie."""
    with np.errstate(over="ignore"):
        return np.abs(values).astype(np.float32).astype(np.float64)


def _falling(values: F64) -> I64:
    """Positions by falling value (>= 0, to single precision), ties in order, int64 [k]. The bits of a float >= 0 grow
    with it, so one sort of integers, value before position, does it in a fifth of the time of ``argsort``."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    packed = (np.uint64(0x7F800000) - bits) << np.uint64(32) | np.arange(len(values), dtype=np.uint64)
    packed.sort()
    return (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _log(values: F64) -> F64:
    """Natural logarithm, infinities and zeros pulled in to +-50."""
    return np.clip(np.log(np.maximum(values, 1e-300)), -50.0, 50.0)


@njit
def _row_density(home: I32, prefix_tokens: I64, prompt_tokens: I64, compute_s: F64, memory_s: F64) -> F64:
    """Density of each row with its prefix cached, to single precision: ``annotate.density`` in one pass."""
    out = np.empty(len(home))
    for r in range(len(home)):
        alone = 1.0 - prefix_tokens[home[r]] / max(prompt_tokens[r], 1)
        out[r] = np.float32(alone * compute_s[r] / memory_s[r]) if memory_s[r] > 0.0 else np.inf
    return np.abs(out)


@njit
def _emit(items: I64, parent: I32, home: I32) -> I64:
    """Rows in depth-first order, int64 [n]. ``items``: rows 0 .. n - 1 and nodes n + v as siblings shall be ordered."""
    n, m = len(home), len(parent)
    start = np.zeros(m + 1, np.int64)
    for p in home:
        start[p + 1] += 1
    for p in parent[1:]:
        start[p + 1] += 1
    for v in range(m):
        start[v + 1] += start[v]
    children, fill = np.empty(n + m, np.int64), start[:-1].copy()
    for item in items:
        p = home[item] if item < n else parent[item - n]
        if p >= 0:
            children[fill[p]] = item
            fill[p] += 1
    rows, path, top, count = np.empty(n, np.int64), np.zeros(m + 1, np.int64), 1, 0
    at = start[:-1].copy()
    while top > 0:
        v = path[top - 1]
        if at[v] == start[v + 1]:
            top -= 1
            continue
        item = children[at[v]]
        at[v] += 1
        if item < n:
            rows[count] = item
            count += 1
        else:
            path[top] = item - n
            top += 1
    return rows


@njit
def _breaks_order(density: F64, fixed: Mask, order: I64) -> Mask:
    """Mask of the densities outside a never-rising subsequence in ``order`` that holds all fixed ones (they never rise
    by themselves) and is the longest of those, bool [n]. Patience sorting, O(n log n)."""
    n = len(order)
    values, pinned = density[order], fixed[order]
    fits, bound = np.ones(n, np.bool_), np.inf
    for i in range(n):
        fits[i] = values[i] <= bound
        bound = values[i] if pinned[i] else bound
    bound = -np.inf
    for i in range(n - 1, -1, -1):
        fits[i] &= values[i] >= bound
        bound = values[i] if pinned[i] else bound
    ends, tops, before, size = np.empty(n, np.int64), np.empty(n), np.empty(n, np.int64), 0
    for i in range(n):
        if not fits[i]:
            continue
        low, high = 0, size
        if size > 0 and tops[size - 1] >= values[i]:
            low = size  # the usual case: it extends the longest one
        while low < high:  # first pile whose end is smaller than this value
            middle = (low + high) // 2
            if tops[middle] < values[i]:
                high = middle
            else:
                low = middle + 1
        before[i] = ends[low - 1] if low > 0 else -1
        ends[low], tops[low] = i, values[i]
        size = max(size, low + 1)
    mask = np.ones(n, np.bool_)
    i = ends[size - 1] if size > 0 else -1
    while i >= 0:
        mask[order[i]] = False
        i = before[i]
    return mask


@njit
def _candidates(parent: I32, home: I32, misplaced: Mask, places: I64) -> tuple[I64, I64]:
    """What may leave for the root: topmost nodes all of whose rows are misplaced, and misplaced rows outside those, in
    the order of ``places``."""
    m = len(parent)
    whole, rows_below = np.ones(m, np.bool_), np.zeros(m, np.int64)
    for r in range(len(home)):
        rows_below[home[r]] += 1
        whole[home[r]] &= misplaced[r]
    whole[0] = False
    for v in range(m - 1, 0, -1):
        rows_below[parent[v]] += rows_below[v]
        if rows_below[v] > 0:
            whole[parent[v]] &= whole[v]
    inside = np.zeros(m, np.bool_)
    nodes, k = np.empty(m, np.int64), 0
    for v in range(1, m):
        inside[v] = inside[parent[v]] or (whole[v] and rows_below[v] > 0 and parent[v] > 0)
        if inside[v] and not inside[parent[v]]:
            nodes[k] = v
            k += 1
    rows, j = np.empty(len(home), np.int64), 0
    for r in places:
        if misplaced[r] and home[r] > 0 and not inside[home[r]]:
            rows[j] = r
            j += 1
    return nodes[:k], rows[:j]


@njit
def _top_nodes(parent: I32) -> I64:
    """The child of the root that each node lies below, int64 [m]; 0 for the root."""
    top = np.zeros(len(parent), np.int64)
    for v in range(1, len(parent)):
        top[v] = v if parent[v] == 0 else top[parent[v]]
    return top


@njit
def _move(items: I64, parent: I32, home: I32, prefix_tokens: I64, split: Mask, budget: int) -> tuple[int, int]:
    """Move rows (r) and nodes (-1 - v) to the root in this order where affordable. Returns what is left of ``budget``
    and how many moved. Nodes that stay behind empty are not computed any more: their tokens come back."""
    m = len(parent)
    members = np.zeros(m, np.int64)  # rows and nodes directly below
    for r in range(len(home)):
        members[home[r]] += 1
    for v in range(m - 1, 0, -1):
        if members[v] > 0:
            members[parent[v]] += 1
    moved_nodes, moved = np.zeros(m, np.bool_), 0
    for item in items:
        old = home[item] if item >= 0 else parent[-1 - item]
        cost, v = prefix_tokens[old], old
        while v > 0 and members[v] == 1:
            cost -= prefix_tokens[v] - prefix_tokens[parent[v]]
            v = parent[v]
        if cost > budget:
            continue
        budget -= cost
        moved += 1
        v = old
        members[v] -= 1
        while v > 0 and members[v] == 0:
            v = parent[v]
            members[v] -= 1
        members[0] += 1
        if item >= 0:
            home[item], split[item] = 0, True
        else:
            parent[-1 - item] = 0
            moved_nodes[-1 - item] = True
    for v in range(1, m):
        moved_nodes[v] |= moved_nodes[parent[v]]
    for r in range(len(home)):
        split[r] |= moved_nodes[home[r]]
    return budget, moved
