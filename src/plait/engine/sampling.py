"""A request body -> the embedded engine's generation settings, or the parameter that it cannot honour."""

from __future__ import annotations

import json
import sys
from typing import Any

from plait.data.problems import Fault, shown
from plait.data.schema import CHAT
from plait.engine.wire import Sampling

_IGNORED = frozenset(
    (
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "user", "stream", "stream_options"),
        *(
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "priority",
            "request_id",
            "rid",
        ),
        *("chat_template_kwargs", "add_generation_prompt", "parallel_tool_calls", "spaces_between_special_tokens"),
        *("guided_decoding_backend", "include_reasoning", "separate_reasoning", "stream_reasoning", "modalities"),
    )
)
"""Parameters read elsewhere, or without an effect on the answer's text."""
_READ = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n"),
        *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "min_tokens"),
        *("ignore_eos", "logprobs", "top_logprobs", "response_format", "guided_json", "guided_regex", "json_schema"),
        *("guided_grammar", "guided_choice", "regex", "ebnf"),
    )
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "bad_words": ([],),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "no_stop_trim": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
}
"""Parameters that the engine cannot honour, and their values that ask for nothing."""
_ANY_OBJECT = '{"type":"object"}'


def read_sampling(url: str, body: dict[str, Any], max_tokens: int) -> Sampling | Fault:
    """Settings of a request that ``plait.data.validate`` found well-formed; ``max_tokens`` is the resolved cap."""
    for name, value in body.items():
        if name in _IGNORED or name in _READ or value is None:
            continue
        if not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())):
            return _unsupported(name, value)
    sampling = _basic(body, max_tokens)
    if sampling.min_tokens > max_tokens:
        message = f"min_tokens is {sampling.min_tokens}, above the cap of {max_tokens} output tokens"
        return Fault("invalid_value", message, "min_tokens", "Lower it or raise max_tokens.")
    return _logprobs(url, body, sampling) or _format(body, sampling) or sampling


def unsupported(url: str, body: dict[str, Any]) -> Fault | None:
    """What the engine cannot honour in a request, whatever its cap turns out to be."""
    found = read_sampling(url, body, sys.maxsize)
    return found if isinstance(found, Fault) else None


def _basic(body: dict[str, Any], max_tokens: int) -> Sampling:
    def given(name: str, default: Any) -> Any:
        value = body.get(name)
        return default if value is None else value

    stop = given("stop", [])
    return Sampling(
        max_tokens=max_tokens,
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=max(given("top_k", 0), 0),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        n=given("n", 1),
        seed=body.get("seed"),
        stop=[stop] if isinstance(stop, str) else list(stop),
        include_stop=given("include_stop_str_in_output", False),
        stop_token_ids=given("stop_token_ids", []),
        skip_special_tokens=given("skip_special_tokens", True),
        min_tokens=given("min_tokens", 0),
        ignore_eos=given("ignore_eos", False),
    )


def _logprobs(url: str, body: dict[str, Any], sampling: Sampling) -> Fault | None:
    """The engine tells the chosen token's log-probability only; where it is greedy that is the most likely one's."""
    asked, name = body.get("logprobs"), "logprobs"
    if url == CHAT:
        asked, name = (body.get("top_logprobs") or 0) if asked else None, "top_logprobs"
    if asked is None:
        return None
    if asked > (1 if sampling.temperature == 0 else 0):
        message = f"{name} is {asked}; the embedded engine tells the chosen token's log-probability only"
        fix = "Use 0 (or 1 with temperature 0), or another engine."
        return Fault("unsupported_parameter", message, name, fix)
    sampling.logprobs = asked
    return None


def _format(body: dict[str, Any], sampling: Sampling) -> Fault | None:
    """Constrained output; sets at most one of the three fields."""
    asked = [name for name in (*_FORMATS, "response_format") if body.get(name) is not None]
    if body.get("response_format") == {"type": "text"}:
        asked.remove("response_format")
    if not asked:
        return None
    if len(asked) > 1:
        return Fault("invalid_value", f"{asked[0]} and {asked[1]} exclude each other", asked[1], "Remove one.")
    name, value = asked[0], body[asked[0]]
    if name != "response_format":
        setattr(sampling, _FORMATS[name], _choices(value) if name == "guided_choice" else _text(value))
        return None
    if value.get("type") == "json_object":
        sampling.json_schema = _text(value.get("schema") or _ANY_OBJECT)
        return None
    schema = (value.get("json_schema") or {}).get("schema") if value.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        if value.get("type") == "json_schema":
            message = "response_format.json_schema.schema is missing or not an object"
            return Fault("invalid_value", message, "response_format.json_schema.schema", "Give the JSON schema there.")
        return _unsupported("response_format", value)
    sampling.json_schema = _text(schema)
    return None


_FORMATS = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "grammar",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
}
"""Parameter -> field of ``Sampling``."""


def _text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _choices(values: list[str]) -> str:
    """A grammar of one of several strings."""
    return "root ::= " + " | ".join(json.dumps(value, ensure_ascii=False) for value in values)


def _unsupported(name: str, value: Any) -> Fault:
    message = f"{name} is {shown(value)}; the embedded engine does not support this parameter"
    return Fault("unsupported_parameter", message, name, "Remove it or use another engine.")
