"""Sorted-F, phase 1 (papers.md §2): batches of small F(X) = Σ o / |X|² within the budget, each sorted by o.

Three solvers for a batch: exact dynamic programming, local swaps from a greedy start, greedy over sampled quantiles.
"""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.errors import UsageError
from plait.table import I64

Flags = np.typing.NDArray[np.bool_]

DP_ROWS = 100
SWAP_ROWS = 5_000
"""The paper swaps up to 500 requests and has no rule from there to QUANTILE_ROWS."""
QUANTILE_ROWS = 1_000
QUANTILES = 64
SAMPLE = 2_048
OUTLIER = 0.99
"""Requests above this sampled quantile of prompt, or of output, wait for the last batches."""


def sorted_f_order(s: I64, o: I64, kv_tokens: int) -> I64:
    """Rows in the order of Sorted-F by the solver for their number, int64 [n]: exact, swap, quantile."""
    if len(s) <= DP_ROWS:
        return dp_order(s, o, kv_tokens)
    return swap_order(s, o, kv_tokens) if len(s) < QUANTILE_ROWS else quantile_order(s, o, kv_tokens)


def dp_order(s: I64, o: I64, kv_tokens: int) -> I64:
    """Rows in the order of Sorted-F with each batch of least F, int64 [n]; O(n² M) a batch.

    Raises UsageError beyond DP_ROWS.
    """
    if len(s) > DP_ROWS:
        raise UsageError(f"sorted-f-dp takes up to {DP_ROWS} requests, got {len(s)}; use sorted-f or sorted-f-swap")
    left, batches = np.arange(len(s)), []
    while len(left):
        chosen = best_batch(s[left], o[left], kv_tokens)
        batches.append(left[chosen][np.argsort(o[left[chosen]], kind="stable")])
        left = left[~chosen]
    return np.concatenate(batches)


def swap_order(s: I64, o: I64, kv_tokens: int) -> I64:
    """Rows in the order of Sorted-F with local swaps from a greedy start by o (s + o), int64 [n].

    Raises UsageError beyond SWAP_ROWS: the time grows with their square.
    """
    if len(s) > SWAP_ROWS:
        raise UsageError(f"sorted-f-swap takes up to {SWAP_ROWS} requests, got {len(s)}; use sorted-f-quantile")
    start = np.argsort(o * (s + o), kind="stable")
    batch = _swap_batches(s, o, start, kv_tokens)
    return start[np.lexsort((o[start], batch[start]))]


def quantile_order(s: I64, o: I64, kv_tokens: int) -> I64:
    """Rows in the order of Sorted-F by quantile greedy, int64 [n], O(n). UsageError below QUANTILE_ROWS.

    Quantiles of o (s + o) over a sample cut the requests into QUANTILES levels, taken in turn; rows with an outlying
    length come after all levels. Batches fill in that order while they fit and F falls.
    """
    n = len(s)
    if n < QUANTILE_ROWS:
        raise UsageError(f"sorted-f-quantile needs at least {QUANTILE_ROWS} requests, got {n}; use sorted-f-swap")
    sample = np.random.default_rng(0).integers(0, n, SAMPLE)
    weight = o * (s + o)
    cuts = np.quantile(weight[sample], np.arange(1, QUANTILES) / QUANTILES)
    level = np.searchsorted(cuts, weight)
    outlying = (s > np.quantile(s[sample], OUTLIER)) | (o > np.quantile(o[sample], OUTLIER))
    level[outlying] += QUANTILES
    order = np.argsort(level.astype(np.uint8), kind="stable")  # a radix sort: O(n)
    batch = _fill(s, o, order, kv_tokens)
    return order[np.lexsort((o[order], batch))]


