"""What can be wrong with a line of input: one record, one way to print it.

Codes are stable. Those of the Batch API are used where it has one: invalid_json_line, missing_required_parameter,
duplicate_custom_id, url_mismatch, model_mismatch, empty_file, too_many_tasks; from the endpoints: invalid_type,
invalid_value, unknown_parameter, unsupported_value, model_not_found, context_length_exceeded. Our own: not_an_object,
unsupported_format, unsupported_content, invalid_method, invalid_row, line_too_long, byte_order_mark, file_not_found,
unreadable_file, corrupt_file, file_too_large, kv_capacity_exceeded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from plait.errors import InputError

Severity = Literal["error", "warning"]

SHOWN_CHARACTERS = 60
"""Values and ids are cut to this length in messages."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with one line, before it is known where the line stands."""

    code: str
    message: str
    """What was got and what is allowed, without a final full stop."""
    param: str | None = None
    fix: str = ""
    """One sentence that says what to do; may be empty where the message says it all."""
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault with its place. ``row`` is -1 and ``line`` 0 where the whole file is meant."""

    row: int
    file: str
    line: int
    custom_id: str | None
    code: str
    param: str | None
    message: str
    fix: str
    severity: Severity

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        named = f" (custom_id {shown_id(self.custom_id)})" if self.custom_id is not None else ""
        kind = "warning: " if self.severity == "warning" else ""
        return f"{place}{named}: {kind}{self.code}: {self.message}." + (f" {self.fix}" if self.fix else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; row is null where the whole file is meant."""
        values = asdict(self)
        return values | {"row": None if self.row < 0 else self.row, "line": self.line or None}


def located(fault: Fault, row: int, file: str, line: int, custom_id: str | None) -> Problem:
    """The fault at its place."""
    return Problem(row, file, line, custom_id, fault.code, fault.param, fault.message, fault.fix, fault.severity)


class FileError(InputError):
    """A whole file that cannot be used; ``problem`` says why."""

    def __init__(self, file: str, fault: Fault) -> None:
        self.problem = located(fault, -1, file, 0, None)
        super().__init__(str(self.problem))


def shown(value: object) -> str:
    """A value of the input as short JSON on one line."""
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, TypeError, UnicodeEncodeError):
        text = ascii(type(value).__name__)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def shown_id(custom_id: str) -> str:
    """A custom_id in quotes, control characters escaped, cut where it is long."""
    return repr(custom_id if len(custom_id) <= SHOWN_CHARACTERS else custom_id[:SHOWN_CHARACTERS] + "...")


def context_length_exceeded(prompt_tokens: int, max_tokens: int, context_tokens: int) -> Fault:
    """Prompt and answer do not fit the model's context window (tokens)."""
    room = context_tokens - prompt_tokens
    return Fault(
        "context_length_exceeded",
        f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together "
        f"{prompt_tokens + max_tokens}; the model's context is {context_tokens} tokens",
        "max_tokens" if room > 0 else "messages",
        f"Lower max_tokens to at most {room}." if room > 0 else f"Shorten the prompt below {context_tokens} tokens.",
    )


def kv_capacity_exceeded(prompt_tokens: int, max_tokens: int, kv_tokens: int) -> Fault:
    """Prompt and answer can never be in the KV cache at once (tokens)."""
    room = kv_tokens - prompt_tokens
    smaller = f"Lower max_tokens to at most {room} or" if room > 0 else "Shorten the prompt or"
    return Fault(
        "kv_capacity_exceeded",
        f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together "
        f"{prompt_tokens + max_tokens}; the KV cache holds {kv_tokens} tokens",
        "max_tokens" if room > 0 else "messages",
        f"{smaller} give the engine a larger KV cache.",
    )


def model_not_found(model: str, served: list[str]) -> Fault:
    """The engine does not serve this model."""
    names = ", ".join(served[:10]) + (", ..." if len(served) > 10 else "")
    return Fault(
        "model_not_found",
        f"model is {shown(model)}; the engine serves: {names or 'nothing'}",
        "model",
        "Use a served name or start the engine with this model.",
    )
