"""Faults of a request body, parameter by parameter, from the types in ``plait.data.schema``."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from plait.data.problems import Fault, Severity, shown
from plait.data.schema import BODIES, CHAT, COMPLETIONS, MESSAGES, TextPart

_PLAIN_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}

HINTS = {url: get_type_hints(body, include_extras=True) for url, body in BODIES.items()}
"""Endpoint -> parameter -> its type."""

_REQUIRED = {CHAT: "messages", COMPLETIONS: "prompt"}

MEDIA_PARTS = frozenset(
    (
        *("image_url", "image", "input_image", "audio_url", "audio", "input_audio", "video_url", "video"),
        *("file", "input_file"),
    )
)
"""Content parts that only a multimodal server can take."""

_SPECIAL_FIXES = {
    "extra_body": "Put its keys directly into body.",
    "system": "Make it the first message, with role system.",
    "input": "Use messages for /v1/chat/completions or prompt for /v1/completions.",
}


def check_body(body: dict[str, Any], url: str | None, passthrough: bool) -> list[Fault]:
    """All faults of a body sent to ``url``; of another endpoint (None) only what holds for every endpoint.

    ``passthrough``: the engine is a server that may take more than text and more parameters than are known here, so
    these become warnings or pass.
    """
    faults = _stream_faults(body)
    if url is None:
        return faults + [f for f in _parameter_faults(body, CHAT, passthrough) if f.param == "model"]
    required = _REQUIRED[url]
    if body.get(required) is None:
        faults.append(_missing(body, url))
    elif required == "messages":
        faults += _messages_faults(body["messages"], passthrough)
    faults += _parameter_faults(body, url, passthrough)
    if not faults and not passthrough:
        faults += _remaining_fault(body, url)
    return faults


def _stream_faults(body: dict[str, Any]) -> list[Fault]:
    """Anything but false: people also write "True"."""
    stream = body.get("stream")
    if stream is None or stream is False:
        return []
    message = f"stream is {shown(stream)}; a batch returns whole answers, so only false is allowed"
    return [Fault("unsupported_value", message, "stream", "Remove stream.")]


def _missing(body: dict[str, Any], url: str) -> Fault:
    """messages or prompt is absent or null."""
    required = _REQUIRED[url]
    other_url = COMPLETIONS if url == CHAT else CHAT
    fix = f"The body looks like one for {other_url}." if _REQUIRED[other_url] in body else ""
    if required in body:
        return Fault("invalid_type", f"{required} is null; {allowed_text(url, required)} is needed", required, fix)
    return Fault("missing_required_parameter", f"{required} is missing; {url} needs it", required, fix)


def _parameter_faults(body: dict[str, Any], url: str, passthrough: bool) -> list[Fault]:
    """Unknown names and wrong values of everything but messages and stream."""
    faults = []
    for name, value in body.items():
        if name in ("messages", "stream") and name in HINTS[url]:
            continue
        if name not in HINTS[url]:
            faults.append(_unknown(name, url, passthrough))
        elif value is not None:
            fault = _value_fault(name, value, url)
            if fault is not None and not (passthrough and name in ("prompt", "modalities")):
                faults.append(fault)
    return faults


def _unknown(name: str, url: str, passthrough: bool) -> Fault:
    """An unknown parameter, with the likeliest name that was meant."""
    other_url = COMPLETIONS if url == CHAT else CHAT
    near = near_match(name, HINTS[url])
    if name in HINTS[other_url]:
        fix = f"It belongs to {other_url}."
    elif name in _SPECIAL_FIXES:
        fix = _SPECIAL_FIXES[name]
    else:
        fix = f"Did you mean {near}?" if near else "Remove it."
    severity: Severity = "warning" if passthrough else "error"
    return Fault("unknown_parameter", f"{shown(name)} is not a parameter of {url}", name, fix, severity)


def _value_fault(name: str, value: object, url: str) -> Fault | None:
    """A value that its parameter does not take."""
    try:
        msgspec.convert(value, HINTS[url][name])
    except (msgspec.ValidationError, RecursionError) as error:
        code = "invalid_type" if ", got `" in str(error) and "$" not in str(error) else "invalid_value"
        fix = "Put each prompt on its own line." if name == "prompt" and isinstance(value, list) and value else ""
        return Fault(code, f"{name} is {shown(value)}; {allowed_text(url, name)} is needed", name, fix)
    return None


@lru_cache(maxsize=512)
def allowed_text(url: str, name: str) -> str:
    """What a parameter takes, in words."""
    words = [word for word in _describe(HINTS[url][name]) if word]
    described = [word for word in words if word not in _PLAIN_NAMES.values()]
    return " or ".join(dict.fromkeys(described[-1:] if name in ("stop", "prompt") else words)) or "another value"


def _describe(hint: Any) -> list[str]:
    """Words for each alternative of a type, in order."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *notes = get_args(hint)
        texts = [note.description for note in notes if isinstance(note, msgspec.Meta) and note.description]
        return texts or _describe(base)
    if hint is type(None):
        return []
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [f'an object with type "{hint.__struct_config__.tag}"']
    name = _PLAIN_NAMES.get(origin or hint)
    if name is not None:
        inner = get_args(hint)[0] if origin is list else None
        if get_origin(inner) is Literal:
            return ["a list of " + " or ".join(map(shown, get_args(inner)))]
        return ["a list of strings" if inner is str else "a list of objects" if get_origin(inner) is dict else name]
    return [word for part in get_args(hint) for word in _describe(part)]


