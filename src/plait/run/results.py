"""Reading result files, whoever wrote them: the Batch API, vLLM run-batch, Plait (the live file too)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from plait.errors import InputError

_PLACE = re.compile(r"^([^\n]+?:\d+): ")
"""``file:line:`` in front of a message about a line of input."""
TRUNCATED = "length"
"""Finish reason of an answer that was cut off."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a result file."""

    custom_id: str | None
    ok: bool
    """True only for an answer with status 200."""
    status_code: int | None
    body: dict[str, Any] | None
    code: str | None
    message: str
    """Why it failed; empty for an answer."""
    finish_reasons: tuple[str, ...]

    @property
    def truncated(self) -> bool:
        """Whether the answer ends where the token limit was."""
        return TRUNCATED in self.finish_reasons


@dataclass(slots=True)
class ErrorCount:
    """How often a message occurred, and where it can be looked up."""

    message: str
    count: int
    custom_id: str | None
    """Of the first row that has it."""
    place: str = ""
    """``file:line`` of that row, where its message tells."""


def read_results(path: str | Path) -> Iterator[Result]:
    """The results of a file, one by one. Raises InputError naming the line for one that is no result."""
    with Path(path).open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip() or raw.startswith(b'{"plait":'):
                continue
            yield read_result(raw, f"{path}:{number}")


def read_result(raw: bytes, place: str) -> Result:
    """One line as a result. In order: an ``error`` means failed, then a status other than 200; else it is an answer."""
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as invalid:
        raise InputError(f"{place}: not valid JSON ({invalid}); a result line is needed") from None
    if not isinstance(line, dict) or "custom_id" not in line or not ("response" in line or "error" in line):
        raise InputError(f"{place}: not a result line (custom_id with response or error is needed)")
    response, error = line.get("response"), line.get("error")
    response = response if isinstance(response, dict) else {}
    body, status_code = response.get("body"), response.get("status_code")
    body = body if isinstance(body, dict) else None
    custom_id = line["custom_id"] if isinstance(line["custom_id"], str) else None
    if error is not None:
        code, message = _fault(error)
    elif status_code != 200:
        code, message = _fault(body if body is not None else f"status {status_code}")
    elif body is None:
        code, message = None, "status 200 without a body"
    else:
        return Result(custom_id, True, 200, body, None, "", _finish_reasons(body))
    return Result(custom_id, False, status_code, body, code, message, ())


def top_errors(results: Iterable[Result], limit: int = 10) -> list[ErrorCount]:
    """The most frequent messages of failed results, most frequent first; the same message about several lines of input
    counts as one."""
    found: dict[str, ErrorCount] = {}
    for result in results:
        if not result.ok:
            place = _PLACE.match(result.message)
            message = result.message[place.end() :] if place else result.message
            entry = found.setdefault(message, ErrorCount(message, 0, result.custom_id, place[1] if place else ""))
            entry.count += 1
    return sorted(found.values(), key=lambda entry: -entry.count)[:limit]


def _fault(error: object) -> tuple[str | None, str]:
    """Code and message of an error in any of its shapes: text, an object, an object wrapped in ``error``."""
    while isinstance(error, dict) and isinstance(error.get("error"), dict | str):
        error = error["error"]
    if not isinstance(error, dict):
        return None, str(error)
    code = error.get("code")
    message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
    return None if code is None else str(code), str(message)


def _finish_reasons(body: dict[str, Any]) -> tuple[str, ...]:
    choices = body.get("choices")
    found = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)] if choices else []
    return tuple(reason for reason in found if isinstance(reason, str))
