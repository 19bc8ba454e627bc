"""The pool against pretend inference servers: capacity found, queue kept short, prefixes shared, groups together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.engine.http import HttpPool
from plait.events import EngineRequest, Finished
from plait.testing_model import PretendModel, PretendSlots
from plait.testing_server import LoopbackServer
from tests.engine_http.pools import chat, collect, content, endings, settings

GROUPS, EACH = 8, 12
HOURS_OF_TOKENS = 1_000_000
"""At 10 ms each: an answer that nobody waits for."""


def grouped() -> list[EngineRequest]:
    """Requests in tree order: groups of one 400-token opening each."""
    opening = {group: f"opening of group {group} ".ljust(1600, chr(97 + group)) for group in range(GROUPS)}
    return [
        chat(group * EACH + leaf, f"{opening[group]} question {leaf}", affinity=group)
        for group in range(GROUPS)
        for leaf in range(EACH)
    ]


def test_kv_blocks_and_context_are_discovered_from_metrics() -> None:
    with LoopbackServer(PretendModel(kv_blocks=100)) as one, LoopbackServer(PretendModel(kv_blocks=50)) as other:
        pool = HttpPool(settings(one.url, other.url))
        capacity = pool.capacity
        pool.close()
    assert (capacity.kv_tokens, capacity.block_tokens, capacity.max_context_tokens) == (2400, 16, 8192)
    assert not capacity.prefix_lookup_at_submit, "vLLM shares within a batch"


def test_a_server_without_metrics_is_limited_by_count_and_primed() -> None:
    with LoopbackServer(PretendModel(with_metrics=False)) as server:
        pool = HttpPool(settings(server.url, kv_tokens=5000, block_tokens=32))
        capacity = pool.capacity
        pool.close()
    assert (capacity.kv_tokens, capacity.block_tokens) == (5000, 32)
    assert capacity.max_num_seqs > 0


def test_with_metrics_the_servers_queue_stays_a_few_deep() -> None:
    model = PretendModel(slots=6, prefill_s_per_token=1e-5, decode_s_per_token=0.02)
    with LoopbackServer(model) as server:
        pool = HttpPool(settings(server.url))
        pool.submit(grouped())
        ended = endings(collect(pool, GROUPS * EACH))
        pool.close()
        assert all(content(event) for event in ended.values())
        assert 6 <= server.max_in_flight <= 6 + 10


@pytest.mark.parametrize("n_servers", [1, 2])
def test_nearly_all_sharing_is_kept_although_the_cache_holds_few_groups(n_servers: int) -> None:
    models = [
        PretendModel(slots=4, kv_blocks=120, with_metrics=False, prefill_s_per_token=2e-5, decode_s_per_token=1e-3)
        for _ in range(n_servers)
    ]
    servers = [LoopbackServer(model) for model in models]
    pool = HttpPool(settings(*(server.url for server in servers)))
    pool.submit(grouped())
    ended = endings(collect(pool, GROUPS * EACH))
    pool.close()
    for server in servers:
        server.close()
    assert all(isinstance(event, Finished) for event in ended.values())
    cached = sum(model.cached_tokens for model in models)
    # Less one group's: a machine that stalls before a server has read a primer lets the rest go with it.
    assert cached >= 0.9 * 400 * (GROUPS - 1) * (EACH - 1) - 400 * 3 * (n_servers - 1)
    assert all(model.prompt_tokens > 0.3 / n_servers * 400 * GROUPS * EACH for model in models), "work is balanced"


def test_a_primer_with_a_long_answer_holds_its_group_back_only_while_its_prompt_is_computed() -> None:
    model = PretendModel(slots=8, with_metrics=False, prefill_s_per_token=2e-4, decode_s_per_token=0.01)
    with LoopbackServer(model) as server:
        pool = HttpPool(settings(server.url))
        pool.submit([chat(1000 + row, max_tokens=5) for row in range(8)])
        collect(pool, 8)  # now it is known how fast the server is
        opening = "opening ".ljust(1600, "o")
        cached_before = model.cached_tokens
        lengths = [HOURS_OF_TOKENS] + [5] * 11
        pool.submit([chat(row, f"{opening} {row}", n, affinity=7) for row, n in enumerate(lengths)])
        ended = {event.row for event in collect(pool, 11) if isinstance(event, Finished)}
        pool.close()
    assert ended == set(range(1, 12)), "the others did not wait for the first one's answer"
    assert model.cached_tokens - cached_before >= 11 * 384, "and still found its prefix"


def test_before_anything_is_known_a_group_waits_a_moment_for_its_primer_not_for_its_answer() -> None:
    model = PretendModel(slots=8, with_metrics=False, prefill_s_per_token=1e-4, decode_s_per_token=0.01)
    with LoopbackServer(model) as server:
        pool = HttpPool(settings(server.url))
        lengths = [HOURS_OF_TOKENS] + [5] * 5
        pool.submit([chat(row, f"{'o' * 1600} {row}", n, affinity=7) for row, n in enumerate(lengths)])
        ended = {event.row for event in collect(pool, 5) if isinstance(event, Finished)}
        pool.close()
    assert ended == set(range(1, 6)) and model.cached_tokens >= 5 * 384


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_slots_that_share_nothing_still_compute_each_prefix_about_once(seed: int) -> None:
    model = PretendSlots(slots=4, prefill_s_per_token=2e-5, decode_s_per_token=1e-3)
    with LoopbackServer(model) as server:
        pool = HttpPool(settings(server.url))
        requests = [replace(each, max_tokens=3 + (each.row * 7 + seed) % 11) for each in grouped()]
        requests.sort(key=lambda each: (each.row % EACH > 0, each.row))  # one of each group is a sample, and goes first
        pool.submit([replace(each, body={**each.body, "max_tokens": each.max_tokens}) for each in requests])
        ended = endings(collect(pool, GROUPS * EACH))
        pool.close()
        assert server.max_in_flight == 4, "every slot is used, and nothing waits there"
    assert all(isinstance(event, Finished) for event in ended.values())
    assert model.cached_tokens >= 0.97 * 400 * GROUPS * (EACH - 1)
