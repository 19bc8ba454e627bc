"""Token ids: chat template, tokenizer, faults."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from plait.data.problems import Fault
from plait.data.schema import CHAT, COMPLETIONS
from plait.data.tokenize import Tokenizer

pytestmark = pytest.mark.engine
TEXTS = [
    "hello",
    "你好，世界！",
    "👩‍👩‍👧‍👦🇩🇪",
    json.loads('"caf\\u00e9 \\ud83d\\ude00"'),
    " \n\t x",
    "12345 3.14",
    "<|im_end|>",
    "a" * 3000,
]


def test_a_batch_gives_the_ids_of_each_text_alone(tokenizer: Tokenizer) -> None:
    requests = [(COMPLETIONS, {"prompt": text}) for text in TEXTS]
    for request, together in zip(requests, tokenizer.encode_many(requests), strict=True):
        alone = tokenizer.prompt_ids(*request)
        assert not isinstance(alone, Fault) and not isinstance(together, Fault)
        assert np.array_equal(alone, together)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.prompt_ids(COMPLETIONS, {"prompt": text})
    assert not isinstance(ids, Fault) and tokenizer.decode(ids.tolist()) == text


def test_a_chat_is_rendered_by_the_models_own_template(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    ids = tokenizer.prompt_ids(CHAT, {"messages": [{"role": "user", "content": parts}]})
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not isinstance(ids, Fault)
    assert ids.tolist() == np.asarray(tokenizer.prompt_ids(COMPLETIONS, {"prompt": expected})).tolist()


def test_what_has_no_tokens_is_a_fault_of_its_request_only(tokenizer: Tokenizer) -> None:
    chat = {"messages": [{"role": "user", "content": "a\ud83d"}]}
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat),
        (COMPLETIONS, {"prompt": [1, 99999]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": "word " * 9000}),
        (COMPLETIONS, {"prompt": [5, 6]}),
    ]
    results = tokenizer.encode_many(requests)
    codes = [result.code for result in results if isinstance(result, Fault)]
    assert codes == ["invalid_value", "invalid_value", "empty_prompt", "context_length_exceeded"]
    assert np.array_equal(np.asarray(results[4]), [5, 6])
