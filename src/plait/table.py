"""The request table: one row a request, columns as NumPy arrays, token ids in one flat column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait.errors import InputError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

NO_LIMIT = np.iinfo(np.int64).max // 4
"""``max_tokens`` of a request without a cap."""


@dataclass(frozen=True, slots=True)
class RequestTable:
    """Planning data of a job. True output lengths are never a column here: an exact run passes them through
    ``plait.lengths`` like any other estimate."""

    prompt_tokens: I64  # [n] prompt length in tokens, >= 1
    max_tokens: I64  # [n] cap on generated tokens, >= 1; NO_LIMIT where there is none
    arrival_s: F64  # [n] 0 for a backlog
    priority: I64  # [n] higher first among otherwise free choices; 0 by default
    deadline_s: F64  # [n] seconds after the start; inf where there is none
    min_tokens: I64  # [n] tokens that will be generated at least, <= max_tokens; 0 where nothing says so
    tokens: I32 | None = None  # [offsets[-1]] token ids of all prompts, flat
    offsets: I64 | None = None  # [n + 1] prompt i is tokens[offsets[i]:offsets[i + 1]]

    @property
    def n(self) -> int:
        """Number of requests."""
        return len(self.prompt_tokens)

    @staticmethod
    def of(
        prompt_tokens: npt.ArrayLike,
        max_tokens: npt.ArrayLike | None = None,
        arrival_s: npt.ArrayLike | None = None,
        priority: npt.ArrayLike | None = None,
        deadline_s: npt.ArrayLike | None = None,
        tokens: I32 | None = None,
        offsets: I64 | None = None,
        min_tokens: npt.ArrayLike | None = None,
    ) -> RequestTable:
        """Build a table with defaults for absent columns. Raises InputError naming the first bad row (0-based)."""
        prompt = _whole(prompt_tokens, "prompt_tokens")
        n = len(prompt)
        table = RequestTable(
            prompt_tokens=prompt,
            max_tokens=np.full(n, NO_LIMIT, np.int64) if max_tokens is None else _whole(max_tokens, "max_tokens"),
            arrival_s=np.zeros(n) if arrival_s is None else np.asarray(arrival_s, np.float64),
            priority=np.zeros(n, np.int64) if priority is None else _whole(priority, "priority"),
            deadline_s=np.full(n, np.inf) if deadline_s is None else np.asarray(deadline_s, np.float64),
            min_tokens=np.zeros(n, np.int64) if min_tokens is None else _whole(min_tokens, "min_tokens"),
            tokens=tokens,
            offsets=offsets,
        )
        table.check()
        return table

    def check(self) -> None:
        """Raise InputError for the first row that is not usable."""
        for name in ("max_tokens", "arrival_s", "priority", "deadline_s", "min_tokens"):
            if len(getattr(self, name)) != self.n:
                raise InputError(f"column {name} has {len(getattr(self, name))} rows, prompt_tokens has {self.n}")
        for name in ("prompt_tokens", "max_tokens"):
            bad = np.flatnonzero(getattr(self, name) < 1)
            if len(bad):
                raise InputError(f"row {bad[0]}: {name} is {getattr(self, name)[bad[0]]}; an integer >= 1 is needed")
        bad = np.flatnonzero((self.min_tokens < 0) | (self.min_tokens > self.max_tokens))
        if len(bad):
            raise InputError(
                f"row {bad[0]}: min_tokens is {self.min_tokens[bad[0]]}; 0 to max_tokens ({self.max_tokens[bad[0]]}) "
                "is needed"
            )
        bad = np.flatnonzero(~(self.arrival_s >= 0) | np.isinf(self.arrival_s))
        if len(bad):
            raise InputError(f"row {bad[0]}: arrival_s is {self.arrival_s[bad[0]]}; a number >= 0 is needed")
        bad = np.flatnonzero(np.isnan(self.deadline_s))
        if len(bad):
            raise InputError(f"row {bad[0]}: deadline_s is nan; seconds after the start are needed, inf for none")
        if self.tokens is not None:
            if self.offsets is None or len(self.offsets) != self.n + 1 or self.offsets[-1] != len(self.tokens):
                raise InputError("token column and offsets do not fit together")
            if np.any(np.diff(self.offsets) != self.prompt_tokens):
                raise InputError("prompt_tokens and the token column disagree")


def _whole(values: npt.ArrayLike, name: str) -> I64:
    """Values as int64 [n]; InputError names the first row that is not a whole number."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"column {name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    try:
        as_float = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"column {name} holds something that is not a number: {error}") from None
    bad = np.flatnonzero(~np.isfinite(as_float) | (as_float != np.floor(as_float)))
    if len(bad):
        raise InputError(f"row {bad[0]}: {name} is {array[bad[0]]}; a whole number is needed")
    return as_float.astype(np.int64)
