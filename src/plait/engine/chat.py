"""Response bodies as an OpenAI endpoint returns them: chat.completion and text_completion objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.engine.wire import Sampling

Decode = Callable[[Sequence[int], bool], str]
"""(token ids, skip special tokens) -> text."""


@dataclass(slots=True)
class Generated:
    """One sequence's output."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """stop or length."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A body and what it says."""

    body: bytes
    output_tokens: int
    finish_reasons: tuple[str, ...]


def answer(
    chat: bool,
    model: str,
    prompt_tokens: int,
    cached_tokens: int,
    outputs: Sequence[Generated],
    sampling: Sampling,
    decode: Decode,
) -> Answered:
    """The body of a finished request."""
    choices = [_choice(chat, i, output, sampling, decode) for i, output in enumerate(outputs)]
    output_tokens = sum(len(output.ids) for output in outputs)
    body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }
    reasons = tuple(choice["finish_reason"] for choice in choices)
    return Answered(msgspec.json.encode(body), output_tokens, reasons)


def _choice(chat: bool, index: int, output: Generated, sampling: Sampling, decode: Decode) -> dict[str, Any]:
    text = decode(output.ids, sampling.skip_special_tokens)
    cut = stop_position(text, sampling.stop, sampling.include_stop)
    reason = output.finish_reason if cut is None else "stop"
    text = text if cut is None else text[:cut]
    logprobs: dict[str, Any] | None = None
    if sampling.logprobs is not None:
        logprobs = (_chat_logprobs if chat else _text_logprobs)(output, sampling.logprobs, decode)
    if chat:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def stop_position(text: str, stops: Sequence[str], include: bool) -> int | None:
    """Where the text ends because of the earliest stop string in it; None if there is none."""
    found = [(at, at + len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1 if include else 0] if found else None


def _chat_logprobs(output: Generated, top: int, decode: Decode) -> dict[str, Any]:
    content = []
    for token, logprob in zip(output.ids, output.logprobs, strict=True):
        text = decode([token], False)
        entry: dict[str, Any] = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**entry, "top_logprobs": [entry] if top else []})
    return {"content": content, "refusal": None}


def _text_logprobs(output: Generated, top: int, decode: Decode) -> dict[str, Any]:
    tokens = [decode([token], False) for token in output.ids]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    tops = [{token: logprob} for token, logprob in zip(tokens, output.logprobs, strict=True)] if top else None
    return {"tokens": tokens, "token_logprobs": output.logprobs, "top_logprobs": tops, "text_offset": offsets}