@njit
def _fill(s: I64, o: I64, order: I64, kv_tokens: int) -> I64:
    """Batch number of each place of ``order``, int64 [n]: a new one starts when a row does not fit or F would rise."""
    batch = np.empty(len(order), np.int64)
    free, total, count, number = kv_tokens, 0, 0, 0
    for k, row in enumerate(order):
        size = s[row] + o[row]
        falls = count == 0 or (total + o[row]) * count * count < total * (count + 1) * (count + 1)
        if size > free or not falls:
            free, total, count = kv_tokens, 0, 0
            number += 1
        free -= size
        total += o[row]
        count += 1
        batch[k] = number
    return batch


@njit
def best_batch(s: I64, o: I64, kv_tokens: int) -> Flags:
    """The set of least F (of those, the largest) within the budget, bool [n]; n <= DP_ROWS.

    least[k, m] is the least Σ o of k rows of total size m or less; two words of bits remember which rows.
    """
    n = len(s)
    sizes = s + o
    budget = min(kv_tokens, np.sum(sizes))
    fit = np.searchsorted(np.cumsum(np.sort(sizes)), budget, side="right")  # no set is larger
    none = np.int64(1) << 60
    least = np.full((fit + 1, budget + 1), none, np.int64)
    least[0] = 0
    members = np.zeros((fit + 1, budget + 1, 2), np.uint64)
    for i in range(n):
        word, bit = i // 64, np.uint64(1) << np.uint64(i % 64)
        for k in range(min(fit, i + 1), 0, -1):
            for m in range(sizes[i], budget + 1):
                total = least[k - 1, m - sizes[i]] + o[i]
                if total < least[k, m]:
                    least[k, m] = total
                    members[k, m, 0] = members[k - 1, m - sizes[i], 0]
                    members[k, m, 1] = members[k - 1, m - sizes[i], 1]
                    members[k, m, word] |= bit
    best = 1
    for k in range(2, fit + 1):
        if least[k, budget] * best * best <= least[best, budget] * k * k:
            best = k
    chosen = np.zeros(n, np.bool_)
    for i in range(n):
        chosen[i] = (members[best, budget, i // 64] >> np.uint64(i % 64)) & np.uint64(1) == 1
    return chosen


@njit
def _swap_batches(s: I64, o: I64, start: I64, kv_tokens: int) -> I64:
    """Batch number of each row, int64 [n]."""
    batch = np.empty(len(s), np.int64)
    left = start.copy()
    number = 0
    while len(left):
        chosen = _greedy(s, o, left, kv_tokens)
        _swap(s, o, left, chosen, kv_tokens)
        kept = 0
        for i, row in enumerate(left):
            if chosen[i]:
                batch[row] = number
            else:
                left[kept] = row
                kept += 1
        left = left[:kept]
        number += 1
    return batch


@njit
def _greedy(s: I64, o: I64, left: I64, kv_tokens: int) -> Flags:
    """Take rows in order while they fit and F falls; bool [len(left)]."""
    chosen = np.zeros(len(left), np.bool_)
    free, total, count = kv_tokens, 0, 0
    for i, row in enumerate(left):
        size = s[row] + o[row]
        falls = count == 0 or (total + o[row]) * count * count < total * (count + 1) * (count + 1)
        if size <= free and falls:
            chosen[i] = True
            free -= size
            total += o[row]
            count += 1
    return chosen


@njit
def _swap(s: I64, o: I64, left: I64, chosen: Flags, kv_tokens: int) -> None:
    """Exchange a chosen row for the unchosen one of least o that fits in its place, until none lowers F."""
    free = kv_tokens
    for i, row in enumerate(left):
        if chosen[i]:
            free -= s[row] + o[row]
    improved = True
    while improved:
        improved = False
        for i, row in enumerate(left):
            if not chosen[i]:
                continue
            room = free + s[row] + o[row]
            best = i
            for j, other in enumerate(left):
                if not chosen[j] and o[other] < o[left[best]] and s[other] + o[other] <= room:
                    best = j
            if best != i:
                chosen[i], chosen[best] = False, True
                free = room - s[left[best]] - o[left[best]]
                improved = True
