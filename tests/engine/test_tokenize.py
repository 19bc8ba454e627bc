"""Token ids: chat template, tokenizer, faults."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Reference

from plait.data.problems import Fault
from plait.data.schema import CHAT, COMPLETIONS
from plait.data.tokenize import Tokenizer
from plait.engine.models import LocalModel

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
_CONTROL_TOKEN = 3
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def reference(openvino_model: LocalModel) -> Reference:
    """An independent tokenizer from the same file: byte-level BPE after splitting off single digits. Bytes that the
    vocabulary lacks (those of unassigned Unicode planes) become the file's unknown token."""
    fields = GGUFReader(openvino_model.path).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"].contents()]
    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = Reference(models.BPE(vocab=vocab, merges=merges, unk_token=unknown))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bpe.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    return bpe


def assert_same_ids(tokenizer: Tokenizer, reference: Reference, texts: list[str]) -> None:
    ours = tokenizer.encode_many([(COMPLETIONS, {"prompt": text}) for text in texts])
    for text, mine, theirs in zip(texts, ours, reference.encode_batch(texts), strict=True):
        if len(theirs.ids) >= 8192:
            assert isinstance(mine, Fault) and mine.code == "context_length_exceeded"
        else:
            assert not isinstance(mine, Fault), (text[:80], mine)
            assert mine.tolist() == theirs.ids, text[:80]


def test_ids_are_those_of_an_independent_tokenizer_on_this_repository(
    tokenizer: Tokenizer, reference: Reference
) -> None:
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("src/plait/**/*.py"), ROOT / "examples" / "requests.jsonl"]
    texts = [path.read_text()[:20_000] for path in files]
    assert_same_ids(tokenizer, reference, [text for text in texts if text] + TEXTS)


def test_ids_are_those_of_an_independent_tokenizer_on_real_prompts(
    tokenizer: Tokenizer, reference: Reference, shared: Path
) -> None:
    texts = []
    for path in sorted((shared / "data" / "prompts").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            texts += [row["prompt"] for row in map(json.loads, lines) if isinstance(row.get("prompt"), str)][::40]
    assert len(texts) > 50
    assert_same_ids(tokenizer, reference, texts)


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=8))
def test_ids_are_those_of_an_independent_tokenizer_on_any_text(
    tokenizer: Tokenizer, reference: Reference, texts: list[str]
) -> None:
    assert_same_ids(tokenizer, reference, texts)


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
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (COMPLETIONS, {"prompt": [5, 6]}),
    ]
    results = tokenizer.encode_many(requests)
    faults = [(result.code, result.param) for result in results if isinstance(result, Fault)]
    assert faults == [
        ("invalid_value", "messages"),
        ("invalid_value", "prompt"),
        ("empty_prompt", "prompt"),
        ("context_length_exceeded", "prompt"),
        ("context_length_exceeded", "messages"),
    ]
    assert np.array_equal(np.asarray(results[5]), [5, 6])
