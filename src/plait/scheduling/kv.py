"""The KV cache as the scheduler sees it: whole blocks, shared nodes counted once, least recently used prefixes evicted.

A node is referenced while a running row lies in its subtree. Ancestors of a referenced node are referenced, so the
nodes in KV always form a tree with the root, and a walk from a row upwards may stop at the first referenced node."""

from __future__ import annotations

from plait._numba import njit
from plait.scheduling.state import CACHED, COLD, COMPUTING, PREFILL, RIGHT, Records, nodes_of, phase_of, rows_of


@njit
def blocks(tokens: int, block: int) -> int:
    """Tokens rounded up to whole blocks."""
    return (tokens + block - 1) // block * block


@njit
def uncached(c: Records, row: int) -> tuple[int, int]:
    """(shared tokens that the row would have to prefill, cached tokens it would pin that are evictable now)."""
    nodes = nodes_of(c)
    cold = 0
    pinned = 0
    v = rows_of(c)[row].node
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
def growth(c: Records) -> int:
    """KV tokens of the blocks that the next step's output tokens open."""
    return int(c.block * phase_of(c)[c.step % c.block])


@njit
def _lru_push(c: Records, v: int) -> None:
    nodes_of(c)[v].prev = c.lru_newest
    nodes_of(c)[v].next = -1
    if c.lru_newest >= 0:
        nodes_of(c)[c.lru_newest].next = v
    else:
        c.lru_oldest = v
    c.lru_newest = v
    c.kv_evictable += nodes_of(c)[v].segment


@njit
def _lru_remove(c: Records, v: int) -> None:
    before, after = nodes_of(c)[v].prev, nodes_of(c)[v].next
    if before >= 0:
        nodes_of(c)[before].next = after
    else:
        c.lru_oldest = after
    if after >= 0:
        nodes_of(c)[after].prev = before
    else:
        c.lru_newest = before
    c.kv_evictable -= nodes_of(c)[v].segment


@njit
def evict(c: Records, tokens: int) -> None:
    """Drop unreferenced prefixes, least recently used first, until ``tokens`` are free or none is left."""
    while c.capacity - c.kv_nodes - c.kv_private < tokens and c.lru_oldest >= 0:
        v = c.lru_oldest
        _lru_remove(c, v)
        nodes_of(c)[v].state = COLD
        c.kv_nodes -= nodes_of(c)[v].segment


@njit
def acquire(c: Records, row: int) -> int:
    """Reference the row's nodes; cold ones become its to compute. Returns shared tokens it must prefill."""
    nodes = nodes_of(c)
    cold = 0
    v = rows_of(c)[row].node
    while v > 0:
        nodes[v].refs += 1
        if nodes[v].refs > 1:
            break
        if nodes[v].state == COLD:
            nodes[v].state = COMPUTING
            nodes[v].owner = row
            cold += nodes[v].segment
        else:
            _lru_remove(c, v)
        v = nodes[v].parent
    c.kv_nodes += cold
    return cold


@njit
def mark_computed(c: Records, row: int) -> None:
    """The row's prefill is done: the nodes it computed can be reused by anyone."""
    nodes = nodes_of(c)
    v = rows_of(c)[row].node
    while v > 0 and nodes[v].state == COMPUTING and nodes[v].owner == row:
        nodes[v].state = CACHED
        nodes[v].owner = -1
        v = nodes[v].parent


@njit
def _heir(c: Records, top: int) -> int:
    """A row in prefill below node ``top``, the first admitted of its side; -1 if none."""
    rows, nodes = rows_of(c), nodes_of(c)
    found = -1
    for tail in (c.tail_left, c.tail_right):
        row = tail
        while row >= 0:
            v = rows[row].node
            while v > top:
                v = nodes[v].parent
            if v == top and rows[row].status == PREFILL:
                found = row
            row = rows[row].prev
    return found


@njit
def _hand_over(c: Records, row: int) -> None:
    """Nodes this row was to compute and others need: one of those in prefill computes them instead. Where all of them
    decode already, the nodes are there."""
    nodes, rows = nodes_of(c), rows_of(c)
    v = rows[row].node
    while v > 0 and not (nodes[v].refs > 0 and nodes[v].state == COMPUTING and nodes[v].owner == row):
        if nodes[v].state == CACHED:
            return
        v = nodes[v].parent
    heir = _heir(c, v) if v > 0 else -1
    while v > 0 and nodes[v].state == COMPUTING and nodes[v].owner == row:
        if heir < 0:
            nodes[v].state = CACHED
        else:
            rows[heir].need += nodes[v].segment
            c.prefill_need += nodes[v].segment
            c.backlog += nodes[v].segment
            c.node_tokens += nodes[v].segment
            c.cached_tokens -= nodes[v].segment
            if rows[heir].side == RIGHT:
                c.backlog_right += nodes[v].segment
        nodes[v].owner = heir
        v = nodes[v].parent


@njit
def release(c: Records, row: int) -> None:
    """Drop the row's references; nodes nobody needs stay cached until evicted. A node still being computed for this row
    vanishes with it, unless others need it: then one of them computes it."""
    nodes = nodes_of(c)
    v = rows_of(c)[row].node
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
            _lru_push(c, v)
        v = nodes[v].parent
    if not holding:
        _hand_over(c, row)
