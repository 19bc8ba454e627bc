"""Orders that need no lengths: submission order, random, depth-first over the prefix tree."""

from __future__ import annotations

import numpy as np

from plait.policy.base import Order, View, identity


def fcfs(view: View) -> Order:
    """Rows as they were given."""
    return Order(identity(view.table.n))


def random(view: View) -> Order:
    """A seeded shuffle: mixes resources, destroys sharing (NanoFlow-Balance in BlendServe)."""
    return Order(np.random.default_rng(view.seed).permutation(view.table.n).astype(np.int64))


def dfs(view: View) -> Order:
    """Depth-first over the prefix tree: best sharing, similar rows side by side (NanoFlow-DFS in BlendServe)."""
    return Order(view.tree.dfs_rows)
