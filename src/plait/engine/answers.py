"""What an HTTP reply means: an answer to record, a fault to retry, and how long the server asked to be left alone."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

EXCERPT_CHARS = 200
RETRIED_4XX = frozenset({408, 409, 425, 429})
"""Client-error statuses that speak of the moment, not of the request."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None  # /v1/responses
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None  # llama.cpp


class _Reason(msgspec.Struct):
    reason: str | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] | None = None
    timings: _Timings | None = None
    status: str | None = None  # /v1/responses
    incomplete_details: _Reason | None = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_any = msgspec.json.Decoder().decode


class Answer(NamedTuple):
    """A reply to record: any status whose body speaks for the endpoint."""

    status: int
    body: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """A reply, or the lack of one, that says nothing about the request: to be retried."""

    code: str
    """rate_limited, server_error, invalid_response, connection_failed, disconnected, stall_timeout, ..."""
    message: str
    status: int | None = None
    body: bytes | None = None
    retry_after_s: float | None = None


Outcome: TypeAlias = Answer | Fault


def read_reply(status: int, content_type: str | None, headers: Mapping[str, str], body: bytes) -> Outcome:
    """Judge one complete reply. ``content_type`` is None where the header is missing."""
    if status == 200:
        if content_type is not None and "json" not in content_type:
            return Fault("invalid_response", f"answer is {content_type}, not JSON: {excerpt(body)}", status, body)
        return _answer(body)
    if status >= 500 or status in RETRIED_4XX:
        code = "rate_limited" if status == 429 else "server_error"
        message = f"status {status}: {excerpt(body) or 'empty body'}"
        return Fault(code, message, status, body, retry_after_s(headers))
    return Answer(status, error_body(status, body))


def _answer(body: bytes) -> Outcome:
    try:
        parsed = _decode(body)
    except msgspec.ValidationError:  # whole JSON, but not the shape of a chat or completion answer
        if not isinstance(_decode_any(body), dict):
            return Fault("invalid_response", f"answer is not a JSON object: {excerpt(body)}", 200, body)
        parsed = _Body()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Fault("invalid_response", f"answer is not whole JSON ({error}): {excerpt(body)}", 200, body)
    usage = parsed.usage or _Usage()
    prompt = usage.prompt_tokens or usage.input_tokens or 0
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details else parsed.timings.cache_n if parsed.timings else None
    reasons = tuple([choice.finish_reason for choice in parsed.choices or () if choice.finish_reason])
    if not reasons and parsed.incomplete_details and parsed.incomplete_details.reason:
        reasons = ("length" if "max" in parsed.incomplete_details.reason else parsed.incomplete_details.reason,)
    output = usage.completion_tokens or usage.output_tokens or 0
    return Answer(200, one_line(body), prompt, min(cached or 0, prompt), output, reasons)


def one_line(body: bytes) -> bytes:
    """The same JSON without line breaks between its tokens."""
    return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body


def error_body(status: int, body: bytes) -> bytes:
    """An error reply's own JSON object in one line; anything else is wrapped in one that quotes its beginning."""
    try:
        if isinstance(_decode_any(body), dict):
            return one_line(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    message = excerpt(body) or f"status {status}, empty body"
    error = {"message": message, "type": "invalid_response", "param": None, "code": f"http_{status}"}
    return msgspec.json.encode({"error": error})


def excerpt(body: bytes) -> str:
    """The first 200 characters of a body, for messages."""
    return body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")[:EXCERPT_CHARS].strip()


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until the server wants to be asked again (RFC 9110 §10.2.3: seconds or an HTTP date); None if it did not
    say, or not in a form that can be read. A date is taken against the server's own Date header where there is one."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        until = email.utils.parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None
    try:
        now = email.utils.parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except ValueError:
        now = time.time()
    return max(until - now, 0.0)
