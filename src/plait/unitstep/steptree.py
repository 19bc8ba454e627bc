"""Memory usage at every coming step as a tree: admission in O(log longest output), however many requests run.

The tree holds usage + step of each step of a span. A request started at t adds s - t + e at every step e up to its end,
so a range is raised by shift + adds x e with adds 0 or 1: the later step gains more. A node knows its greatest step and
for how many more adds that stays the greatest (``SLACK``); only where that runs out are its children compared anew (a
kinetic segment tree). As usage only falls after a completion, the greatest of a range is at a completion or at its end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait._numba import njit
from plait.table import I64

TOP, AT, SLACK, ADDS, SHIFT = range(5)
"""Columns of a node: greatest usage + step, its step, adds until another step overtakes it, raises not yet passed on to
the children."""
BASE = 0
ENDLESS = 1 << 61
LONGEST = 1 << 18
"""Longest output that a tree is made for: it takes 80 to 160 bytes a step of it."""


class StepTree(NamedTuple):
    """Usage at the steps BASE + 1 .. BASE + size; leaf k, node size + k, is step BASE + 1 + k."""

    nodes: I64  # [2 size, 5] node v has the children 2 v and 2 v + 1
    ending: I64  # [size] requests that complete at the step
    state: I64  # [1] BASE


def new_step_tree(longest: int) -> StepTree:
    """Nothing runs; the coming step is 1. ``longest``: greatest number of steps that a request runs."""
    size = 1 << max(1, int(2 * longest - 1).bit_length())
    tree = StepTree(np.zeros((2 * size, 5), np.int64), np.zeros(size, np.int64), np.zeros(1, np.int64))
    _build(tree, np.zeros(size, np.int64))
    return tree


@njit
def _build(tree: StepTree, usage: I64) -> None:
    """All nodes anew from the usage at each step of the span, int64 [size]."""
    nodes, size = tree.nodes, len(tree.ending)
    for k in range(size):
        step = tree.state[BASE] + 1 + k
        nodes[size + k, TOP] = usage[k] + step
        nodes[size + k, AT] = step
        nodes[size + k, SLACK] = ENDLESS
    nodes[:, ADDS] = 0
    nodes[:, SHIFT] = 0
    for v in range(size - 1, 0, -1):
        _compare(nodes, v)


@njit
def move_on(tree: StepTree, t: int, longest: int) -> None:
    """Make room for ``longest`` steps after t: the span begins behind t once its end comes near. O(1) a step."""
    nodes, size = tree.nodes, len(tree.ending)
    gone = t - tree.state[BASE]
    if gone + longest <= size:
        return
    for v in range(1, size):
        _pass_on(nodes, v)
    usage = np.zeros(size, np.int64)
    for k in range(gone, size):
        usage[k - gone] = nodes[size + k, TOP] - nodes[size + k, AT]
        tree.ending[k - gone] = tree.ending[k]
    tree.ending[max(0, size - gone) :] = 0
    tree.state[BASE] = t
    _build(tree, usage)


@njit
def greatest(tree: StepTree, first: int, last: int) -> tuple[int, int]:
    """Greatest usage + step of the steps first..last (at least one), and the step where it is reached."""
    nodes = tree.nodes
    left, right = _opened(tree, first, last)
    top, at = -ENDLESS, first
    while left < right:
        if left & 1:
            if nodes[left, TOP] > top:
                top, at = nodes[left, TOP], nodes[left, AT]
            left += 1
        if right & 1:
            right -= 1
            if nodes[right, TOP] > top:
                top, at = nodes[right, TOP], nodes[right, AT]
        left >>= 1
        right >>= 1
    return top, at


@njit
def lift(tree: StepTree, first: int, last: int, adds: int, shift: int) -> None:
    """Raise usage at each step e of first..last by adds x e + shift. Nothing if there is no step."""
    if first > last:
        return
    nodes = tree.nodes
    left, right = _opened(tree, first, last)
    begin, end = left, right
    while left < right:
        if left & 1:
            _raise_settled(nodes, left, adds, shift)
            left += 1
        if right & 1:
            right -= 1
            _raise_settled(nodes, right, adds, shift)
        left >>= 1
        right >>= 1
    height = 1
    while (begin >> height) > 0:
        if ((begin >> height) << height) != begin:
            _compare(nodes, begin >> height)
        if ((end >> height) << height) != end:
            _compare(nodes, (end - 1) >> height)
        height += 1


@njit
def add(tree: StepTree, s: int, o: int, t: int) -> None:
    """A request starts at t."""
    lift(tree, t + 1, t + o, 1, s - t)
    tree.ending[t + o - tree.state[BASE] - 1] += 1


@njit
def tree_not_before(tree: StepTree, s: int, o: int, t: int, kv_tokens: int) -> int:
    """A lower bound > t on the first feasible start, or t itself if the request may start at step t."""
    top, at = greatest(tree, t + 1, t + o)
    return bound_by(tree, top + s - t - kv_tokens, at, o, t)


@njit
def bound_by(tree: StepTree, excess: int, at: int, o: int, t: int) -> int:
    """t, or a lower bound > t on the start of a request that would exceed the budget by ``excess`` at step ``at``.

    Either that many steps later it fits, or ``at`` has passed; at its own end it exceeds until one completes before.
    """
    if excess <= 0:
        return t
    if at < t + o:
        return min(t + excess, at)
    return next_ending(tree, at) - o + 1


@njit
def next_ending(tree: StepTree, step: int) -> int:
    """First completion at ``step`` or later; the end of the span where there is none."""
    k = step - tree.state[BASE] - 1
    while k < len(tree.ending) and tree.ending[k] == 0:
        k += 1
    return int(k + tree.state[BASE] + 1)


@njit
def _opened(tree: StepTree, first: int, last: int) -> tuple[int, int]:
    """Nodes [left, right) of the leaves of first..last, with all raises above the range's own nodes passed on."""
    nodes, size = tree.nodes, len(tree.ending)
    left = first - tree.state[BASE] - 1 + size
    right = last - tree.state[BASE] + size
    height = 0
    while (size >> height) > 1:
        height += 1
    for h in range(height, 0, -1):
        if ((left >> h) << h) != left:
            _pass_on(nodes, left >> h)
        if ((right >> h) << h) != right:
            _pass_on(nodes, (right - 1) >> h)
    return left, right


