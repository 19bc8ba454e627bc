"""Sorted-F, phase 1 by local swap search (papers.md §2): batches of small F(X) = Σ o / |X|², each sorted by o."""

from __future__ import annotations

import numpy as np

from plait._numba import njit
from plait.table import I64


def swap_order(s: I64, o: I64, kv_tokens: int) -> I64:
    """Rows in the order of Sorted-F with local swap search from a greedy start by o (s + o), int64 [n]."""
    return _swap_batches(s, o, np.argsort(o * (s + o), kind="stable"), kv_tokens)


@njit
def _swap_batches(s: I64, o: I64, start: I64, kv_tokens: int) -> I64:
    n = len(s)
    left = start.copy()
    done = 0
    order = np.empty(n, np.int64)
    while done < n:
        chosen = _greedy(s, o, left, kv_tokens)
        _swap(s, o, left, chosen, kv_tokens)
        batch = left[chosen]
        batch = batch[np.argsort(o[batch], kind="mergesort")]
        order[done : done + len(batch)] = batch
        done += len(batch)
        left = left[~chosen]
    return order


@njit
def _greedy(s: I64, o: I64, left: I64, kv_tokens: int) -> np.typing.NDArray[np.bool_]:
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
def _swap(s: I64, o: I64, left: I64, chosen: np.typing.NDArray[np.bool_], kv_tokens: int) -> None:
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
