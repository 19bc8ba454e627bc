"""How urgent a request is: ``priority`` and ``deadline`` in its metadata, or as keys of its row beside the body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from plait.data.problems import Fault, shown

UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smhd]?)\s*", re.ASCII)
LARGEST_PRIORITY = 2**31 - 2
LARGEST_DEADLINE_S = 1e9
"""A larger number is a point in time in Unix seconds, which nobody means to be 30 years from the start."""
DEADLINE_NEEDED = 'seconds from the start (90, "30m", "2h") or an ISO 8601 time (2031-05-01T06:00:00Z) is needed'


def duration_s(text: str) -> float | None:
    """Seconds of a duration such as 3600, 90s, 30m, 2h or 1d; None if it is none or not above 0."""
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    return seconds if 0 < seconds < LARGEST_DEADLINE_S else None


def deadline_s(value: object, started_unix_s: float) -> float | None:
    """Seconds after the start of a deadline as users write it; None if it cannot be read.

    A time without an offset from UTC is local time. A time that has passed is negative."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 < value < LARGEST_DEADLINE_S else None
    if not isinstance(value, str):
        return None
    seconds = duration_s(value)
    if seconds is not None:
        return seconds
    try:
        return datetime.fromisoformat(value.strip()).timestamp() - started_unix_s
    except (ValueError, OverflowError, OSError):
        return None


def priority(value: object) -> int | None:
    """A priority as users write it, a whole number or its digits; None if it cannot be read."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if abs(number) <= LARGEST_PRIORITY else None


def settings(metadata: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Where a row says how urgent it is: its own keys, those below its ``metadata``, or (first) its body's
    ``metadata``."""
    found: dict[str, Any] = {}
    for each in (metadata, metadata.get("metadata"), body.get("metadata")):
        if isinstance(each, Mapping):
            found |= {name: each[name] for name in ("deadline", "priority") if each.get(name) is not None}
    return found


def faults(metadata: Mapping[str, Any], body: Mapping[str, Any]) -> list[Fault]:
    """What cannot be read."""
    found, wrong = settings(metadata, body), []
    if "deadline" in found and deadline_s(found["deadline"], 0.0) is None:
        message = f"metadata.deadline is {shown(found['deadline'])}; {DEADLINE_NEEDED}"
        wrong.append(Fault("invalid_value", message, "metadata.deadline"))
    if "priority" in found and priority(found["priority"]) is None:
        message = f"metadata.priority is {shown(found['priority'])}; a whole number is needed, higher goes first"
        wrong.append(Fault("invalid_value", message, "metadata.priority"))
    return wrong
