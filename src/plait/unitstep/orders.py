"""Lists and overtaking rules of the unit-step model, by policy name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from plait.errors import UsageError
from plait.table import F64, I64
from plait.unitstep.kernel import area, check_requests, decode
from plait.unitstep.lp import lp_order
from plait.unitstep.search import improve
from plait.unitstep.sortedf import DP_ROWS, QUANTILE_ROWS, dp_order, quantile_order, sorted_f_order, swap_order

WINDOW = 64
KAPPA = 1.3
DISPERSED_KAPPA = 1.8
BUCKET_RATIO = 1.15
GOLDEN = 0.6180339887498949


class Listing(NamedTuple):
    """An order and how far it may be overtaken."""

    order: I64
    key: F64
    window: int = 1
    kappa: float = 1.0


def fcfs(s: I64, o: I64) -> Listing:
    """Submission order, strict."""
    return Listing(np.arange(len(s)), np.arange(len(s), dtype=np.float64))


def mc_sf(s: I64, o: I64) -> Listing:
    """Shortest output first, strict: stops at the first misfit."""
    return _by(o.astype(np.float64))


def mc_sf_skip(s: I64, o: I64) -> Listing:
    """Shortest output first; any later request that fits may start."""
    return _by(o.astype(np.float64), len(s), np.inf)


def size(s: I64, o: I64) -> Listing:
    """Smallest s + o first, strict."""
    return _by((s + o).astype(np.float64))


def by_area(s: I64, o: I64) -> Listing:
    """Smallest memory area first, strict."""
    return _by(area(s, o))


def overtaking(s: I64, o: I64) -> Listing:
    """Smallest memory area first, a blocked head overtaken by up to KAPPA times its area."""
    return _by(area(s, o), WINDOW, KAPPA)


def dispersed(
    s: I64, o: I64, bucket_ratio: float = BUCKET_RATIO, window: int = WINDOW, kappa: float = DISPERSED_KAPPA
) -> Listing:
    """Area order with similar requests spread by a golden-ratio shuffle inside buckets of ``bucket_ratio``, so that
    they do not start, and end, in waves."""
    areas = area(s, o)
    ascending = np.argsort(areas, kind="stable")
    bucket = np.floor(np.log(areas[ascending]) / np.log(bucket_ratio))
    shuffle = np.modf(np.arange(len(s)) * GOLDEN)[0]
    return Listing(ascending[np.argsort(bucket + shuffle)], areas, window, kappa)


def _by(key: F64, window: int = 1, kappa: float = 1.0) -> Listing:
    return Listing(np.argsort(key, kind="stable"), key, window, kappa)


LISTS: dict[str, Callable[[I64, I64], Listing]] = {
    "fcfs": fcfs,
    "mc-sf": mc_sf,
    "mc-sf-skip": mc_sf_skip,
    "size": size,
    "area": by_area,
}
SOLVERS: dict[str, Callable[[I64, I64, int], I64]] = {
    "sorted-f": sorted_f_order,
    "sorted-f-dp": dp_order,
    "sorted-f-swap": swap_order,
    "sorted-f-quantile": quantile_order,
    "sorted-lp": lp_order,
}
"""Orders that depend on the budget, all strict lists."""
NAMES = ("latency", "dispersed", *LISTS, *SOLVERS)
PORTFOLIO_ROWS = 5_000
"""Beyond, ``latency`` tries only lists whose time hardly grows faster than the number of requests."""
LP_ROWS = 2_000
WIDE_ROWS = 200_000
"""Beyond, a window of 1,024 takes too long."""
WIDE = ((1.15, 256, 2.0), (1.15, 1_024, 2.0))
VARIANTS = ((1.0001, 256, 2.2), (1.0001, 64, 2.2), (1.0001, 256, 1.3), (1.3, 64, 1.4))
"""Bucket ratio, window and kappa of the further dispersed lists that ``latency`` tries, before and after the named."""


def starts_of(policy: str, s: I64, o: I64, kv_tokens: int, keep_going: Callable[[], bool] | None = None) -> I64:
    """Start steps of a policy, int64 [n].

    ``latency`` is the best of a portfolio that holds every other policy affordable at n; with ``keep_going`` it stops
    there once that is false, and else goes on improving until it is.
    Raises UsageError for an unknown policy or one that cannot take n rows, and what ``check_requests`` raises.
    """
    check_requests(s, o, kv_tokens)
    if policy == "latency":
        return _best(s, o, kv_tokens, keep_going)
    return _decoded(listing(policy, s, o, kv_tokens), s, o, kv_tokens)


def listing(policy: str, s: I64, o: I64, kv_tokens: int) -> Listing:
    """List of a named policy other than ``latency``. Raises UsageError where there is none."""
    if policy == "dispersed":
        return dispersed(s, o)
    if policy in LISTS:
        return LISTS[policy](s, o)
    if policy in SOLVERS:
        return Listing(SOLVERS[policy](s, o, kv_tokens), np.zeros(len(s)))
    raise UsageError(f"policy '{policy}' has no unit-step form; known: {', '.join(NAMES)}")


def portfolio(n: int) -> tuple[str, ...]:
    """Named policies whose time is affordable for n requests."""
    names = ["fcfs", "mc-sf", "size", "area"]
    if n >= QUANTILE_ROWS:
        names.append("sorted-f-quantile")
    if n <= PORTFOLIO_ROWS:
        names += ["mc-sf-skip", "sorted-f-swap"]
    if n <= LP_ROWS:
        names.append("sorted-lp")
    if n <= DP_ROWS:
        names.append("sorted-f-dp")
    return tuple(names)


def _best(s: I64, o: I64, kv_tokens: int, keep_going: Callable[[], bool] | None) -> I64:
    """Best of the portfolio, those that gain most first, improved while the clock allows."""
    best = _decoded(dispersed(s, o), s, o, kv_tokens)
    wide = WIDE if len(s) <= WIDE_ROWS else WIDE[:1]
    tries: list[Callable[[], Listing]] = [partial(dispersed, s, o, *variant) for variant in wide]
    tries.append(partial(overtaking, s, o))
    tries += [partial(listing, name, s, o, kv_tokens) for name in portfolio(len(s))]
    tries += [partial(dispersed, s, o, *variant) for variant in VARIANTS]
    for turn in tries:
        if keep_going is not None and not keep_going():
            return best
        starts = _decoded(turn(), s, o, kv_tokens)
        if np.sum(starts) < np.sum(best):
            best = starts
    return best if keep_going is None else improve(s, o, best, kv_tokens, keep_going)


def _decoded(found: Listing, s: I64, o: I64, kv_tokens: int) -> I64:
    return decode(s, o, found.order, found.key, kv_tokens, found.window, found.kappa)
