"""The shapes a line may have: batch request, plain row, row of a table, another vendor's format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plait.data.body import near_match
from plait.data.problems import Fault, shown
from plait.data.schema import CHAT, COMPLETIONS, ROW_PARAMETERS

FAULT_KEY = "plait:fault"
"""A spooled row of a table that cannot be a request says why under this key."""


@dataclass(slots=True)
class Line:
    """What a line says, as far as it could be read."""

    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """True if the line cannot run."""
        return any(fault.severity == "error" for fault in self.faults)


def read_object(line: Line, decoded: dict[str, Any], row: int) -> None:
    """Tell batch lines, plain rows and foreign formats apart; fill in what the line says."""
    is_batch = not decoded.keys().isdisjoint(("body", "method", "url"))
    is_plain = not is_batch and not decoded.keys().isdisjoint(("prompt", "messages"))
    identifier = decoded.get("custom_id", decoded.get("id") if is_plain else None)
    line.custom_id = identifier if isinstance(identifier, str) else None
    foreign = foreign_format(decoded)
    if FAULT_KEY in decoded:
        line.faults.append(Fault("invalid_row", str(decoded[FAULT_KEY])))
    elif foreign is not None:
        line.faults.append(foreign)
    elif is_plain:
        _read_row(line, decoded, row)
    elif is_batch or "custom_id" in decoded:
        line.url = decoded["url"] if isinstance(decoded.get("url"), str) else ""
        line.body = decoded["body"] if isinstance(decoded.get("body"), dict) else {}
        line.metadata = {k: v for k, v in decoded.items() if k not in ("custom_id", "method", "url", "body")}
    else:
        keys = ", ".join(shown(key) for key in list(decoded)[:8]) or "none"
        line.faults.append(
            Fault(
                "unsupported_format",
                f"the line is neither a batch request nor a row with prompt or messages; its keys are: {keys}",
                fix="Write custom_id, method, url and body, or a prompt or messages key.",
            )
        )


def _read_row(line: Line, decoded: dict[str, Any], row: int) -> None:
    """A plain row: its id or one made from its number; known parameters into the body, the rest is metadata."""
    key = "custom_id" if "custom_id" in decoded else "id"
    identifier = decoded.get(key)
    used = {key}
    if identifier is None or isinstance(identifier, bool) or (key == "id" and not isinstance(identifier, str | int)):
        line.custom_id, used = f"row-{row + 1}", {"custom_id"}
    elif isinstance(identifier, str | int):
        line.custom_id = str(identifier)
    if not line.custom_id:
        line.faults.append(bad_id(identifier))
    if "prompt" in decoded and "messages" in decoded:
        line.faults.append(Fault("invalid_value", "the row has both prompt and messages; one is needed", "prompt"))
    content = "messages" if "messages" in decoded else "prompt"
    line.url = CHAT if content == "messages" else COMPLETIONS
    for name, value in decoded.items():
        if name == content or (name in ROW_PARAMETERS and value is not None):
            line.body[name] = value
        elif name not in used:
            line.metadata[name] = value
            near = near_match(name, ROW_PARAMETERS, cutoff=0.88)
            if near is not None and near not in decoded:
                message = f"key {shown(name)} is carried along as metadata"
                line.faults.append(Fault("unknown_parameter", message, name, f"Did you mean {near}?", "warning"))


def bad_id(identifier: object) -> Fault:
    """The fault of a custom_id that is no string, or an empty one."""
    code = "invalid_value" if isinstance(identifier, str) else "invalid_type"
    return Fault(code, f"custom_id is {shown(identifier)}; a string that is not empty is needed", "custom_id")


def foreign_format(decoded: dict[str, Any]) -> Fault | None:
    """The fault of a line in another vendor's batch format, or of an output file; None for anything else."""
    request, params = decoded.get("request"), decoded.get("params")
    openai = "Rewrite each line as custom_id, method, url and body with OpenAI messages."
    if "contents" in decoded or (isinstance(request, dict) and "contents" in request):
        got = "this is a Gemini batch file (request.contents)"
        return Fault("unsupported_format", got, fix=openai + " contents[].parts[].text becomes messages[].content.")
    if isinstance(params, dict) and "body" not in decoded and ("messages" in params or "max_tokens" in params):
        fix = openai + " params becomes body, and params.system the first message with role system."
        return Fault("unsupported_format", "this is an Anthropic message batch (params)", fix=fix)
    if "modelInput" in decoded:
        return Fault("unsupported_format", "this is a Bedrock batch file (modelInput)", fix=openai)
    if "response" in decoded and "custom_id" in decoded and "body" not in decoded:
        return Fault("unsupported_format", "this is a batch output file (response)", fix="Give the input file instead.")
    return None
