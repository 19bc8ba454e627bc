"""One line of input -> a request, or everything that is wrong with it.

``examine`` is the fast reading that a whole file goes through: typed decoding, and the thorough reading below only for
lines that do not fit the types. ``parse`` is that thorough reading; it finds all faults of a line in one pass.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import msgspec

from plait.data.body import check_body
from plait.data.problems import Fault, shown
from plait.data.schema import (
    BODIES,
    CHAT,
    COMPLETIONS,
    ChatBody,
    ChatLine,
    CompletionBody,
    CompletionLine,
)
from plait.data.shapes import Line, bad_id, read_object
from plait.data.urgency import faults as urgency_faults

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What decoding bytes of unknown origin can raise."""

_LINE = msgspec.json.Decoder(ChatLine | CompletionLine)
_ENCODER = msgspec.json.Encoder()
MAX_NESTING = 300
"""Deeper lines are refused: whether they can be read would depend on how deep the caller's own stack is."""

_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_FIRST_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")\s*[,}]')
_OTHER_URL = re.compile(r"/v\d+(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+")


class Examined(NamedTuple):
    """What the index keeps of a line."""

    custom_id: str | None
    url: str
    model: str | None
    digest: bytes  # 16 bytes
    deterministic: bool
    bad: bool
    flagged: bool
    """It has faults, warnings included."""


def examine(raw: bytes, row: int, passthrough: bool) -> Examined:
    """The index entry of one line (no blank one, no byte-order mark). ``row`` names rows that bring no id."""
    try:
        line = _LINE.decode(raw) if not _too_deep(raw) else None
    except UNREADABLE:
        line = None
    if line is None or (line.body.metadata and urgency_faults({}, {"metadata": line.body.metadata})):
        return _examine_thoroughly(raw, row, passthrough)
    url = CHAT if type(line) is ChatLine else COMPLETIONS
    body = line.body
    return Examined(line.custom_id, url, body.model, _typed_digest(url, body), body.is_deterministic(), False, False)


def _examine_thoroughly(raw: bytes, row: int, passthrough: bool) -> Examined:
    line = parse(raw, row, passthrough)
    model = line.body.get("model")
    known_model = model if isinstance(model, str) else None
    if line.bad:
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        return Examined(line.custom_id, line.url, known_model, digest, False, True, True)
    digest, deterministic = digest_of(line.url, line.body)
    return Examined(line.custom_id, line.url, known_model, digest, deterministic, False, bool(line.faults))


def digest_of(url: str, body: dict[str, Any]) -> tuple[bytes, bool]:
    """16 bytes that are equal for equal requests, and whether the answer is the same each time it is computed.

    Bodies that fit the types are compared in canonical form; others (passed through unchanged) with sorted top-level
    keys only, because the order of inner keys may matter to a server.
    """
    try:
        typed = msgspec.convert(body, BODIES[url])
    except (KeyError, msgspec.ValidationError):
        canonical = _ENCODER.encode(dict(sorted(body.items())))
        greedy = body.get("temperature") == 0 and body.get("n") in (None, 1)
        return _hash(url, canonical), body.get("seed") is not None or greedy
    return _typed_digest(url, typed), typed.is_deterministic()


def _typed_digest(url: str, body: ChatBody | CompletionBody) -> bytes:
    """Digest of a decoded body without the fields that cannot change its answer. Mutates the body."""
    body.user = body.metadata = body.stream = None
    return _hash(url, _ENCODER.encode(body))


def _hash(url: str, canonical: bytes) -> bytes:
    return hashlib.blake2b(url.encode() + b"\n" + canonical, digest_size=16).digest()


def read(raw: bytes, row: int) -> Line:
    """What a line that was found good says; nothing is checked again. Raises one of UNREADABLE if it has changed."""
    line = Line()
    decoded = msgspec.json.decode(raw, type=dict[str, Any])
    read_object(line, decoded, row)
    return line


def parse(raw: bytes, row: int, passthrough: bool) -> Line:
    """Everything the line says and everything that is wrong with it. Raises nothing, whatever the bytes."""
    line = Line()
    try:
        if _too_deep(raw):
            raise RecursionError
        decoded = msgspec.json.decode(raw)
    except UNREADABLE as error:
        line.custom_id = _first_id(raw)
        line.faults.append(_not_json(raw, error))
        return line
    if not isinstance(decoded, dict):
        fix = "Write one object a line, for example with: jq -c '.[]'." if isinstance(decoded, list) else ""
        line.faults.append(Fault("not_an_object", f"the line is {shown(decoded)}; a JSON object is needed", fix=fix))
        return line
    read_object(line, decoded, row)
    if not line.faults:
        _check_request(line, decoded, passthrough)
    return line


