"""The prefix tree of a job as flat arrays: the one structure every planner, policy and simulator reads.

Only *shared* segments are nodes. A row hangs off the deepest node whose tokens are a prefix of its prompt; what it has
beyond that node is its private suffix. Node 0 is the root (no tokens). Nodes are in preorder, so ``parent[v] < v`` and
the subtree of v is ``v .. subtree_end[v] - 1``; rows in depth-first order put the rows below v side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.table import I32, I64


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Immutable. m nodes, n rows."""

    parent: I32  # [m] parent[0] == -1
    prefix_tokens: I64  # [m] tokens from the root to the end of the node; 0 for the root
    subtree_end: I32  # [m] one past the last node of the subtree
    node_of: I32  # [n] deepest shared node of each row
    dfs_rows: I64  # [n] rows in depth-first (lexicographic) order
    row_begin: I64  # [m] dfs_rows[row_begin[v]:row_end[v]] are the rows below v
    row_end: I64  # [m]

    @property
    def n_nodes(self) -> int:
        """Nodes including the root."""
        return len(self.parent)

    @property
    def segment_tokens(self) -> I64:
        """Tokens of each node's own segment, int64 [m]; 0 for the root."""
        segment = self.prefix_tokens.copy()
        segment[1:] -= self.prefix_tokens[self.parent[1:]]
        return segment

    @staticmethod
    def without_sharing(n: int) -> PrefixTree:
        """A tree of n rows that share nothing."""
        rows = np.arange(n, dtype=np.int64)
        return PrefixTree(
            parent=np.array([-1], np.int32),
            prefix_tokens=np.zeros(1, np.int64),
            subtree_end=np.ones(1, np.int32),
            node_of=np.zeros(n, np.int32),
            dfs_rows=rows,
            row_begin=np.zeros(1, np.int64),
            row_end=np.array([n], np.int64),
        )