@njit
def _raise(nodes: I64, v: int, adds: int, shift: int) -> None:
    node = nodes[v]
    node[TOP] += adds * node[AT] + shift
    node[SLACK] -= adds
    node[ADDS] += adds
    node[SHIFT] += shift


@njit
def _pass_on(nodes: I64, v: int) -> None:
    """Hand the raises of a node to its children."""
    adds, shift = nodes[v, ADDS], nodes[v, SHIFT]
    if adds != 0 or shift != 0:
        _raise(nodes, 2 * v, adds, shift)
        _raise(nodes, 2 * v + 1, adds, shift)
        nodes[v, ADDS] = 0
        nodes[v, SHIFT] = 0


@njit
def _compare(nodes: I64, v: int) -> None:
    """Greatest step of a node from its children, whose steps ascend: the right one's never falls behind again."""
    left, right = nodes[2 * v], nodes[2 * v + 1]
    slack = min(left[SLACK], right[SLACK])
    ahead = left[TOP] - right[TOP]
    if ahead > 0:
        nodes[v, TOP], nodes[v, AT] = left[TOP], left[AT]
        slack = min(slack, ahead // (right[AT] - left[AT]))
    else:
        nodes[v, TOP], nodes[v, AT] = right[TOP], right[AT]
    nodes[v, SLACK] = slack


@njit
def _raise_settled(nodes: I64, v: int, adds: int, shift: int) -> None:
    """Raise a whole node and set right whatever was overtaken below it."""
    _raise(nodes, v, adds, shift)
    if nodes[v, SLACK] < 0:
        _settle(nodes, v)


@njit
def _settle(nodes: I64, v: int) -> None:
    _pass_on(nodes, v)
    if nodes[2 * v, SLACK] < 0:
        _settle(nodes, 2 * v)
    if nodes[2 * v + 1, SLACK] < 0:
        _settle(nodes, 2 * v + 1)
    _compare(nodes, v)
