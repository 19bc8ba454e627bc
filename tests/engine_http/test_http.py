"""The pool against real loopback servers: every fault a server or a network is known to produce."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from plait.engine.http import HttpPool
from plait.errors import EngineError, UsageError
from plait.events import EngineRequest, Event, Failed, Finished, Preempted, Started
from plait.testing_server import (
    FAULTS,
    HTML_PAGE,
    PERMANENT,
    Call,
    LoopbackServer,
    Reply,
    answer,
    echo,
    error,
    http_date,
)
from plait.testing_server import too_many_requests as refusal
from tests.cli.command import wait_until
from tests.engine_http.pools import chat, collect, content, endings, run, settings


def test_every_row_gets_its_own_answer_and_usage() -> None:
    with LoopbackServer() as server:
        pool = HttpPool(settings(server.url))
        pool.submit([chat(row) for row in range(50)])
        events = collect(pool, 50)
        pool.close()
    assert {row: content(event) for row, event in endings(events).items()} == {
        r: f"prompt of row {r}" for r in range(50)
    }
    assert Counter(type(event) for event in events) == {Started: 50, Finished: 50}
    assert all(e.prompt_tokens > 0 and e.output_tokens == 1 for e in events if isinstance(e, Finished))
    assert all(e.finish_reasons == ("stop",) for e in events if isinstance(e, Finished))


def test_bodies_and_paths_of_every_kind_of_endpoint_go_out_untouched() -> None:
    urls = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/score",
        "/v2/rerank",
        "/score",
    ]
    bodies = [
        {"model": "m", "input": ["é\u2028", str(i)], "unknown_field": {"a": [1, 2.5, None]}} for i in range(len(urls))
    ]
    with LoopbackServer(lambda call: Reply(body=b'{"data":[]}') if call.method == "POST" else echo(call)) as server:
        requests = [EngineRequest(i, url, bodies[i], None, 1) for i, url in enumerate(urls)]
        ended = run(requests, settings(server.url))
        assert all(isinstance(event, Finished) and event.body == b'{"data":[]}' for event in ended.values())
        assert {call.path: call.body for call in server.calls} == dict(zip(urls, bodies, strict=True))


def test_a_model_override_replaces_only_the_model() -> None:
    with LoopbackServer() as server:
        run([chat(0, temperature=0.5)], settings(server.url, model="other"))
        assert server.calls[0].body == chat(0, temperature=0.5).body | {"model": "other"}


# ---- srv-01: 429


def limiter(first: int, refused: int, refuse: Callable[[], Reply]) -> Callable[[Call], Reply]:
    """The ``first`` requests are echoed, the next ``refused`` ones refused, all later ones echoed."""

    def behave(call: Call) -> Reply:
        return refuse() if call.method == "POST" and first <= call.index < first + refused else echo(call)

    return behave


@pytest.mark.parametrize("header", ["seconds", "date", "none"])
def test_refused_requests_are_answered_later_and_never_before_their_retry_after(header: str) -> None:
    refused: dict[str, float] = {}
    waits_s: list[float] = []

    def refuse_until() -> Reply:
        return refusal({"seconds": "1", "date": http_date(1.0), "none": None}[header])

    inner = limiter(10, 8, refuse_until)

    def behave(call: Call) -> Reply:
        reply = inner(call)
        if call.method == "POST" and call.prompt in refused:
            waits_s.append(call.t_s - refused[call.prompt])
        if reply.status == 429:
            refused[call.prompt] = call.t_s
        return reply

    with LoopbackServer(behave) as server:
        ended = run([chat(row) for row in range(40)], settings(server.url, backoff_s=0.1, max_backoff_s=1.0))
        sent_again = Counter(call.prompt for call in server.calls)
    assert {row: content(event) for row, event in ended.items()} == {row: f"prompt of row {row}" for row in range(40)}
    assert waits_s and max(sent_again.values()) >= 2
    assert header == "none" or min(waits_s) >= 0.99


def test_concurrency_falls_after_a_refusal_and_recovers() -> None:
    with LoopbackServer(lambda call: echo(call)) as server:
        pool = HttpPool(settings(server.url))
        window = pool._dispatcher.servers[0].window
        before = window.limit
        refuse_once = iter([True])
        server.behaviour = lambda call: (
            refusal("0") if call.method == "POST" and next(refuse_once, False) else echo(call)
        )
        pool.submit([chat(0)])
        collect(pool, 1)
        assert window.limit < before
        pool.submit([chat(row) for row in range(1, 200)])
        collect(pool, 199)
        pool.close()
        assert window.limit >= before


def test_a_row_told_to_wait_an_hour_becomes_an_error_row_with_status_429() -> None:
    with LoopbackServer(limiter(10, 90, lambda: refusal("3600"))) as server:
        ended = run([chat(row) for row in range(40)], settings(server.url, max_wait_s=1.0))
        prompts = Counter(call.prompt for call in server.calls)
    assert max(prompts.values()) == 1, "nothing is re-sent before its Retry-After"
    failed = [event for event in ended.values() if isinstance(event, Failed)]
    assert len(failed) + sum(isinstance(event, Finished) for event in ended.values()) == 40
    assert failed
    for event in failed:
        assert (event.status_code, event.code, event.retryable) == (429, "rate_limited", True)
        assert event.body is not None and json.loads(event.body)["error"]["message"] == "rate limit reached"


# ---- srv-05: gateways and half answers


def of_row(faults: dict[int, Callable[[int], Reply]]) -> Callable[[Call], Reply]:
    """``faults[row](attempt)`` for the rows named, echo for the others."""
    tries: Counter[str] = Counter()

    def behave(call: Call) -> Reply:
        row = int(call.prompt.rsplit(" ", 1)[-1]) if call.method == "POST" else -1
        tries[call.prompt] += 1
        return faults[row](tries[call.prompt]) if row in faults else echo(call)

    return behave


FOUR = {2: "504-html", 3: "502-empty", 4: "200-html", 5: "truncated-json"}


def test_pages_of_proxies_and_cut_answers_are_retried_and_never_become_answers() -> None:
    def once(name: str, row: int) -> Callable[[int], Reply]:
        whole = answer(Call(0, 0, "POST", "/", {}, b""), f"prompt of row {row}")
        return lambda attempt: FAULTS[name]() if attempt == 1 else whole

    with LoopbackServer(of_row({row: once(name, row) for row, name in FOUR.items()})) as server:
        ended = run([chat(row) for row in range(6)], settings(server.url))
    assert {row: content(event) for row, event in ended.items()} == {row: f"prompt of row {row}" for row in range(6)}


def test_when_retries_run_out_error_rows_hold_status_excerpt_and_code() -> None:
    def always(name: str) -> Callable[[int], Reply]:
        return lambda attempt: FAULTS[name]()

    with LoopbackServer(of_row({row: always(name) for row, name in FOUR.items()})) as server:
        ended = run([chat(row) for row in range(6)], settings(server.url, retries=2))
        assert Counter(call.prompt for call in server.calls)["prompt of row 2"] == 3
    assert content(ended[0]) and content(ended[1])
    expected = {
        2: (504, "server_error"),
        3: (502, "server_error"),
        4: (200, "invalid_response"),
        5: (200, "invalid_response"),
    }
    for row, (status, code) in expected.items():
        event = ended[row]
        assert isinstance(event, Failed), event
        assert (event.status_code, event.code, event.retryable) == (status, code, True)
    gateway = ended[2]
    assert isinstance(gateway, Failed) and HTML_PAGE.decode()[:40] in gateway.message
    assert gateway.body is not None and "504 Gateway" in json.loads(gateway.body)["error"]["message"]


@pytest.mark.parametrize("name", sorted(set(FAULTS) - PERMANENT - {"stall", "429-hour"}))
def test_a_passing_fault_of_any_kind_ends_in_the_answer(name: str) -> None:
    def behave(call: Call) -> Reply:
        return FAULTS[name]() if call.method == "POST" and call.index == 0 else echo(call)

    with LoopbackServer(behave) as server:
        ended = run([chat(row) for row in range(5)], settings(server.url))
    assert {row: content(event) for row, event in ended.items()} == {row: f"prompt of row {row}" for row in range(5)}


@pytest.mark.parametrize("name", sorted(PERMANENT))
def test_the_requests_own_fault_is_recorded_at_once_with_the_servers_words(name: str) -> None:
    with LoopbackServer(lambda call: FAULTS[name]() if call.method == "POST" else echo(call)) as server:
        ended = run([chat(0)], settings(server.url))
        assert len(server.calls) == 1
    event = ended[0]
    assert isinstance(event, Finished) and event.status_code in (400, 404)
    assert event.body == FAULTS[name]().body


def test_all_refused_as_bad_requests_ends_every_row_with_its_400() -> None:
    with LoopbackServer(lambda c: error(400, "unsupported parameter") if c.method == "POST" else echo(c)) as server:
        ended = run([chat(row) for row in range(3)], settings(server.url))
    assert [event.status_code for event in ended.values() if isinstance(event, Finished)] == [400] * 3
    messages = [json.loads(event.body)["error"]["message"] for event in ended.values() if isinstance(event, Finished)]
    assert messages == ["unsupported parameter"] * 3


# ---- srv-07: members of a pool die and return


def test_a_pool_survives_a_member_that_dies_and_uses_it_again_when_it_returns() -> None:
    servers = [LoopbackServer(lambda call: answer(call, call.prompt, delay_s=0.02)) for _ in range(3)]
    second = servers[1]

    def dying(call: Call) -> Reply:
        if call.method == "POST" and call.index == 7:  # among those that are sent at once
            return Reply(kill=True)
        return answer(call, call.prompt, delay_s=0.02) if call.method == "POST" else echo(call)

    second.behaviour = dying
    pool = HttpPool(settings(*(server.url for server in servers)))
    try:
        pool.submit([chat(row) for row in range(120)])
        ended = endings(collect(pool, 120))
        assert {row: content(event) for row, event in ended.items()} == {r: f"prompt of row {r}" for r in range(120)}
        assert not second.listening
        second.revive()
        wait_until(lambda: pool._dispatcher.servers[1].up)
        before = len(second.calls)
        pool.submit([chat(row) for row in range(120, 240)])
        collect(pool, 120)
        assert len(second.calls) > before, "the returned server is used again"
    finally:
        pool.close()
        for server in servers:
            server.close()


def test_when_all_servers_are_gone_the_run_stops_with_an_engine_error_that_names_them() -> None:
    with LoopbackServer() as first, LoopbackServer() as second:
        pool = HttpPool(settings(first.url, second.url, patience_s=0.5))
        first.kill()
        second.kill()
        pool.submit([chat(row) for row in range(4)])
        with pytest.raises(EngineError, match=r"no server has answered.*resume") as caught:
            collect(pool, 4)
        assert first.url in str(caught.value) and second.url in str(caught.value)
        with pytest.raises(EngineError):
            pool.submit([chat(9)])
        pool.close()


def test_a_pool_whose_servers_never_answered_is_not_opened() -> None:
    server = LoopbackServer()
    server.close()
    with pytest.raises(EngineError, match="no server answers"):
        HttpPool(settings(server.url))


def test_a_server_that_takes_no_connection_is_given_up_in_time_and_the_others_do_the_work() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, LoopbackServer() as good:
        address = full.getsockname()
        taken = [socket.socket() for _ in range(4)]  # nobody accepts: its queue is full
        for client in taken:
            client.setblocking(False)
            client.connect_ex(address)
        pool = HttpPool(settings(f"http://127.0.0.1:{address[1]}/v1", good.url, connect_timeout_s=1.0))
        assert "Connection timeout" in pool.unreachable[0], "it is not waited for as long as for a page"
        pool.submit([chat(row) for row in range(8)])
        ended = endings(collect(pool, 8))
        pool.close()
        assert len(good.calls) == 8
        assert all(content(event) for event in ended.values())
        for client in taken:
            client.close()


def test_a_server_that_is_down_at_the_start_is_used_once_it_is_there() -> None:
    with LoopbackServer() as up, LoopbackServer() as late:
        late.kill()
        pool = HttpPool(settings(up.url, late.url))
        pool.submit([chat(0)])
        collect(pool, 1)
        late.revive()
        wait_until(lambda: pool._dispatcher.servers[1].up)
        pool.submit([chat(row, affinity=row) for row in range(1, 40)])
        collect(pool, 39)
        pool.close()
        assert late.calls


# ---- srv-08: silence


def test_a_silent_server_is_never_waited_for_for_ever() -> None:
    with LoopbackServer(
        lambda call: echo(call) if call.method == "GET" or call.index < 4 else Reply(silent=True)
    ) as server:
        pool = HttpPool(settings(server.url, stall_timeout_s=0.5))
        pool.submit([chat(row) for row in range(10)])
        events = collect(pool, 4)
        with pytest.raises(EngineError, match=r"nothing has moved for .*row \d"):
            events += collect(pool, 6)
        assert len(server.calls) > 10, "the stuck ones were tried again"
        pool.close()
    assert len(endings(events)) == 4


def test_that_the_process_itself_stood_still_is_not_taken_for_silence_of_the_servers() -> None:
    held = threading.Event()
    with LoopbackServer(lambda call: replace(echo(call), held=held if call.method == "POST" else None)) as server:
        pool = HttpPool(settings(server.url, stall_timeout_s=6.0))
        pool.submit([chat(row) for row in range(4)])
        wait_until(lambda: server.in_flight == 4)
        awake = threading.Event()

        def halt() -> None:
            time.sleep(9.0)
            awake.set()

        pool._loop.call_soon_threadsafe(halt)
        awake.wait()
        time.sleep(1.0)  # a sweep or two
        held.set()
        ended = endings(collect(pool, 4))
        pool.close()
        assert len(server.calls) == 4, "nobody was asked twice"
    assert all(content(event) for event in ended.values())


def test_one_stuck_request_is_retried_while_the_others_carry_on() -> None:
    with LoopbackServer(
        lambda call: Reply(silent=True) if call.method == "POST" and call.index == 3 else echo(call)
    ) as server:
        ended = run([chat(row) for row in range(10)], settings(server.url, stall_timeout_s=0.4))
    assert all(content(event) for event in ended.values())


# ---- res-04: mapping


def test_answers_belong_to_their_rows_with_two_servers_random_latency_and_errors() -> None:
    dice = random.Random(4)
    tried: set[str] = set()

    def behave(call: Call) -> Reply:
        if call.method == "POST" and call.prompt not in tried:
            tried.add(call.prompt)
            if dice.random() < 0.1:
                return FAULTS["503"]()
        return answer(call, call.prompt, delay_s=dice.uniform(0.001, 0.08)) if call.method == "POST" else echo(call)

    with LoopbackServer(behave) as first, LoopbackServer(behave) as second:
        ended = run([chat(row) for row in range(300)], settings(first.url, second.url))
        assert first.calls and second.calls
    assert {row: content(event) for row, event in ended.items()} == {row: f"prompt of row {row}" for row in range(300)}


# ---- a request that kills the server


def test_a_request_that_kills_its_server_is_isolated_and_the_innocent_are_answered() -> None:
    server = LoopbackServer()

    def behave(call: Call) -> Reply:
        if call.method == "POST" and "poison" in call.prompt:
            return Reply(kill=True)
        return answer(call, call.prompt, delay_s=0.05) if call.method == "POST" else echo(call)

    server.behaviour = behave
    with server:
        pool = HttpPool(settings(server.url))
        pool.submit([chat(row, "poison" if row == 5 else None) for row in range(30)])
        events: list[Event] = []
        while len(endings(events)) < 30:
            events += pool.poll(0.05)
            if not (server.listening or pool._dispatcher.servers[0].up):  # it comes back once its death was noticed
                server.revive()
        ended = endings(events)
        pool.close()
        deaths = sum("poison" in call.prompt for call in server.calls)
        last = next(index for index in range(len(server.calls) - 1, -1, -1) if "poison" in server.calls[index].prompt)
    event = ended.pop(5)
    assert isinstance(event, Failed) and event.code == "engine_killed" and not event.retryable
    assert {row: content(e) for row, e in ended.items()} == {r: f"prompt of row {r}" for r in range(30) if r != 5}
    assert deaths == 3 and last > 25, "it ran last"


# ---- cancelling, closing, secrets, limits


def test_cancelled_requests_come_back_once_wherever_they_were() -> None:
    with LoopbackServer(lambda call: echo(call) if call.method == "GET" else Reply(silent=True)) as server:
        pool = HttpPool(settings(server.url))
        pool.submit([chat(row) for row in range(40)])
        pool.cancel(range(100))
        pool.cancel(range(40))
        ended = endings(collect(pool, 40))
        pool.close()
    assert all(isinstance(event, Preempted) and event.requeue for event in ended.values())


def test_closing_in_the_middle_is_quick_and_idempotent() -> None:
    with LoopbackServer(lambda call: echo(call) if call.method == "GET" else Reply(silent=True)) as server:
        pool = HttpPool(settings(server.url, stall_timeout_s=600))
        pool.submit([chat(row) for row in range(40)])
        start_s = time.monotonic()
        pool.close()
        pool.close()
        assert time.monotonic() - start_s < 120
        with pytest.raises(EngineError, match="closed"):
            pool.submit([chat(1)])


def test_the_key_is_sent_and_shows_up_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PLAIT_TEST_KEY", "sk-very-secret")

    def behave(call: Call) -> Reply:
        return error(400, f"bad key {call.headers['authorization']}") if call.method == "POST" else echo(call)

    with LoopbackServer(behave) as server:
        limits = settings(server.url, api_key_env="PLAIT_TEST_KEY")
        ended = run([chat(0)], limits)
        assert server.calls[0].headers["authorization"] == "Bearer sk-very-secret"
    for text in (repr(limits), repr(ended), caplog.text):
        assert "sk-very-secret" not in text


def test_a_refused_key_stops_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackServer(lambda call: error(401, "no")) as server:
        with pytest.raises(EngineError, match="--api-key-env"):
            HttpPool(settings(server.url))
        assert not server.calls
    monkeypatch.delenv("PLAIT_TEST_KEY", raising=False)
    with pytest.raises(UsageError, match="PLAIT_TEST_KEY"):
        HttpPool(settings("http://127.0.0.1:1/v1", api_key_env="PLAIT_TEST_KEY"))


@pytest.mark.parametrize("limit", [1, 3])
def test_never_more_in_flight_than_the_user_allows(limit: int) -> None:
    held = threading.Event()
    with LoopbackServer(lambda call: replace(echo(call), held=held if call.method == "POST" else None)) as server:
        pool = HttpPool(settings(server.url, max_concurrency=limit))
        pool.submit([chat(row) for row in range(40)])
        wait_until(lambda: server.in_flight == limit)
        time.sleep(0.2)  # for one more, if it came
        held.set()
        collect(pool, 40)
        pool.close()
        assert server.max_in_flight == limit


def test_never_faster_than_the_requests_a_minute_a_user_allows() -> None:
    with LoopbackServer() as server:
        pool = HttpPool(settings(server.url, rpm=20))
        pool.submit([chat(row) for row in range(60)])
        collect(pool, 20)
        time.sleep(0.5)
        pool.close()
        assert len(server.calls) == 20


def test_never_more_tokens_a_minute_than_a_user_allows() -> None:
    asked: list[int] = []

    def behave(call: Call) -> Reply:
        if call.method == "GET":
            return echo(call)
        asked.append(call.body["max_tokens"])
        return answer(call, "ok", output_tokens=call.body["max_tokens"])

    with LoopbackServer(behave) as server:
        pool = HttpPool(settings(server.url, tpm=1000))
        pool.submit([chat(row, max_tokens=90) for row in range(40)])
        spent = sum(e.prompt_tokens + e.output_tokens for e in collect(pool, 7) if isinstance(e, Finished))
        time.sleep(0.5)
        spent += sum(e.prompt_tokens + e.output_tokens for e in pool.poll(0.2) if isinstance(e, Finished))
        pool.close()
    assert 500 < spent <= 1000 and len(asked) < 12


def test_without_a_tokenizer_prompts_are_counted_by_the_bytes_a_token_has_had() -> None:
    def dense(call: Call) -> Reply:
        usage = {"prompt_tokens": len(call.raw) // 2, "completion_tokens": 1}
        return Reply(body=json.dumps({"choices": [], "usage": usage}).encode()) if call.method == "POST" else echo(call)

    with LoopbackServer(dense) as server:
        pool = HttpPool(settings(server.url))
        pool.submit([chat(row) for row in range(300)])
        collect(pool, 300)
        assert abs(pool._dispatcher.pace.bytes_per_token - 2) < 0.1
        pool.close()


def test_tokens_of_an_answer_that_was_cut_off_count_as_spent() -> None:
    def behave(call: Call) -> Reply:
        return FAULTS["truncated-json"]() if call.method == "POST" and call.index < 8 else echo(call)

    with LoopbackServer(behave) as server:
        pool = HttpPool(settings(server.url, tpm=1000, retries=20))
        pool.submit([chat(row, max_tokens=90) for row in range(40)])
        wait_until(lambda: len(server.calls) > 5)
        time.sleep(0.5)  # for more, if they came
        pool.close()
        assert len(server.calls) < 12


def test_two_servers_share_what_the_user_allows_in_flight() -> None:
    def slow(call: Call) -> Reply:
        return answer(call, call.prompt, delay_s=0.01) if call.method == "POST" else echo(call)

    with LoopbackServer(slow) as first, LoopbackServer(slow) as second:
        run([chat(row) for row in range(60)], settings(first.url, second.url, max_concurrency=4))
        assert max(first.max_in_flight, second.max_in_flight) <= 4
        assert min(len(first.calls), len(second.calls)) > 10


def test_a_request_that_is_stuck_twice_is_recorded_by_name_while_the_others_carry_on() -> None:
    def behave(call: Call) -> Reply:
        if call.method == "POST" and call.prompt == "stuck":
            return Reply(silent=True)
        return answer(call, call.prompt, output_tokens=8, delay_s=0.05) if call.method == "POST" else echo(call)

    requests = [replace(chat(0, "stuck"), name="my-id-0"), *(chat(row) for row in range(1, 80))]
    with LoopbackServer(behave) as server:
        ended = run(requests, settings(server.url, stall_timeout_s=0.4, max_concurrency=2))
        tries = sum(call.prompt == "stuck" for call in server.calls)
    event = ended.pop(0)
    assert isinstance(event, Failed) and event.code == "stall_timeout" and event.retryable, event
    assert "my-id-0" in event.message and server.url in event.message and tries == 2
    assert all(content(other) for other in ended.values())


def test_a_run_whose_servers_only_fail_stops_when_its_budget_is_spent() -> None:
    with LoopbackServer(lambda call: FAULTS["500"]() if call.method == "POST" else echo(call)) as server:
        pool = HttpPool(settings(server.url, run_retries=10, retries=100))
        pool.submit([chat(row) for row in range(20)])
        with pytest.raises(EngineError, match="retry budget"):
            collect(pool, 20)
        pool.close()


# ---- chaos


@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 0.5), kills=st.integers(0, 3))
def test_under_chaos_every_request_ends_exactly_once(seed: int, share: float, kills: int) -> None:
    dice = random.Random(seed)
    names = sorted(set(FAULTS) - {"stall", "429-seconds", "429-date", "429-hour"})

    def behave(call: Call) -> Reply:
        if call.method == "POST" and dice.random() < share:
            return FAULTS[dice.choice(names)]()
        return answer(call, call.prompt, delay_s=dice.uniform(0, 0.01)) if call.method == "POST" else echo(call)

    with LoopbackServer(behave) as first, LoopbackServer(behave) as second:
        pool = HttpPool(settings(first.url, second.url, run_retries=100_000, retries=50))
        pool.submit([chat(row) for row in range(60)])
        pool.cancel([dice.randrange(60) for _ in range(3)])
        events = []
        for _ in range(kills):
            victim = dice.choice([first, second])
            victim.kill()
            events += pool.poll(0.05)
            victim.revive()
        ended = endings(events)
        ended = endings([*events, *collect(pool, 60 - len(ended))])
        pool.close()
    assert set(ended) == set(range(60))
    for row, event in ended.items():
        if isinstance(event, Finished) and event.status_code == 200:
            assert content(event) == f"prompt of row {row}"


KINDS = sorted(set(FAULTS) - {"429-hour"})
QUICK = FAULTS | {"429-seconds": lambda: refusal("0"), "429-date": lambda: refusal(http_date(-1.0))}
"""Faults that ask for no long pause."""


@pytest.mark.parametrize("names", [KINDS, *([name] for name in KINDS)], ids=lambda names: "+".join(names)[:20])
def test_two_servers_one_killed_five_times_while_a_tenth_of_the_requests_meets_a_fault(names: list[str]) -> None:
    dice = random.Random(7)
    stuck: set[str] = set()

    def behave(call: Call) -> Reply:
        if call.method == "POST" and dice.random() < 0.1:
            reply = QUICK[dice.choice(names)]()
            if not reply.silent or call.prompt not in stuck:  # who is stuck twice may end the run, if it is the last
                stuck.update([call.prompt] if reply.silent else [])
                return reply
        return answer(call, call.prompt, delay_s=dice.uniform(0, 0.02)) if call.method == "POST" else echo(call)

    with LoopbackServer(behave) as first, LoopbackServer(behave) as second:
        limits = settings(
            first.url, second.url, run_retries=10_000, stall_timeout_s=0.5, retries=20, max_concurrency=12
        )
        pool = HttpPool(limits)
        pool.submit([chat(row) for row in range(500)])
        events = []
        for _ in range(5):
            second.kill()
            events += pool.poll(0.05)
            time.sleep(0.05)
            second.revive()
            events += pool.poll(0.05)
        ended = endings([*events, *collect(pool, 500 - len(endings(events)))])
        pool.close()
    assert set(ended) == set(range(500))
    for row, event in ended.items():
        assert not isinstance(event, Preempted)
        if isinstance(event, Finished) and event.status_code == 200:
            assert content(event) == f"prompt of row {row}"
    lost = {row: event for row, event in ended.items() if isinstance(event, Failed)}
    assert all(event.code == "stall_timeout" for event in lost.values()), lost
    assert PERMANENT & set(names) or sum(isinstance(e, Finished) and e.status_code == 200 for e in ended.values()) > 480


def test_the_cases_of_kind_server_are_the_ones_tested_here(shared: Path) -> None:
    lines = (shared / "cases" / "cases.jsonl").read_text().splitlines()
    ids = {case["id"] for case in map(json.loads, lines) if case["kind"].startswith("server/")}
    assert ids == {"srv-01", "srv-05", "srv-07", "srv-08"}
