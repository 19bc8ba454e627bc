"""The KV cache as the scheduler sees it: whole blocks, shared nodes counted once, least recently used prefixes evicted.

A node is referenced while a running row lies in its subtree. Ancestors of a referenced node are referenced, so the
nodes in KV always form a tree with the root, and a walk from a row upwards may stop at the first referenced node."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling.state import CACHED, COLD, COMPUTING, Records, State


@njit
def blocks(tokens: int, block: int) -> int:
    """Tokens rounded up to whole blocks."""
    return (tokens + block - 1) // block * block


@njit
def uncached(s: State, row: int) -> tuple[int, int]:
    """(shared tokens that the row would have to prefill, cached tokens it would pin that are evictable now)."""
    nodes = s.nodes
    cold = 0
    pinned = 0
    v = s.rows[row].node
    while v > 0 and nodes[v].refs == 0:
        if nodes[v].state == COLD:
            cold += nodes[v].segment
        else:
            pinned += nodes[v].segment
        v = nodes[v].parent
    return cold, pinned


@njit
def free_tokens(c: Records) -> int:
    """KV tokens that can be had now, evictable prefixes included."""
    return int(c.capacity - c.kv_nodes - c.kv_private + c.kv_evictable)


@njit
def _lru_push(s: State, v: int) -> None:
    c = s.scalars[0]
    s.nodes[v].prev = c.lru_newest
    s.nodes[v].next = -1
    if c.lru_newest >= 0:
        s.nodes[c.lru_newest].next = v
    else:
        c.lru_oldest = v
    c.lru_newest = v
    c.kv_evictable += s.nodes[v].segment


@njit
def _lru_remove(s: State, v: int) -> None:
    c = s.scalars[0]
    before, after = s.nodes[v].prev, s.nodes[v].next
    if before >= 0:
        s.nodes[before].next = after
    else:
        c.lru_oldest = after
    if after >= 0:
        s.nodes[after].prev = before
    else:
        c.lru_newest = before
    c.kv_evictable -= s.nodes[v].segment


@njit
def evict(s: State, tokens: int) -> None:
    """Drop unreferenced prefixes, least recently used first, until ``tokens`` are free or none is left."""
    c = s.scalars[0]
    while c.capacity - c.kv_nodes - c.kv_private < tokens and c.lru_oldest >= 0:
        v = c.lru_oldest
        _lru_remove(s, v)
        s.nodes[v].state = COLD
        c.kv_nodes -= s.nodes[v].segment


@njit
def acquire(s: State, row: int) -> int:
    """Reference the row's nodes; cold ones become its to compute. Returns shared tokens it must prefill."""
    c = s.scalars[0]
    nodes = s.nodes
    cold = 0
    v = s.rows[row].node
    while v > 0:
        nodes[v].refs += 1
        if nodes[v].refs > 1:
            break
        if nodes[v].state == COLD:
            nodes[v].state = COMPUTING
            nodes[v].owner = row
            cold += nodes[v].segment
        else:
            _lru_remove(s, v)
        v = nodes[v].parent
    c.kv_nodes += cold
    return cold


@njit
def mark_computed(s: State, row: int) -> None:
    """The row's prefill is done: the nodes it computed can be reused by anyone."""
    nodes = s.nodes
    v = s.rows[row].node
    while v > 0 and nodes[v].state == COMPUTING and nodes[v].owner == row:
        nodes[v].state = CACHED
        nodes[v].owner = -1
        v = nodes[v].parent


@njit
def mark_computed_above(s: State, row: int) -> None:
    """Nodes this row still owned and others reference count as cached (see ``release``)."""
    nodes = s.nodes
    v = s.rows[row].node
    while v > 0:
        if nodes[v].state == COMPUTING and nodes[v].owner == row:
            nodes[v].state = CACHED
            nodes[v].owner = -1
        elif nodes[v].state == CACHED:
            break
        v = nodes[v].parent


@njit
def release(s: State, row: int) -> None:
    """Drop the row's references; nodes nobody needs stay cached until evicted. A node still being computed for this row
    vanishes with it, unless others wait for it: then it counts as cached, since one of them computes it."""
    c = s.scalars[0]
    nodes = s.nodes
    v = s.rows[row].node
    holding = True
    while v > 0 and holding:
        mine = nodes[v].state == COMPUTING and nodes[v].owner == row
        nodes[v].refs -= 1
        if nodes[v].refs > 0:
            holding = False
        elif mine:
            nodes[v].state = COLD
            nodes[v].owner = -1
            c.kv_nodes -= nodes[v].segment
        else:
            _lru_push(s, v)
        v = nodes[v].parent
    if not holding:
        mark_computed_above(s, row)
