"""Exact schedules of the unit-step model: a list of requests in, the start step of each out.

A request started at step p holds s + j tokens at step p + j, j = 1..o, and completes at p + o. Usage between two
completions only grows, so it peaks at completions: an admission is checked at every completion it overlaps and at its
own. A waiting request may become feasible strictly between two completions; ``not_before`` finds that step. What runs
is kept in arrays (``running.py``) or, where much runs at once or prefixes are shared, in a tree (``steptree.py``).
"""

from __future__ import annotations

import numpy as np

from plait.errors import CapacityError, InputError, UsageError
from plait.table import F64, I64
from plait.tree.prefix import PrefixTree
from plait.unitstep.decoder import list_starts
from plait.unitstep.sharing import new_prefixes, own_tokens
from plait.unitstep.steptree import LONGEST, new_step_tree

TREE_RUNNING = 150
"""Requests running at once, about, from which the tree is faster than the arrays."""
TREE_ROWS = 1_200
"""Fewer requests are done before a tree is built."""


def check_requests(prompt_tokens: I64, output_tokens: I64, kv_tokens: int) -> None:
    """Raise InputError for a length that is no whole number above 0 and CapacityError for a request that never fits,
    naming the row."""
    if not kv_tokens >= 1 or kv_tokens % 1 != 0:
        raise CapacityError(f"the KV budget is {kv_tokens} tokens; a whole number >= 1 is needed")
    if len(prompt_tokens) != len(output_tokens) or len(prompt_tokens) == 0:
        raise InputError(f"{len(prompt_tokens)} prompt and {len(output_tokens)} output lengths; one of each a request")
    for name, column in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        bad = np.flatnonzero(~(column >= 1))
        if len(bad):
            raise InputError(f"row {bad[0]}: {name} is {column[bad[0]]}; an integer >= 1 is needed")
        if column.dtype.kind not in "iu":
            raise InputError(f"{name} is an array of {column.dtype}; integers are needed")
    bad = np.flatnonzero(prompt_tokens > kv_tokens - output_tokens)
    if len(bad):
        row = bad[0]
        raise CapacityError(
            f"row {row}: {prompt_tokens[row]} prompt + {output_tokens[row]} output tokens exceed the KV budget of "
            f"{kv_tokens}; raise --kv-tokens or drop the row"
        )


def area(prompt_tokens: I64, output_tokens: I64) -> F64:
    """Memory area of each request: tokens held summed over its steps, s o + o (o + 1) / 2, float64 [n]."""
    o = output_tokens.astype(np.float64)
    return prompt_tokens * o + o * (o + 1) / 2


def running_at_once(s: I64, o: I64, kv_tokens: int) -> float:
    """About how many requests run at once while the many small ones do: the budget over the median size."""
    sizes = (s + o)[:: max(1, len(s) // 256)]
    return kv_tokens / float(np.sort(sizes)[len(sizes) // 2])


def decode(
    s: I64,
    o: I64,
    order: I64,
    key: F64,
    kv_tokens: int,
    window: int,
    kappa: float,
    every_step: bool = False,
    by_tree: bool | None = None,
) -> I64:
    """Start step of each request, int64 [n], by list scheduling of ``order``.

    At each step the list is passed once: what fits starts; behind the first misfit (the head) up to ``window`` - 1
    more misfits are passed over, and only rows with key <= kappa x key[head] may start (kappa >= 1, key >= 0).
    window 1 is the strict list. ``every_step`` tries each step instead of jumping to the next one that can matter;
    ``by_tree`` says what keeps the running requests (None: what is faster). Neither changes the result.
    """
    longest = int(np.max(o))
    if by_tree is None:
        worth_it = len(s) >= TREE_ROWS and running_at_once(s, o, kv_tokens) >= TREE_RUNNING
        by_tree = worth_it and longest <= LONGEST
    tree = new_step_tree(longest) if by_tree else None
    return list_starts(s, o, order, key, kv_tokens, window, kappa, every_step, tree, None)


def decode_shared(
    s: I64,
    o: I64,
    order: I64,
    key: F64,
    kv_tokens: int,
    window: int,
    kappa: float,
    prefixes: PrefixTree,
    every_step: bool = False,
) -> I64:
    """``decode`` where rows that run at once hold the nodes of ``prefixes`` that they share only once.

    Raises UsageError for an output longer than steptree.LONGEST.
    """
    longest = int(np.max(o))
    if longest > LONGEST:
        raise UsageError(
            f"row {np.argmax(o)}: {longest:,} output tokens; where prompts are shared up to {LONGEST:,} are possible: "
            "drop the row, or the columns group and shared_tokens"
        )
    tree, held = new_step_tree(longest), new_prefixes(prefixes)
    own = own_tokens(s, prefixes)
    return list_starts(own, o, order, key, kv_tokens, window, kappa, every_step, tree, held)


def schedule(
    prompt_tokens: I64,
    output_tokens: I64,
    order: I64,
    kv_tokens: int,
    key: F64 | None = None,
    window: int = 1,
    kappa: float = np.inf,
    every_step: bool = False,
) -> I64:
    """Checked form of ``decode``: int64 [n] start steps. Without a key, overtaking is bounded by the window alone.

    Raises InputError or CapacityError naming the first row that cannot be scheduled.
    """
    check_requests(prompt_tokens, output_tokens, kv_tokens)
    used = np.ones(len(prompt_tokens)) if key is None else key
    return decode(prompt_tokens, output_tokens, order, used, kv_tokens, window, kappa, every_step)


def total_completion(starts: I64, output_tokens: I64) -> int:
    """TEL: the sum of completion steps."""
    return int(np.sum(starts + output_tokens))
