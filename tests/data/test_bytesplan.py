"""Planning on bytes: units follow the text, sharing survives, the ratio is learned."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait.data.bytesplan import UNIT_BYTES, prompt_bytes, pseudo_tokens
from plait.tree.build import build_tree


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_every_prompt_has_its_bytes_in_whole_units_and_at_least_one(prompts: list[bytes]) -> None:
    tokens, offsets = pseudo_tokens(prompts)
    assert tokens.dtype == np.int32 and len(offsets) == len(prompts) + 1 and offsets[-1] == len(tokens)
    for row, prompt in enumerate(prompts):
        own = tokens[offsets[row] : offsets[row + 1]].astype("<i4").tobytes()
        assert (
            own.rstrip(b"\0") == prompt.rstrip(b"\0") and len(own) == max(-(-len(prompt) // UNIT_BYTES), 1) * UNIT_BYTES
        )


@given(prefix=st.text(min_size=8, max_size=60), ends=st.lists(st.text(max_size=20), min_size=2, max_size=8))
def test_a_shared_opening_is_found_by_the_tree_to_within_a_unit(prefix: str, ends: list[str]) -> None:
    bodies = [{"messages": [{"role": "system", "content": prefix}, {"role": "user", "content": end}]} for end in ends]
    tokens, offsets = pseudo_tokens([prompt_bytes(body) for body in bodies])
    tree = build_tree(tokens, offsets)
    shared = len(prefix.encode()) // UNIT_BYTES
    assert all(tree.prefix_tokens[node] >= shared for node in tree.node_of)


def test_settings_do_not_change_the_prompt_and_contents_of_every_kind_do() -> None:
    base = {"messages": [{"role": "user", "content": "a"}]}
    assert prompt_bytes(base | {"temperature": 1, "max_tokens": 5}) == prompt_bytes(base)
    seen = [
        prompt_bytes(body)
        for body in (
            base,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
            base | {"tools": [{"type": "function"}]},
            {"prompt": "a"},
            {"prompt": [1, 2]},
            {"input": ["a", "b"]},
            {"input": "a", "instructions": "b"},
            {"query": "q", "documents": ["d"]},
            {"text_1": "x", "text_2": "y"},
            {"messages": ["odd"]},
        )
    ]
    assert len(set(seen)) == len(seen)
