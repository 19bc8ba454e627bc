"""Lists and overtaking rules of the unit-step model, by policy name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plait.errors import UsageError
from plait.table import F64, I64
from plait.unitstep.kernel import area, check_requests, decode, total_completion
from plait.unitstep.search import local_search
from plait.unitstep.sortedf import swap_order

WINDOW = 64
KAPPA = 1.3
DISPERSED_KAPPA = 1.4
DISPERSED_FROM = 5_000
"""Requests from which waves of similar requests cost more than a dispersed list (research.md §B)."""
BUCKET_RATIO = 1.3
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


def dispersed(s: I64, o: I64) -> Listing:
    """Area order with similar requests spread by a golden-ratio shuffle inside buckets of BUCKET_RATIO, so that they
    do not start, and end, in waves."""
    areas = area(s, o)
    ascending = np.argsort(areas, kind="stable")
    bucket = np.floor(np.log(areas[ascending]) / np.log(BUCKET_RATIO))
    shuffle = np.modf(np.arange(len(s)) * GOLDEN)[0]
    return Listing(ascending[np.lexsort((shuffle, bucket))], areas, WINDOW, DISPERSED_KAPPA)


def sorted_f_swap(s: I64, o: I64, kv_tokens: int) -> Listing:
    """Sorted-F with local swap search, strict."""
    order = swap_order(s, o, kv_tokens)
    return Listing(order, np.zeros(len(s)))


def _by(key: F64, window: int = 1, kappa: float = 1.0) -> Listing:
    return Listing(np.argsort(key, kind="stable"), key, window, kappa)


LISTS: dict[str, Callable[[I64, I64], Listing]] = {
    "fcfs": fcfs,
    "mc-sf": mc_sf,
    "mc-sf-skip": mc_sf_skip,
    "size": size,
    "area": by_area,
}
PORTFOLIO = (overtaking, dispersed, fcfs, mc_sf, mc_sf_skip, size, by_area)
PORTFOLIO_ROWS = 5_000
"""Up to this many requests ``latency`` tries every list and keeps the best; beyond, the dispersed one."""


def starts_of(policy: str, s: I64, o: I64, kv_tokens: int, keep_going: Callable[[], bool] | None = None) -> I64:
    """Start steps of a policy, int64 [n]. ``latency`` goes on searching while ``keep_going()``, where one is given.

    Raises UsageError for an unknown policy, and what ``check_requests`` raises.
    """
    check_requests(s, o, kv_tokens)
    if policy == "latency":
        return _best(s, o, kv_tokens, keep_going)
    if policy == "sorted-f-swap":
        return _decoded(sorted_f_swap(s, o, kv_tokens), s, o, kv_tokens)
    if policy not in LISTS:
        known = f"latency, sorted-f-swap, {', '.join(LISTS)}"
        raise UsageError(f"policy '{policy}' has no unit-step form; known: {known}")
    return _decoded(LISTS[policy](s, o), s, o, kv_tokens)


def _best(s: I64, o: I64, kv_tokens: int, keep_going: Callable[[], bool] | None) -> I64:
    """Best list of the portfolio, then of its neighbourhood."""
    listings = [dispersed(s, o)]
    if len(s) <= PORTFOLIO_ROWS:
        listings = [*(listing(s, o) for listing in PORTFOLIO), sorted_f_swap(s, o, kv_tokens)]
    tried = [_decoded(listing, s, o, kv_tokens) for listing in listings]
    best = int(np.argmin([total_completion(starts, o) for starts in tried]))
    if keep_going is None:
        return tried[best]
    chosen = listings[best]
    return local_search(s, o, chosen.order, chosen.key, kv_tokens, chosen.window, chosen.kappa, keep_going)


def _decoded(listing: Listing, s: I64, o: I64, kv_tokens: int) -> I64:
    return decode(s, o, listing.order, listing.key, kv_tokens, listing.window, listing.kappa, False)
