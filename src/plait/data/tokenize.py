"""Prompt token ids: the model's chat template, then the model's own tokenizer, in batches.

Works without the engine: only the tokenizer is loaded (about 1.5 s for the built-in model). The ids are what the
embedded engine would compute itself; it is handed these ids, so planning and running see the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from plait.data.problems import Fault
from plait.data.schema import CHAT
from plait.errors import EngineError
from plait.table import I32

_SUB_BATCH = 64
"""Texts of one tokenizer call: it pads to the longest, so texts are sorted by length and called in small groups."""
_PROBE_TOKENS = 1 << 18
"""Some models' tokenizers silently cut at the context length, whatever they are told; a long probe finds out where."""
_TEMPLATE_RESERVED = ("messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception")


class Tokenizer:
    """Chat template and tokenizer of one model. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError if the files hold no tokenizer that can be loaded."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from openvino_genai import Tokenizer as NativeTokenizer

        try:
            self._native = NativeTokenizer(str(path))
            probe = self._native.encode(" a" * _PROBE_TOKENS, add_special_tokens=False).input_ids.shape[1]
        except RuntimeError as error:
            raise EngineError(f"{path} has no tokenizer that can be loaded: {_last_line(error)}") from None
        self._cut_tokens = probe if probe < _PROBE_TOKENS else 1 << 62
        self._specials = {
            "bos_token": self._native.get_bos_token(),
            "eos_token": self._native.get_eos_token(),
        }
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.filters["tojson"] = _tojson
        source = self._native.get_original_chat_template()
        self._template = self._environment.from_string(source) if source else None

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """The tokenizer of a GGUF file or an OpenVINO directory (``plait.engine.models.find_model(...).path``)."""
        return Tokenizer(path)

    def prompt_ids(self, url: str, body: dict[str, Any]) -> I32 | Fault:
        """Token ids of one request's prompt, int32 [prompt_tokens], or why there are none."""
        return self.encode_many([(url, body)])[0]

    def encode_many(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """Token ids of each (url, body), int32 [prompt_tokens], or what is wrong with it: nothing is raised for one
        request's sake. Memory: the texts and 12 bytes a token; give it about 1000 requests at once."""
        results: list[I32 | Fault] = []
        texts: list[tuple[int, str, bool]] = []
        for i, (url, body) in enumerate(requests):
            prompt = self._prompt(url, body)
            if isinstance(prompt, str):
                texts.append((i, prompt, url != CHAT))
                results.append(np.zeros(0, np.int32))
            else:
                results.append(prompt)
        self._encode_texts(texts, results)
        for i, result in enumerate(results):
            if not isinstance(result, Fault) and not len(result):
                param = "messages" if requests[i][0] == CHAT else "prompt"
                results[i] = Fault("empty_prompt", "the prompt has no tokens", param, "Give it some text.")
        return results

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        text: str = self._native.decode(list(ids), skip_special_tokens=True)
        return text

    @cached_property
    def vocab_tokens(self) -> int:
        """Token ids are below this number."""
        return len(self._native.get_vocab())

    def _prompt(self, url: str, body: dict[str, Any]) -> str | I32 | Fault:
        if url == CHAT:
            rendered = self._render(body)
            return rendered if isinstance(rendered, Fault) else _checked(rendered, "messages")
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return _checked(prompt, "prompt")
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            outside = next((token for token in prompt if not 0 <= token < self.vocab_tokens), None)
            if outside is None:
                return np.asarray(prompt, np.int32)
            message = f"prompt has the token id {outside}; the vocabulary has {self.vocab_tokens} tokens"
            return Fault("invalid_value", message, "prompt", f"Use ids from 0 to {self.vocab_tokens - 1}.")
        message = "prompt holds several prompts or is of another type; a string or one list of token ids is needed"
        return Fault("unsupported_value", message, "prompt", "Put each prompt on its own line.")

    def _render(self, body: dict[str, Any]) -> str | Fault:
        """The chat template over the messages, or why it cannot be."""
        from jinja2 import TemplateError

        if self._template is None:
            message = "this model has no chat template"
            return Fault("no_chat_template", message, "messages", "Use /v1/completions, or a chat model.")
        extra = body.get("chat_template_kwargs") or {}
        variables = {key: value for key, value in extra.items() if key not in _TEMPLATE_RESERVED}
        add = extra.get("add_generation_prompt", body.get("add_generation_prompt"))
        try:
            return self._template.render(
                **variables,
                **self._specials,
                messages=[_plain(message) for message in body["messages"]],
                add_generation_prompt=True if add is None else bool(add),
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
            message = f"the model's chat template refuses these messages: {_first_line(error)}"
            return Fault(
                "chat_template_error", message, "messages", "Check roles, their order and chat_template_kwargs."
            )

    def _encode_texts(self, texts: list[tuple[int, str, bool]], results: list[I32 | Fault]) -> None:
        """Fill ``results`` at the texts' positions. Raw prompts get the model's special tokens."""
        for special in (False, True):
            group = sorted(((i, text) for i, text, raw in texts if raw is special), key=lambda item: len(item[1]))
            for start in range(0, len(group), _SUB_BATCH):
                part = group[start : start + _SUB_BATCH]
                encoded = self._native.encode([text for _, text in part], add_special_tokens=special)
                rows = np.asarray(encoded.input_ids.data).astype(np.int32)
                kept = np.asarray(encoded.attention_mask.data) != 0
                for (i, _), row, mask in zip(part, rows, kept, strict=True):
                    fits = mask.sum() < self._cut_tokens
                    results[i] = row[mask] if fits else _too_long(self._cut_tokens, "prompt" if special else "messages")


def _too_long(tokens: int, param: str) -> Fault:
    """The tokenizer cuts at the model's context, so how long the prompt really is stays unknown."""
    message = f"the prompt has {tokens} tokens or more; with at least one output token, {tokens - 1} is the most"
    fix = f"Shorten it; the model's context is {tokens} tokens."
    return Fault("context_length_exceeded", message, param, fix)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with text parts joined: templates of text models take strings. Absent content is empty."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content or ""}


def _checked(text: str, param: str) -> str | Fault:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{param} holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which is not text"
        return Fault("invalid_value", message, param, "Escape the character as a whole pair.")
    return text


def _raise_exception(message: str) -> None:
    """What templates call to refuse messages."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates expect it: not escaped for HTML."""
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


def _last_line(error: Exception) -> str:
    """OpenVINO's messages begin with source positions and end with the reason."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