@lru_cache(maxsize=4096)
def _near(name: str, names: frozenset[str], cutoff: float) -> str | None:
    plain = name.replace("-", "_").lower()
    for known in names:
        if plain == known or plain.replace("_", "") == known.replace("_", ""):
            return known
    found = difflib.get_close_matches(plain, sorted(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def near_match(name: str, names: Collection[str], cutoff: float = 0.72) -> str | None:
    """The known name that a misspelt one most likely meant. Names longer than any real one match nothing."""
    return _near(name, frozenset(names), cutoff) if len(name) <= 48 else None


def _messages_faults(messages: object, passthrough: bool) -> list[Fault]:
    """Every fault of every message."""
    if not isinstance(messages, list) or not messages:
        code = "invalid_value" if messages == [] else "invalid_type"
        return [Fault(code, f"messages is {shown(messages)}; {allowed_text(CHAT, 'messages')} is needed", "messages")]
    faults = []
    for i, message in enumerate(messages):
        faults += _message_faults(message, f"messages[{i}]", passthrough)
    return faults


def _message_faults(message: object, place: str, passthrough: bool) -> list[Fault]:
    """Faults of one message at ``place`` (``messages[3]``)."""
    if not isinstance(message, dict):
        return [Fault("invalid_type", f"{place} is {shown(message)}; an object with role and content is needed", place)]
    role = message.get("role")
    if "role" not in message:
        return [Fault("missing_required_parameter", f"{place}.role is missing", f"{place}.role")]
    if not isinstance(role, str) or role not in MESSAGES:
        code = "invalid_value" if isinstance(role, str) else "invalid_type"
        roles = ", ".join(MESSAGES)
        return [Fault(code, f"{place}.role is {shown(role)}; one of {roles} is needed", f"{place}.role")]
    known = get_type_hints(MESSAGES[role], include_extras=True)
    faults = _content_faults(message, place, passthrough)
    for name, value in message.items():
        if name not in known and name != "role":
            near = near_match(name, known)
            fix = f"Did you mean {near}?" if near and near not in message else "Remove it."
            what = f"{place}.{name}"
            severity: Severity = "warning" if passthrough else "error"
            faults.append(
                Fault("unknown_parameter", f"{shown(name)} is not a field of a {role} message", what, fix, severity)
            )
        elif name not in ("role", "content"):
            try:
                msgspec.convert(value, known[name])
            except (msgspec.ValidationError, RecursionError):
                words = " or ".join(_describe(known[name]))
                faults.append(
                    Fault("invalid_type", f"{place}.{name} is {shown(value)}; {words} is needed", f"{place}.{name}")
                )
    return faults


def _content_faults(message: dict[str, Any], place: str, passthrough: bool) -> list[Fault]:
    """Faults of a message's content: a string or parts; absent only where the assistant called a tool."""
    content, param = message.get("content"), f"{place}.content"
    if content is None:
        if message["role"] == "assistant" and (message.get("tool_calls") or message.get("function_call") is not None):
            return []
        if message["role"] == "assistant" and message.get("refusal") is not None:
            return []
        if "content" not in message:
            return [Fault("missing_required_parameter", f"{param} is missing", param)]
    if isinstance(content, str):
        return []
    if not isinstance(content, list) or not content:
        code = "invalid_value" if content == [] else "invalid_type"
        return [Fault(code, f"{param} is {shown(content)}; a string or a list of content parts is needed", param)]
    faults = [_part_fault(part, f"{param}[{i}]", passthrough) for i, part in enumerate(content)]
    return [fault for fault in faults if fault is not None]


def _part_fault(part: object, place: str, passthrough: bool) -> Fault | None:
    """The fault of one content part: media for engines that only read text, or no part at all."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        if passthrough:
            return None
        message = f"{place} is a part of type {shown(kind)}; this engine takes text only"
        return Fault("unsupported_content", message, place, "Remove the part or run the file on a multimodal server.")
    if isinstance(kind, str) and kind != "text" and passthrough:
        return Fault("unsupported_content", f"{place} has the unknown type {shown(kind)}", place, "", "warning")
    try:
        msgspec.convert(part, TextPart)
    except (msgspec.ValidationError, RecursionError):
        message = f'{place} is {shown(part)}; an object with type "text" and text is needed'
        return Fault("invalid_value" if isinstance(part, dict) else "invalid_type", message, place)
    return None


def _remaining_fault(body: dict[str, Any], url: str) -> list[Fault]:
    """Whatever the types refuse and the checks above did not name, in msgspec's words."""
    try:
        msgspec.convert(body, BODIES[url])
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`") or None
        return [Fault("invalid_value", f"{param or 'body'} cannot be used: {reason[:1].lower()}{reason[1:]}", param)]
    return []
