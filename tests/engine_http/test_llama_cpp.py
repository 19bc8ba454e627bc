"""The pool against a real llama.cpp server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from plait.engine.http import HttpPool
from plait.engine.models import find_model
from plait.events import EngineRequest, Failed, Finished
from plait.testing_llama import llama_server
from tests.engine_http.pools import chat, collect, content, endings, run, settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"),
]

PREFIX = "You are given a list of facts about rivers, and you answer with one word. " * 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with llama_server(find_model().path) as base:
        yield base


def test_its_slots_context_and_kv_are_discovered(url: str) -> None:
    pool = HttpPool(settings(url))
    capacity = pool.capacity
    models = pool.models
    server = pool._dispatcher.servers[0]
    info, limit = server.info, server.window.limit
    pool.close()
    assert capacity.max_context_tokens == 2048 and len(models) == 1
    assert (capacity.max_num_seqs, capacity.queued_seqs) == (2, 30), "what runs at once, and what is chosen from"
    assert (info.kv_tokens, info.block_tokens, info.slot_caches, limit) == (2048, 1, 2, 2)


def test_chat_and_completion_requests_are_answered_with_usage_and_reuse(url: str) -> None:
    requests = [chat(row, f"{PREFIX} Question {row}?", max_tokens=4, temperature=0) for row in range(6)]
    requests.append(EngineRequest(6, "/v1/completions", {"prompt": "Once upon", "max_tokens": 4}, None, 4))
    pool = HttpPool(settings(url, stall_timeout_s=60))
    pool.submit(requests)
    ended = endings(collect(pool, 7, 100))
    window = pool._dispatcher.servers[0].window
    pool.close()
    finished = [event for event in ended.values() if isinstance(event, Finished) and event.status_code == 200]
    assert len(finished) == 7 and all(1 <= event.output_tokens <= 4 and event.finish_reasons for event in finished)
    assert all(content(event) is not None for row, event in ended.items() if row < 6)
    asked = sum(event.prompt_tokens for event in finished)
    reused = sum(event.cached_tokens for event in finished)
    assert reused > 0.5 * asked, "the group was primed, then shared"
    assert window.measured and window.limit == 2


def test_a_prompt_beyond_the_context_is_recorded_with_the_servers_own_error(url: str) -> None:
    ended = run([chat(0, "word " * 4000)], settings(url, stall_timeout_s=60), 60)
    event = ended[0]
    assert not isinstance(event, Failed) and isinstance(event, Finished) and event.status_code == 400
    assert b"context" in event.body