def _check_request(line: Line, decoded: dict[str, Any], passthrough: bool) -> None:
    """All faults of a batch line or plain row."""
    is_plain = "prompt" in decoded or "messages" in decoded
    if not is_plain or "body" in decoded:
        line.faults += _envelope_faults(decoded, passthrough)
        if not isinstance(decoded.get("body"), dict):
            return
    url = line.url if line.url in BODIES else _meant_endpoint(line)
    other = passthrough and line.url not in BODIES and not line.bad
    line.faults += check_body(line.body, None if other else url, passthrough)
    line.faults += urgency_faults(line.metadata, line.body)


def _meant_endpoint(line: Line) -> str | None:
    """The endpoint whose rules a body with a wrong url is checked by, so that all its faults show at once."""
    if line.url.endswith("completions"):
        return CHAT if "messages" in line.body else COMPLETIONS if "prompt" in line.body else None
    return None


def _envelope_faults(decoded: dict[str, Any], passthrough: bool) -> list[Fault]:
    """Faults of custom_id, method, url and of body as a whole."""
    faults = []
    custom_id, method, body = decoded.get("custom_id"), decoded.get("method"), decoded.get("body")
    if "custom_id" not in decoded:
        fix = "Give every line a custom_id of its own."
        faults.append(Fault("missing_required_parameter", "custom_id is missing", "custom_id", fix))
    elif not isinstance(custom_id, str) or not custom_id:
        faults.append(bad_id(custom_id))
    if "method" not in decoded:
        faults.append(Fault("missing_required_parameter", "method is missing", "method", 'Add "method": "POST".'))
    elif method != "POST":
        message = f'method is {shown(method)}; only "POST" is allowed'
        faults.append(Fault("invalid_method", message, "method", 'Write "method": "POST".'))
    faults += _url_faults(decoded, passthrough)
    if "body" not in decoded:
        fix = "Put the request (model, messages, max_tokens, ...) under body."
        faults.append(Fault("missing_required_parameter", "body is missing", "body", fix))
    elif not isinstance(body, dict):
        faults.append(Fault("invalid_type", f"body is {shown(body)}; an object is needed", "body"))
    return faults


def _url_faults(decoded: dict[str, Any], passthrough: bool) -> list[Fault]:
    """A url that is no known endpoint is never guessed; a server's other endpoints only pass on request."""
    url = decoded.get("url")
    allowed = f"allowed: {CHAT}, {COMPLETIONS}"
    if "url" not in decoded:
        return [Fault("missing_required_parameter", f"url is missing; {allowed}", "url")]
    if not isinstance(url, str):
        return [Fault("invalid_type", f"url is {shown(url)}; a string is needed, {allowed}", "url")]
    if url in BODIES or (passthrough and _OTHER_URL.fullmatch(url)):
        return []
    meant = CHAT if url.rstrip("/").endswith("chat/completions") else COMPLETIONS
    if url.rstrip("/").endswith("completions"):
        missing = " (the /v1 is missing)" if url in ("/chat/completions", "/completions") else ""
        return [Fault("url_mismatch", f"url is {shown(url)}{missing}; {allowed}", "url", f"Write {shown(meant)}.")]
    also = "; a server's other endpoints start with /v1/" if passthrough else ""
    fix = "" if passthrough else "Only an HTTP server can answer other endpoints."
    return [Fault("url_mismatch", f"url is {shown(url)}; {allowed}{also}", "url", fix)]


def _not_json(raw: bytes, error: Exception) -> Fault:
    """invalid_json_line with the place in the line where reading stopped."""
    reason = str(error)
    if isinstance(error, RecursionError):
        return Fault("invalid_json_line", f"the line is nested too deeply; at most {MAX_NESTING} levels are read")
    if "UTF-8" in reason or isinstance(error, UnicodeDecodeError):
        return Fault(
            "invalid_json_line", "the line is not valid UTF-8", fix="Convert the file, for example with iconv."
        )
    found = re.search(r"\(byte (\d+)\)", reason)
    if found is None:
        known = {"Input data was truncated": "the line ends in the middle of a value"}
        return Fault(
            "invalid_json_line", f"the line is not valid JSON: {known.get(reason, reason[:1].lower() + reason[1:])}"
        )
    at = int(found[1])
    near = shown(raw[max(0, at - 10) : at + 15].decode("utf-8", "replace"))
    what = re.sub(r"^JSON is malformed: | \(byte \d+\)$", "", reason)
    fix = ""
    if raw[at : at + 3] in (b"NaN", b"Inf") or raw[at : at + 9] == b"-Infinity":
        fix = "NaN and Infinity are not JSON; write null."
    elif "trailing" in what:
        fix = "Write one object a line."
    return Fault("invalid_json_line", f"the line is not valid JSON: {what} at column {at + 1}, near {near}", fix=fix)


def _too_deep(raw: bytes) -> bool:
    """True if brackets outside of strings nest deeper than MAX_NESTING."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return False
    depth = deepest = 0
    for token in _TOKENS.finditer(raw):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING


def _first_id(raw: bytes) -> str | None:
    """The custom_id of a line that is not JSON, where it is the first key and complete."""
    found = _FIRST_ID.match(raw)
    try:
        return msgspec.json.decode(found[1], type=str) or None if found else None
    except UNREADABLE:
        return None
