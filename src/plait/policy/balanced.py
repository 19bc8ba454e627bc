"""Between throughput and latency: the orders of ``--goal throughput``, leaning towards requests that are soon done."""

from __future__ import annotations

import numpy as np

from plait.policy.base import Order, View
from plait.policy.blend import depth_first_long_first, loose_units, sides, units
from plait.policy.latency import aged, machine_time_s, started_in_time
from plait.policy.units import shuffled_units
from plait.table import F64, I64


def balanced(view: View, weight: float = 0.5) -> Order:
    """Units (prefix groups that are worth keeping together) by a mean of two ranks: their place in the throughput order
    and, with ``weight``, in ascending machine time a request. The engine is kept as busy as under ``blend``, of which
    weight 0 is the order: on an overlapped engine both sides stay, each in this order."""
    tree, rows = view.tree, np.arange(view.table.n)
    overlapped = view.step_time.overlapped >= 0.5
    unit = loose_units(view) if overlapped else units(view)
    if overlapped:
        busy = shuffled_units(tree, unit, view.seed)
    else:
        busy = depth_first_long_first(tree, view.expected_output_tokens)
    place = np.empty(len(rows), np.int64)
    place[busy] = rows
    size = np.bincount(unit)
    first = np.full(len(size), len(rows))
    np.minimum.at(first, unit, place)
    soon = aged(started_in_time(machine_time_s(view), view), view)
    score = (1.0 - weight) * _rank(first, size) + weight * _rank(np.bincount(unit, soon) / size, size)
    order = np.lexsort((place, unit, score[unit])).astype(np.int64)
    return sides(view, order, unit) if overlapped else Order(order, finish_groups=True)


def _rank(key: F64 | I64, size: I64) -> F64:
    """Rows of the units before each one in ascending order of ``key``, float64 [units]."""
    order = np.argsort(key, kind="stable")
    before = np.empty(len(key))
    before[order] = np.cumsum(size[order]) - size[order]
    return before
