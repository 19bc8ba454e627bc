"""Bodies to settings, answers to text, and the engine's books, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.problems import Fault
from plait.data.schema import CHAT, COMPLETIONS
from plait.engine.chat import stop_position
from plait.engine.flight import Account
from plait.engine.sampling import read_sampling
from plait.engine.shadow import PrefixShadow, chain
from plait.engine.wire import Cancel, Sampling, frame, frames, to_child


def test_defaults_are_the_endpoints() -> None:
    sampling = read_sampling(CHAT, {"messages": []}, 5)
    assert sampling == Sampling(max_tokens=5) and sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, {"logit_bias": {"1": 5.0}}, "logit_bias"),
        (CHAT, {"tools": [{}]}, "tools"),
        (CHAT, {"logprobs": True, "top_logprobs": 3, "temperature": 0}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 2, "temperature": 0}, "logprobs"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format"),
    ],
)
def test_what_the_engine_cannot_do_is_named(url: str, body: dict[str, Any], param: str) -> None:
    fault = read_sampling(url, body, 5)
    assert isinstance(fault, Fault) and (fault.code, fault.param) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    "body", [{"logit_bias": {}}, {"tools": []}, {"n": None}, {"tool_choice": "none"}, {"user": "u"}]
)
def test_parameters_that_ask_for_nothing_pass(body: dict[str, Any]) -> None:
    assert isinstance(read_sampling(CHAT, body, 5), Sampling)


@given(st.text("abc"), st.lists(st.text("abc", min_size=1), max_size=3))
def test_text_is_cut_at_the_earliest_stop(text: str, stops: list[str]) -> None:
    at = stop_position(text, stops, include=False)
    assert not any(stop in text[:at] for stop in stops)
    assert (at is None) == (not any(stop in text for stop in stops))


@given(st.lists(st.lists(st.integers(0, 1 << 40))), st.integers(1, 7))
def test_frames_survive_any_cut(rows: list[list[int]], size: int) -> None:
    data = b"".join(frame(Cancel(row)) for row in rows)
    buffer, found = bytearray(), []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        found += [to_child(message) for message in frames(buffer)]
    assert found == [Cancel(row) for row in rows] and not buffer


def test_members_of_a_group_share_only_after_the_first_ones_prefill() -> None:
    account = Account(kv_blocks=100, max_batched_tokens=256)
    ids = np.arange(300, dtype=np.int32)
    first, second = (account.add(row, True, ids, Sampling(4)) for row in (0, 1))
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    work = account.after_step(set(), scheduled=1, used_blocks=8)
    assert (work.prefill_tokens, first.computed_tokens, second.computed_tokens) == (256, 256, 0)
    assert account.add(2, True, ids, Sampling(4)).cached_tokens == 256
    account.after_step({first}, scheduled=2, used_blocks=18)
    assert first.decoding and account.add(3, True, ids, Sampling(4)).cached_tokens == 288


def test_a_decoding_request_without_a_token_was_preempted() -> None:
    account = Account(kv_blocks=10, max_batched_tokens=256)
    flight = account.add(0, True, np.arange(40, dtype=np.int32), Sampling(4))
    assert account.after_step({flight}, 1, 2).began == [flight]
    work = account.after_step(set(), 0, 0)
    assert work.preempted == [flight] and not flight.decoding
    assert account.after_step({flight}, 1, 2).prefill_tokens == 40


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(4, 12))
def test_the_shadow_never_holds_more_than_the_engine(picks: list[int], blocks: int) -> None:
    shadow = PrefixShadow(blocks)
    prompts = [chain(np.full(96, pick, np.int32)) for pick in range(4)]
    for pick in picks:
        matched = shadow.match(prompts[pick])
        shadow.fill(prompts[pick][matched:])
        shadow.release(prompts[pick])
        shadow.shrink(0)
        held = sum(shadow.match(keys) for keys in prompts)
        assert held <= blocks
        for keys in prompts:
            shadow.release(keys[: sum(key in shadow._users for key in keys)])
