"""Output lines in the shape of the Batch API, written by splicing: an answer's body is never taken apart.

Ids are derived from the job's fingerprint and the row, so that a run that crashed and went on writes the same bytes as
one that did not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from plait.data.problems import Problem
from plait.events import Failed, Finished

RETRIED_4XX = frozenset({408, 409, 425, 429})
"""Client-error statuses that speak of the moment, not of the request."""

ID_BYTES = 24
"""One half of them makes the id of a line, the other that of its request."""

_encode = msgspec.json.Encoder().encode


class LineWriter:
    """Makes the lines of one job. ``secrets`` are replaced by asterisks wherever they turn up."""

    def __init__(self, fingerprint: str, secrets: tuple[str, ...] = ()) -> None:
        self._seed = hashlib.blake2b(fingerprint.encode(), digest_size=ID_BYTES)
        self._secrets = [secret.encode() for secret in secrets if secret]

    def answer(self, row: int, custom_id: str, metadata: Mapping[str, Any], status_code: int, body: bytes) -> bytes:
        """The endpoint's reply, whatever its status: ``body`` is one JSON object on one line."""
        line_id, request_id = self._ids(row)
        return self._line(line_id, custom_id, metadata, _response(request_id, status_code, body), b"null")

    def failure(self, row: int, custom_id: str, metadata: Mapping[str, Any], failed: Failed) -> bytes:
        """A request without an answer: as an HTTP-level failure where there was a status, else as never executed."""
        if failed.status_code is not None and failed.status_code != 200:
            body = failed.body if failed.body is not None and is_json_line(failed.body) else _error_body(failed)
            return self.answer(row, custom_id, metadata, failed.status_code, body)
        error = {"code": failed.code, "message": failed.message}
        if failed.param is not None:
            error["param"] = failed.param
        return self._line(self._ids(row)[0], custom_id, metadata, b"null", _encode(error))

    def refusal(self, row: int, problem: Problem, metadata: Mapping[str, Any] | None = None) -> bytes:
        """A line of input that cannot run, in the shape of a 400 answer; ``line`` is given where there is no
        custom_id to find it by."""
        named = f"{problem.file}:{problem.line}: {problem.message}." + (f" {problem.fix}" if problem.fix else "")
        error = {
            "message": named,
            "type": "invalid_request_error",
            "param": problem.param,
            "code": problem.code,
        }
        extra = {"line": problem.line} if problem.custom_id is None else {}
        line_id, request_id = self._ids(row)
        response = _response(request_id, 400, _encode({"error": error}))
        return self._line(line_id, problem.custom_id, metadata or {}, response, b"null", extra)

    def _ids(self, row: int) -> tuple[bytes, bytes]:
        """Of the row's line and of its request, in hexadecimal."""
        digest = self._seed.copy()
        digest.update(b"%d" % row)
        both = digest.hexdigest().encode()
        return both[:ID_BYTES], both[ID_BYTES:]

    def _line(
        self,
        line_id: bytes,
        custom_id: str | None,
        metadata: Mapping[str, Any],
        response: bytes,
        error: bytes,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        parts = b'{"id":"batch_req_%b","custom_id":%b,"response":%b,"error":%b' % (
            line_id,
            _encode(custom_id),
            response,
            error,
        )
        for name, value in (({"metadata": metadata} if metadata else {}) | dict(extra or {})).items():
            parts += b",%b:%b" % (_encode(name), _encode(value))
        line = parts + b"}"
        for secret in self._secrets:
            line = line.replace(secret, b"***")
        return line


def _response(request_id: bytes, status_code: int, body: bytes) -> bytes:
    head = b'{"status_code":%d,"request_id":"req_%b","body":' % (status_code, request_id)
    return head + body.strip() + b"}"


def _error_body(failed: Failed) -> bytes:
    kind = "invalid_request_error" if (failed.status_code or 500) < 500 else "server_error"
    error = {"message": failed.message, "type": kind, "param": failed.param, "code": failed.code}
    return _encode({"error": error})


def is_json_line(body: bytes) -> bool:
    """Whether bytes are one JSON object on one line of UTF-8: what may be spliced into a line."""
    body = body.strip()
    if not body.startswith(b"{") or b"\n" in body or b"\r" in body:
        return False
    try:
        body.decode()
        msgspec.json.decode(body, type=msgspec.Raw)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return False
    return True


def is_server_fault(event: Finished | Failed) -> bool:
    """Whether a failure was the server's or the transport's: worth another try, now or in the next run."""
    if isinstance(event, Failed):
        return event.retryable
    return is_passing(event.status_code)


def is_passing(status_code: int) -> bool:
    """Whether a status speaks of the moment: 5xx and a few of the 4xx."""
    return status_code >= 500 or status_code in RETRIED_4XX
