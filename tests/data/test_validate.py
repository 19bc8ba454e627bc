"""Lines, one by one: every kind of fault is named, nothing raises, and the fast and the thorough reading agree."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.problems import shown
from plait.data.schema import BODIES, ROW_PARAMETERS
from plait.data.validate import MAX_NESTING, digest_of, examine, parse, read
from tests.data.lines import CHAT, COMPLETIONS, MESSAGES, chat, completion


def faults_of(line: object, passthrough: bool = False) -> list[tuple[str, str | None]]:
    """(code, param) of every error; warnings left out."""
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    parsed = parse(raw, 0, passthrough)
    assert examine(raw, 0, passthrough).bad == parsed.bad
    return [(fault.code, fault.param) for fault in parsed.faults if fault.severity == "error"]


def without(line: dict[str, Any], *path: str) -> dict[str, Any]:
    """The line without one key."""
    line = copy.deepcopy(line)
    inner = line
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return line


GOOD = [
    chat(),
    completion(),
    completion(prompt=[1, 2, 3]),
    {"url": CHAT, "body": {"messages": MESSAGES}, "custom_id": "ключ/" + "x" * 100, "method": "POST"},
    chat(temperature=0, top_p=1, n=3, stop=["a", "b"], seed=-1, logprobs=True, top_logprobs=20, user="u"),
    chat(stop="END", stream=False, logit_bias={"50256": -100}, presence_penalty=-2, frequency_penalty=2.0),
    chat(temperature=None, max_tokens=None, stop=None),
    chat(max_completion_tokens=1, response_format={"type": "json_object"}),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}),
    chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}], tool_choice="auto"),
    chat(top_k=-1, min_p=0.1, repetition_penalty=1.1, ignore_eos=True, min_tokens=0, guided_choice=["a", "b"]),
    chat(chat_template_kwargs={"enable_thinking": False}, guided_json={"type": "object"}, skip_special_tokens=False),
    chat(messages=[{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]),
    chat(
        messages=[
            {"role": "user", "content": "x", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
            {"role": "tool", "content": "y", "tool_call_id": "1"},
        ]
    ),
    completion(echo=True, logprobs=5, best_of=2, suffix="z"),
]


@pytest.mark.parametrize("line", GOOD)
@pytest.mark.parametrize("passthrough", [False, True])
def test_good_lines_have_no_faults(line: dict[str, Any], passthrough: bool) -> None:
    raw = json.dumps(line).encode()
    parsed = parse(raw, 0, passthrough)
    assert parsed.faults == []
    entry = examine(raw, 0, passthrough)
    assert (entry.custom_id, entry.url, entry.bad, entry.flagged) == (line["custom_id"], line["url"], False, False)
    assert (entry.digest, entry.deterministic) == digest_of(parsed.url, parsed.body)
    assert read(raw, 0) == parsed
    assert parsed.body == line["body"]


WRONG_VALUES: list[tuple[str, list[object]]] = [
    ("model", [5, "", []]),
    ("max_tokens", [0, -1, 1.5, "8", True, [], 10**400]),
    ("max_completion_tokens", [0, "8", 2.5]),
    ("temperature", [-0.1, 2.1, "0", True, {}]),
    ("top_p", [-1, 1.5, "1"]),
    ("n", [0, 129, "1", 1.0001]),
    ("stop", ["", ["a"] * 5, [1], 3, {}]),
    ("seed", ["1", 0.5, 2**64]),
    ("logprobs", [1, "true"]),
    ("top_logprobs", [-1, 21, "5"]),
    ("presence_penalty", [-2.5, "x"]),
    ("frequency_penalty", [3, None.__class__.__name__]),
    ("logit_bias", [[], {"1": 101}, {"1": "x"}, "x"]),
    ("response_format", ["json_object", {"type": "xml"}, {}, {"type": "json_schema"}]),
    ("tools", [{}, ["f"], "f"]),
    ("tool_choice", [1, []]),
    ("top_k", [-2, 1.5]),
    ("min_p", [2]),
    ("repetition_penalty", [0, -1, "1"]),
    ("min_tokens", [-1]),
    ("ignore_eos", ["yes", 1]),
    ("chat_template_kwargs", ["x", []]),
    ("guided_choice", ["a", [1]]),
    ("user", [5]),
    ("metadata", ["x"]),
    ("modalities", [["audio"], "text"]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_VALUES for value in values])
def test_a_wrong_value_is_named_with_what_was_got_and_what_is_allowed(name: str, value: object) -> None:
    raw = json.dumps(chat(**{name: value})).encode()
    (fault,) = parse(raw, 0, False).faults
    assert fault.code in ("invalid_type", "invalid_value")
    assert fault.param == name
    assert fault.message.startswith(f"{name} is {shown(value)}; ") and fault.message.endswith(" is needed")
    assert examine(raw, 0, False).bad


def test_a_list_of_fixed_values_is_named_with_them() -> None:
    (fault,) = parse(json.dumps(chat(modalities=["audio"])).encode(), 0, False).faults
    assert fault.message == 'modalities is ["audio"]; a list of "text" is needed'


@pytest.mark.parametrize("name", sorted(BODIES[CHAT].__struct_fields__))
def test_no_parameter_takes_just_anything(name: str) -> None:
    """Each parameter of the schema has a type that some value violates; none slips through unchecked."""
    line = chat(**{name: "x" if name == "logits_processors" else [[{"x": 1}]]})
    assert [param.split("[")[0] for _, param in faults_of(line) if param] == [name]


@pytest.mark.parametrize("key", ["custom_id", "method", "url", "body"])
def test_a_missing_part_of_the_line_is_named(key: str) -> None:
    assert ("missing_required_parameter", key) in faults_of(without(chat(), key))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (chat() | {"custom_id": ""}, ("invalid_value", "custom_id")),
        (chat() | {"custom_id": 7}, ("invalid_type", "custom_id")),
        (chat() | {"custom_id": None}, ("invalid_type", "custom_id")),
        (chat() | {"method": "GET"}, ("invalid_method", "method")),
        (chat() | {"method": "post"}, ("invalid_method", "method")),
        (chat() | {"method": None}, ("invalid_method", "method")),
        (chat() | {"url": 5}, ("invalid_type", "url")),
        (chat() | {"url": "/chat/completions"}, ("url_mismatch", "url")),
        (chat() | {"url": "https://example.com/v1/chat/completions"}, ("url_mismatch", "url")),
        (chat() | {"url": "/v1/chat/completions/"}, ("url_mismatch", "url")),
        (chat() | {"url": "/v1/embeddings"}, ("url_mismatch", "url")),
        (chat() | {"body": "not an object"}, ("invalid_type", "body")),
        (chat() | {"body": None}, ("invalid_type", "body")),
        (chat() | {"body": [chat()]}, ("invalid_type", "body")),
        (chat(stream=True), ("unsupported_value", "stream")),
        (chat(stream="True"), ("unsupported_value", "stream")),
        (chat(stream=1), ("unsupported_value", "stream")),
        (chat(messages=[]), ("invalid_value", "messages")),
        (chat(messages="hi"), ("invalid_type", "messages")),
        (chat(messages=None), ("invalid_type", "messages")),
        (without(chat(), "body", "messages"), ("missing_required_parameter", "messages")),
        (chat(messages=["hi"]), ("invalid_type", "messages[0]")),
        (chat(messages=[*MESSAGES, {"content": "x"}]), ("missing_required_parameter", "messages[1].role")),
        (chat(messages=[{"role": "human", "content": "x"}]), ("invalid_value", "messages[0].role")),
        (chat(messages=[{"role": ["user"], "content": "x"}]), ("invalid_type", "messages[0].role")),
        (chat(messages=[{"role": "user"}]), ("missing_required_parameter", "messages[0].content")),
        (chat(messages=[{"role": "assistant"}]), ("missing_required_parameter", "messages[0].content")),
        (chat(messages=[{"role": "user", "content": None}]), ("invalid_type", "messages[0].content")),
        (chat(messages=[{"role": "user", "content": 5}]), ("invalid_type", "messages[0].content")),
        (chat(messages=[{"role": "user", "content": {"text": "x"}}]), ("invalid_type", "messages[0].content")),
        (chat(messages=[{"role": "user", "content": []}]), ("invalid_value", "messages[0].content")),
        (chat(messages=[{"role": "user", "content": ["x"]}]), ("invalid_type", "messages[0].content[0]")),
        (chat(messages=[{"role": "user", "content": [{"text": "x"}]}]), ("invalid_value", "messages[0].content[0]")),
        (chat(messages=[{"role": "user", "content": "x", "name": 5}]), ("invalid_type", "messages[0].name")),
        (
            chat(messages=[{"role": "user", "content": "x", "contents": "y"}]),
            ("unknown_parameter", "messages[0].contents"),
        ),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]),
            ("unsupported_content", "messages[0].content[0]"),
        ),
        (completion(prompt=""), ("invalid_value", "prompt")),
        (completion(prompt=[]), ("invalid_value", "prompt")),
        (completion(prompt=None), ("invalid_type", "prompt")),
        (completion(prompt=["a", "b"]), ("invalid_value", "prompt")),
        (completion(prompt={"text": "x"}), ("invalid_type", "prompt")),
        (completion(messages=MESSAGES), ("unknown_parameter", "messages")),
        (chat(prompt="x"), ("unknown_parameter", "prompt")),
        (without(completion(), "body", "prompt"), ("missing_required_parameter", "prompt")),
        (chat(max_token=5), ("unknown_parameter", "max_token")),
        (chat(maxTokens=5), ("unknown_parameter", "maxTokens")),
        (b"[1,2,3]", ("not_an_object", None)),
        (b"null", ("not_an_object", None)),
        (b'"text"', ("not_an_object", None)),
        (b"17", ("not_an_object", None)),
        (b"{}", ("unsupported_format", None)),
        (b'{"text": "hello"}', ("unsupported_format", None)),
        (b'{"custom_id": "a"', ("invalid_json_line", None)),
        (b"{'custom_id': 'a'}", ("invalid_json_line", None)),
        (b'{"custom_id": "a"} {"custom_id": "b"}', ("invalid_json_line", None)),
        (b'{"prompt": "\xff"}', ("invalid_json_line", None)),
        (b'{"prompt": "\\ud800"}', ("invalid_json_line", None)),
        (b'{"prompt": "x", "temperature": NaN}', ("invalid_json_line", None)),
        (b'{"prompt": "x", "temperature": -Infinity}', ("invalid_json_line", None)),
        (b'{"prompt": "x", "temperature": 1e999}', ("invalid_json_line", None)),
        (b'{"prompt": ' + b"[" * 100_000, ("invalid_json_line", None)),
        (b"\x00\x01\x02", ("invalid_json_line", None)),
    ],
)
def test_each_kind_of_fault_has_its_code_and_param(line: object, expected: tuple[str, str | None]) -> None:
    assert expected in faults_of(line)


def test_all_faults_of_a_line_are_found_in_one_pass() -> None:
    line = chat(max_tokens=0, temperature=9, max_token=1, messages=[{"role": "x", "content": "y"}, {"role": "user"}])
    assert {param for _, param in faults_of(line | {"method": "PUT", "url": "/v1/chat"})} == {"method", "url"}
    assert {param for _, param in faults_of(line | {"method": "PUT", "url": "/chat/completions"})} == {
        *("method", "url", "max_tokens", "temperature", "max_token", "messages[0].role", "messages[1].content")
    }


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("max_new_tokens", "max_tokens")),
        *(("Temperature", "temperature"), ("topp", "top_p"), ("stop_sequences", None), ("zzz", None)),
    ],
)
def test_an_unknown_parameter_comes_with_the_name_that_was_meant(name: str, meant: str | None) -> None:
    (fault,) = parse(json.dumps(chat(**{name: 1})).encode(), 0, False).faults
    assert fault.code == "unknown_parameter"
    assert fault.fix == (f"Did you mean {meant}?" if meant else "Remove it.")


def test_a_url_without_v1_is_refused_with_what_to_write_and_never_guessed() -> None:
    for passthrough in (False, True):
        (fault,) = parse(json.dumps(chat() | {"url": "/chat/completions"}).encode(), 0, passthrough).faults
        assert fault.code == "url_mismatch" and "/v1 is missing" in fault.message and f'"{CHAT}"' in fault.fix


@pytest.mark.parametrize(
    "line",
    [
        {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}},
        {"custom_id": "a", "method": "POST", "url": "/v4/chat/completions", "body": {"model": "m", "thinking": {}}},
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]),
        completion(prompt=["a", "b"]),
        chat(thinking={"type": "disabled"}),
    ],
)
def test_passthrough_lets_pass_what_only_a_server_can_judge(line: dict[str, Any]) -> None:
    assert faults_of(line)
    assert faults_of(line, passthrough=True) == []
    assert read(json.dumps(line).encode(), 0).body == line["body"]


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "http://other/v1/x", "/v1/../admin", "/v1/x?y=1", "/v1/", "v1/embeddings"]
)
def test_passthrough_takes_only_endpoints_of_the_server_itself(url: str) -> None:
    assert faults_of(chat() | {"url": url}, passthrough=True) == [("url_mismatch", "url")]


def test_passthrough_still_refuses_streams_wrong_types_and_lines_without_a_body() -> None:
    other = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": 5, "stream": True}}
    assert faults_of(other, passthrough=True) == [("unsupported_value", "stream"), ("invalid_type", "model")]
    assert faults_of(chat(max_tokens="8"), passthrough=True) == [("invalid_type", "max_tokens")]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"key": "a", "request": {"contents": [{"parts": [{"text": "x"}]}]}}, "Gemini"),
        ({"contents": [{"role": "user", "parts": [{"text": "x"}]}]}, "Gemini"),
        ({"custom_id": "a", "params": {"model": "c", "max_tokens": 5, "messages": MESSAGES}}, "Anthropic"),
        ({"recordId": "a", "modelInput": {"messages": MESSAGES}}, "Bedrock"),
        ({"id": "x", "custom_id": "a", "response": {"status_code": 200}, "error": None}, "output file"),
    ],
)
def test_files_of_other_vendors_are_recognised_and_refused_with_what_to_do(line: dict[str, Any], named: str) -> None:
    (fault,) = parse(json.dumps(line).encode(), 0, True).faults
    assert fault.code == "unsupported_format" and named in fault.message and fault.fix


def test_a_plain_row_gives_parameters_to_the_body_and_carries_the_rest() -> None:
    row = {"id": 7, "prompt": "x", "temperature": 0, "max_tokens": 5, "group": "g", "answer": [1], "top_k": None}
    parsed = parse(json.dumps(row).encode(), 3, False)
    assert (parsed.custom_id, parsed.url, parsed.faults) == ("7", COMPLETIONS, [])
    assert parsed.body == {"prompt": "x", "temperature": 0, "max_tokens": 5}
    assert parsed.metadata == {"group": "g", "answer": [1], "top_k": None}
    assert examine(json.dumps(row).encode(), 3, False).deterministic


@pytest.mark.parametrize(
    ("row", "custom_id"),
    [
        ({"messages": MESSAGES}, "row-17"),
        ({"messages": MESSAGES, "id": None}, "row-17"),
        ({"messages": MESSAGES, "id": True}, "row-17"),
        ({"messages": MESSAGES, "id": ["x"]}, "row-17"),
        ({"messages": MESSAGES, "id": "x"}, "x"),
        ({"messages": MESSAGES, "id": "x", "custom_id": "y"}, "y"),
    ],
)
def test_a_plain_row_without_an_id_gets_one_from_its_number(row: dict[str, Any], custom_id: str) -> None:
    parsed = parse(json.dumps(row).encode(), 16, False)
    assert (parsed.custom_id, parsed.url, parsed.faults) == (custom_id, CHAT, [])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": 5}, ("invalid_type", "prompt")),
        ({"prompt": "x", "messages": MESSAGES}, ("invalid_value", "prompt")),
        ({"prompt": "x", "max_tokens": "8"}, ("invalid_type", "max_tokens")),
        ({"prompt": "x", "custom_id": ""}, ("invalid_value", "custom_id")),
        ({"prompt": "x", "custom_id": [1]}, ("invalid_type", "custom_id")),
        ({"prompt": "x", "stream": True}, ("unsupported_value", "stream")),
    ],
)
def test_plain_rows_are_checked_like_batch_lines(row: dict[str, Any], expected: tuple[str, str]) -> None:
    assert expected in faults_of(row)


def test_a_misspelt_parameter_in_a_plain_row_is_a_warning() -> None:
    parsed = parse(b'{"prompt": "x", "max_token": 5}', 0, False)
    assert [(f.code, f.severity, f.fix) for f in parsed.faults] == [
        ("unknown_parameter", "warning", "Did you mean max_tokens?")
    ]
    assert not parsed.bad


def test_the_id_of_a_broken_line_is_read_where_it_is_certain() -> None:
    assert parse(b'{"custom_id":"b\\u00e9","method":"POST"', 0, False).custom_id == "bé"
    assert parse(b'{"body": {"custom_id":"inner", ', 0, False).custom_id is None
    assert parse(b'{"custom_id":"b', 0, False).custom_id is None


def test_equal_requests_have_equal_digests_whatever_the_spelling() -> None:
    spelt = [
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":0}',
        b'{ "temperature": 0.0, "messages": [ {"content":"\\u0078", "role":"user"} ], "model":"m", "stop": null }',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":0,"user":"someone","metadata":{"a":"b"}}',
    ]
    digests = {digest_of(CHAT, json.loads(body))[0] for body in spelt}
    assert len(digests) == 1 and len(digests.pop()) == 16


def test_requests_that_may_differ_have_different_digests() -> None:
    schema = {"type": "json_schema", "json_schema": {"a": 1, "b": 2}}
    swapped = {"type": "json_schema", "json_schema": {"b": 2, "a": 1}}
    bodies = [
        chat()["body"],
        chat(max_tokens=9)["body"],
        chat(temperature=0)["body"],
        chat(messages=[{"role": "system", "content": "Say ok."}])["body"],
        chat(response_format=schema)["body"],
        chat(response_format=swapped)["body"],
    ]
    digests = [digest_of(CHAT, body)[0] for body in bodies] + [digest_of(COMPLETIONS, {"prompt": "x"})[0]]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("body", "deterministic"),
    [
        ({}, False),  # the endpoint's default temperature is 1
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "n": 1}, True),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 1, "seed": 3}, True),
        ({"seed": 0, "n": 2}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": None}, False),
    ],
)
def test_deterministic_means_greedy_with_one_choice_or_seeded(body: dict[str, Any], deterministic: bool) -> None:
    assert examine(json.dumps(chat(**body)).encode(), 0, False).deterministic is deterministic
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]
    assert examine(json.dumps(chat(messages=image, **body)).encode(), 0, True).deterministic is deterministic


def test_every_parameter_of_a_plain_row_is_one_of_an_endpoint() -> None:
    known = set(BODIES[CHAT].__struct_fields__) | set(BODIES[COMPLETIONS].__struct_fields__)
    assert known.issuperset(ROW_PARAMETERS)


scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=8)
values = st.recursive(
    scalars | text, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
)
names = st.sampled_from(sorted(set(BODIES[CHAT].__struct_fields__) | {"prompt", "max_token", "x"})) | text
small = st.sampled_from([0, 1, 2, 0.5, "x", True, None, ["x"], {"type": "json_object"}, [], {}, -1, "", 200])
contents = st.sampled_from(["x", "", None, [], [{"type": "text", "text": "x"}], [{"type": "image_url"}], 5]) | values
roles = st.sampled_from(["system", "user", "assistant", "tool", "function", "developer", "x", 1, None])
message_keys = st.sampled_from(["name", "tool_calls", "tool_call_id", "refusal", "x"])


@st.composite
def messages(draw: st.DrawFn) -> object:
    """Something like messages: mostly well-formed."""
    if draw(st.integers(0, 9)) == 0:
        return draw(values)
    made = []
    for _ in range(draw(st.integers(0, 2))):
        message = {"role": draw(roles), "content": draw(contents)}
        message |= draw(st.dictionaries(message_keys, small, max_size=1))
        made.append({key: value for key, value in message.items() if draw(st.integers(0, 9))})
    return made


@st.composite
def near_lines(draw: st.DrawFn) -> dict[str, Any]:
    """A good line with a few keys changed, added or removed."""
    line: dict[str, Any] = draw(st.sampled_from([chat, completion]))()
    line["body"] |= draw(st.dictionaries(names, small | values, max_size=2))
    if draw(st.booleans()):
        line["body"]["messages"] = draw(messages())
    line |= draw(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "extra"]), values, max_size=1))
    for key in draw(st.lists(st.sampled_from(["custom_id", "method", "url", "body"]), max_size=1)):
        line.pop(key, None)
    return line


@given(near_lines(), st.booleans())
def test_both_readings_agree_on_any_line(line: dict[str, Any], passthrough: bool) -> None:
    raw = json.dumps(line).encode()
    parsed, entry = parse(raw, 0, passthrough), examine(raw, 0, passthrough)
    assert (entry.bad, entry.flagged, entry.custom_id) == (parsed.bad, bool(parsed.faults), parsed.custom_id)
    for fault in parsed.faults:
        assert fault.code and fault.message and "\n" not in fault.message + fault.fix
    if not entry.bad:
        again = read(raw, 0)
        assert (entry.url, entry.custom_id) == (again.url, again.custom_id)
        assert (entry.digest, entry.deterministic) == digest_of(again.url, again.body)


@given(st.binary(max_size=60) | near_lines().map(lambda line: json.dumps(line).encode()), st.data())
def test_no_bytes_raise(raw: bytes, data: st.DataObject) -> None:
    if raw and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + data.draw(st.integers(0, 3)) :]
    for passthrough in (False, True):
        assert examine(raw, 0, passthrough).bad == parse(raw, 0, passthrough).bad


@pytest.mark.parametrize("depth", [1, 100, 900, 2000, 200_000])
@pytest.mark.parametrize("where", ["tools", "x", "messages", "metadata", "response_format", "prompt"])
def test_deep_nesting_never_raises(depth: int, where: str) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        value = opening * depth + b"1" + closing * depth
        raw = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"%s":%s}}' % (
            where.encode(),
            value,
        )
        for passthrough in (False, True):
            assert examine(raw, 0, passthrough).bad
            assert parse(raw, 0, passthrough).faults
        parse(b'{"prompt":"x","%s":%s}' % (where.encode(), value), 0, False)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_what_is_read_does_not_depend_on_the_callers_stack(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    start, end = json.dumps(chat(tools=[{"x": 0}], user="[{" * 500)).encode().split(b'{"x": 0}')

    def below(frames: int, raw: bytes) -> bool:
        if frames:
            return below(frames - 1, raw)
        bad = examine(raw, 0, False).bad
        assert bad or digest_of(CHAT, read(raw, 0).body)[0] == examine(raw, 0, False).digest
        return bad

    for depth, expected in ((MAX_NESTING - 4, False), (MAX_NESTING + 1, True)):
        raw = start + b'{"x":' + opening * depth + b"1" + closing * depth + b"}" + end
        assert [below(frames, raw) for frames in (0, 300)] == [expected, expected]
