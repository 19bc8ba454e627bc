"""What a reply means, without a socket."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.engine.answers import Answer, Fault, read_reply, retry_after_s
from plait.testing_server import http_date

JSON = "application/json"


def chat_body(**usage: object) -> bytes:
    return json.dumps({"choices": [{"finish_reason": "length"}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (
            chat_body(prompt_tokens=10, completion_tokens=3, prompt_tokens_details={"cached_tokens": 8}),
            (10, 8, 3, ("length",)),
        ),
        (chat_body(prompt_tokens=10, completion_tokens=3, prompt_tokens_details=None), (10, 0, 3, ("length",))),
        (chat_body(prompt_tokens=10, total_tokens=10), (10, 0, 0, ("length",))),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":1},"timings":{"cache_n":4}}', (9, 4, 1, ())),
        (
            b'{"usage":{"input_tokens":9,"output_tokens":1,"input_tokens_details":{"cached_tokens":2}},'
            b'"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}',
            (9, 2, 1, ("length",)),
        ),
        (b'{"choices":"not a list"}', (0, 0, 0, ())),
        (b'{"data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":5,"total_tokens":5}}', (5, 0, 0, ())),
    ],
)
def test_usage_is_read_from_every_kind_of_answer(body: bytes, counts: tuple[object, ...]) -> None:
    answer = read_reply(200, JSON, {}, body)
    assert isinstance(answer, Answer) and answer.body == body
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens, answer.finish_reasons) == counts


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"null", b'{"a":1}x', b"\xff\xfe", chat_body()[:-1]])
def test_a_200_that_is_not_a_whole_object_is_a_fault(body: bytes) -> None:
    fault = read_reply(200, JSON, {}, body)
    assert isinstance(fault, Fault) and fault.code == "invalid_response" and fault.status == 200


def test_pretty_printed_answers_become_one_line_with_the_same_content() -> None:
    body = json.dumps({"choices": [], "text": "a\nb"}, indent=2).encode()
    answer = read_reply(200, "application/json; charset=utf-8", {}, body)
    assert isinstance(answer, Answer) and b"\n" not in answer.body and json.loads(answer.body) == json.loads(body)


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limited"), (408, "server_error"), (500, "server_error"), (529, "server_error")]
)
def test_statuses_of_the_moment_are_faults(status: int, code: str) -> None:
    fault = read_reply(status, "text/html", {"Retry-After": "2.5"}, b"<html>")
    assert isinstance(fault, Fault) and (fault.code, fault.status, fault.retry_after_s) == (code, status, 2.5)


@given(status=st.sampled_from([400, 401, 403, 404, 413, 422, 302]), body=st.binary(max_size=2000))
def test_other_errors_are_recorded_as_one_json_object_in_one_line(status: int, body: bytes) -> None:
    answer = read_reply(status, None, {}, body)
    assert isinstance(answer, Answer) and answer.status == status
    assert b"\n" not in answer.body and isinstance(json.loads(answer.body), dict)


@given(st.text(max_size=30))
def test_no_retry_after_header_breaks_the_reader(value: str) -> None:
    wait_s = retry_after_s({"Retry-After": value})
    assert wait_s is None or wait_s >= 0 or wait_s != wait_s


def test_a_retry_after_date_is_measured_against_the_servers_own_clock() -> None:
    headers = {"Retry-After": "Wed, 01 Jan 2020 00:00:30 GMT", "Date": "Wed, 01 Jan 2020 00:00:10 GMT"}
    assert retry_after_s(headers) == 20
    assert 0 <= (retry_after_s({"Retry-After": http_date(5)}) or 0) <= 6
    assert retry_after_s({"Retry-After": "Wed, 01 Jan 2020 00:00:30 GMT"}) == 0
    assert retry_after_s({}) is None
