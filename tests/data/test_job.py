"""The job: rows, digests, duplicates, and the batch files and bug reports people have published."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data import job as job_module
from plait.data.job import open_job, read_job
from plait.data.limits import OPENAI_MAX_REQUESTS, model_problems, openai_limit_problems
from plait.data.problems import context_length_exceeded, kv_capacity_exceeded
from plait.errors import InputError
from tests.data.lines import batch, case, chat, completion, encoded


def test_rows_keep_their_place_and_text_over_several_files(tmp_path: Path) -> None:
    first = batch(tmp_path / "a.jsonl", b"", chat("a"), b"no json", chat("b") | {"note": 1})
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(encoded({"prompt": "x"}, b" ", completion("d"))))
    with open_job([first, second], tmp_path / "work") as job:
        assert job.n == 5 and job.bad.tolist() == [False, True, False, False, False]
        places = [f"{first}:2", f"{first}:3", f"{first}:4", f"{second}:1", f"{second}:3"]
        assert [job.location(row) for row in range(5)] == places
        assert [job.custom_id(row) for row in range(5)] == ["a", None, "b", "row-4", "d"]
        assert job.request(2).metadata == {"note": 1} and job.request(2).body == chat()["body"]
        assert [file.name for file in job.files] == [str(first), str(second)]
        assert [(file.first_row, file.end_row) for file in job.files] == [(0, 3), (3, 5)]
        assert [p.row for p in job.problems] == [1] and job.problems_of(1) == job.problems and job.problems_of(0) == []
        with pytest.raises(InputError, match=r"a\.jsonl:3: this line has problems"):
            job.request(1)


def test_models_and_urls_are_counted(tmp_path: Path) -> None:
    lines = [chat("a"), chat("b", model="other"), completion("c"), chat("d", model=None), chat("e", model="other")]
    with open_job([batch(tmp_path / "x", *lines)], tmp_path) as job:
        assert job.models == {"m": 2, "other": 2}
        assert [job.model_names[i] if i >= 0 else None for i in job.model_of] == ["m", "other", "m", None, "other"]
        assert [job.urls[i] for i in job.url_of] == [line["url"] for line in lines]
        problems = list(model_problems(job, {"m", "x"}))
        assert [(p.line, p.custom_id, p.code, p.param) for p in problems] == [
            (2, "b", "model_not_found", "model"),
            (5, "e", "model_not_found", "model"),
        ]
        assert "the engine serves: m, x" in problems[0].message
        assert list(model_problems(job, ["m", "other"])) == []


def test_equal_requests_have_equal_digests_and_only_those(tmp_path: Path) -> None:
    lines = [chat("a", temperature=0), chat("b", temperature=0), chat("c"), completion("d"), chat("e", stream=True)]
    with open_job([batch(tmp_path / "x", *lines)], tmp_path) as job:
        assert job.digest.shape == (5, 16) and job.digest.dtype == np.uint8
        assert len(np.unique(job.digest, axis=0)) == 4 and (job.digest[0] == job.digest[1]).all()
        assert job.deterministic.tolist() == [True, True, False, False, False]


def test_duplicate_ids_are_refused_with_both_places(tmp_path: Path) -> None:
    first, second = batch(tmp_path / "1", chat("a"), chat("b")), batch(tmp_path / "2", chat("b"), chat("c"), chat("b"))
    with pytest.raises(InputError) as refused:
        open_job([first, second], tmp_path)
    assert str(refused.value).splitlines() == [
        f"{second}:{line} (custom_id 'b'): duplicate_custom_id: custom_id 'b' was used before at {first}:2. "
        "Give each line a custom_id of its own, or allow it with --allow-duplicates."
        for line in (1, 3)
    ]
    with open_job([first, second], tmp_path, allow_duplicates=True) as job:
        assert not job.bad.any() and [job.custom_id(row) for row in range(5)] == ["a", "b", "b", "c", "b"]


def test_ids_whose_hashes_collide_are_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "hash", lambda text: 1, raising=False)
    path = batch(tmp_path / "x", chat("a"), chat("b"), chat("c"), chat("b"))
    with read_job([path], tmp_path) as job:
        assert [(p.line, p.code) for p in job.problems] == [(4, "duplicate_custom_id")]


def test_ids_of_broken_lines_and_made_ids_count_as_used(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", b'{"custom_id": "a", "method"', chat("a"), {"prompt": "x"}, chat("row-3"))
    with read_job([path], tmp_path) as job:
        assert [(p.line, p.code) for p in job.problems] == [
            (1, "invalid_json_line"),
            (2, "duplicate_custom_id"),
            (4, "duplicate_custom_id"),
        ]


def test_a_long_list_of_fatal_problems_is_cut(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        open_job([batch(tmp_path / "x", *[chat("a")] * 20)], tmp_path)
    assert len(str(refused.value).splitlines()) == 11 and "plait check" in str(refused.value)


def test_one_unusable_file_refuses_the_job_and_the_others_are_still_checked(tmp_path: Path) -> None:
    good, bad = batch(tmp_path / "good", chat("a"), b"{"), tmp_path / "missing"
    with pytest.raises(InputError, match="file_not_found"):
        open_job([bad, good], tmp_path)
    with read_job([bad, good], tmp_path) as job:
        assert [(p.line, p.code) for p in job.problems] == [(0, "file_not_found"), (2, "invalid_json_line")]


def test_a_file_that_changes_under_the_job_is_noticed(tmp_path: Path) -> None:
    path = batch(tmp_path / "x", chat("a"), chat("b"))
    with open_job([path], tmp_path) as job:
        text = path.read_bytes()
        for changed in (text.replace(b"Say ok.", b"Say no."), b"x" * len(text), b"", text[:-30]):
            path.write_bytes(changed)
            with pytest.raises(InputError, match="changed since it was checked"):
                job.request(1)
        path.write_bytes(text)
        assert job.request(1).custom_id == "b"


def test_the_fingerprint_changes_with_any_line_and_only_then(tmp_path: Path) -> None:
    def fingerprint(*lines: object) -> str:
        with read_job([batch(tmp_path / "x", *lines)], tmp_path) as job:
            return job.fingerprint

    plain = fingerprint(chat("a"), chat("b"))
    assert plain == fingerprint(chat("a"), b"", encoded(chat("b"))[:-1] + b"\r")
    others = [
        fingerprint(chat("a"), chat("c")),
        fingerprint(chat("b"), chat("a")),
        fingerprint(chat("a")),
        fingerprint(chat("a"), chat("b", metadata={"x": "y"})),
        fingerprint(chat("a"), chat("b") | {"note": 1}),
        fingerprint(chat("a"), chat("b"), b"bad"),
    ]
    assert len({plain, *others}) == 7


def test_a_line_too_long_to_hold_is_a_problem_of_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plait.data.inputs", "plait.data.job"):
        monkeypatch.setattr(f"{module}.MAX_LINE_BYTES", 300)
    path = batch(tmp_path / "x", chat("a"), chat("b", user="u" * 500), chat("c"))
    with read_job([path], tmp_path) as job:
        assert [(p.line, p.code, p.custom_id) for p in job.problems] == [(2, "line_too_long", None)]
        assert job.request(2).custom_id == "c" and job.custom_id(1) is None


def test_limits_of_the_hosted_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [chat("a"), b"bad", completion("b"), chat("c", model="x"), chat("d", model=None)]
    with read_job([batch(tmp_path / "x", *lines)], tmp_path) as job:
        found = [(p.line, p.code) for p in openai_limit_problems(job)]
        assert found == [(3, "url_mismatch"), (4, "model_mismatch"), (5, "model_mismatch")]
        monkeypatch.setattr("plait.data.limits.OPENAI_MAX_BYTES", 10)
        monkeypatch.setattr("plait.data.limits.OPENAI_MAX_REQUESTS", 4)
        assert [(p.line, p.code) for p in openai_limit_problems(job)][:2] == [
            (1, "file_too_large"),
            (5, "too_many_tasks"),
        ]
    lines = [chat(str(i)) for i in range(OPENAI_MAX_REQUESTS)]
    monkeypatch.undo()
    with read_job([batch(tmp_path / "y", *lines)], tmp_path) as job:
        assert list(openai_limit_problems(job)) == []


def test_capacity_problems_say_what_would_fit(tmp_path: Path) -> None:
    with open_job([batch(tmp_path / "x", chat("a"))], tmp_path) as job:
        long, longer = context_length_exceeded(100, 60, 128), context_length_exceeded(128, 1, 128)
        assert "together 160" in str(job.problem(0, long)) and "max_tokens to at most 28" in long.fix
        assert job.problem(0, long).custom_id == "a" and job.problem(0, long).line == 1
        assert longer.param == "messages" and "Shorten" in longer.fix
        assert "at most 28" in kv_capacity_exceeded(100, 60, 128).fix
        assert "Shorten" in kv_capacity_exceeded(200, 1, 128).fix


@given(st.randoms(use_true_random=False), st.integers(0, 30))
def test_every_line_is_one_row_and_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, n: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    kinds = ["good", "good", "bad", "blank"]
    plan = [(rng.choice(kinds), chat(f"id-{i}", messages=[{"role": "user", "content": "é" * i}])) for i in range(n)]
    lines = [{"good": line, "bad": b"{,", "blank": b" "}[kind] for kind, line in plan]
    with read_job([batch(folder / "x", *lines)], folder) as job:
        kept = [(i, kind, line) for i, (kind, line) in enumerate(plan) if kind != "blank"]
        assert job.n == len(kept) and job.bad.tolist() == [kind == "bad" for _, kind, _ in kept]
        for row, (i, kind, line) in enumerate(kept):
            assert job.location(row).endswith(f":{i + 1}")
            if kind == "good":
                request = job.request(row)
                assert (request.row, request.custom_id, request.body) == (row, line["custom_id"], line["body"])


@given(st.binary(max_size=200))
def test_no_file_content_raises(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("x.jsonl", "x.csv"):
        (folder / name).write_bytes(content)
        with read_job([folder / name], folder / "work") as job:
            for problem in job.problems:
                assert str(problem) and json.dumps(problem.as_dict()).isascii()
            for row in np.flatnonzero(~job.bad).tolist():
                job.request(row)


PUBLISHED = {
    "azure_chat_crlf.jsonl": (3, {"url_mismatch": 3}, {}),
    "batchlocallm_demo_10.jsonl": (10, {}, {}),
    "batchlocallm_recruiter_100.jsonl": (100, {}, {}),
    "cookbook_movies_100.jsonl": (100, {}, {}),
    "glm_image_caption.jsonl": (
        6,
        {"url_mismatch": 6, "unsupported_content": 6, "unknown_parameter": 6},
        {},
    ),
    "openai_batch_quickstart_zh.jsonl": (4, {}, {}),
    "production_stack.jsonl": (2, {}, {}),
    "sglang_completions.jsonl": (3, {}, {}),
    "usage_temporal_rewrite.csv": (0, {"missing_required_parameter": 1}, {"missing_required_parameter": 1}),
    "vllm_example.jsonl": (2, {}, {}),
    "vllm_test_embeddings.jsonl": (4, {"url_mismatch": 4}, {}),
    "vllm_test_mixed_errors.jsonl": (
        5,
        {"url_mismatch": 1, "unsupported_value": 1},
        {"url_mismatch": 1, "unsupported_value": 1},
    ),
}
"""File -> rows, errors for a text engine, errors for an HTTP server where they differ from none."""


def test_every_published_batch_file_is_classified(shared: Path) -> None:
    assert {path.name for path in (shared / "data" / "batch").iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_batch_file_runs_or_fails_line_by_line(name: str, shared: Path, tmp_path: Path) -> None:
    rows, for_text, for_server = PUBLISHED[name]
    if name == "azure_chat_crlf.jsonl":
        for_server = for_text  # a url without /v1 is never guessed
    for passthrough, expected in ((False, for_text), (True, for_server)):
        with read_job([shared / "data" / "batch" / name], tmp_path, passthrough=passthrough) as job:
            problems = job.problems
            assert (job.n, Counter(p.code for p in problems if p.severity == "error")) == (rows, expected)
            assert {p.row for p in problems if p.severity == "error" and p.row >= 0} == set(np.flatnonzero(job.bad))
            for row in np.flatnonzero(~job.bad).tolist():
                assert job.request(row).custom_id
    if name == "vllm_test_mixed_errors.jsonl":
        assert [(p.line, p.custom_id) for p in problems] == [(4, "request-4"), (5, "request-5")]


def test_case_in_01_one_stray_line_stops_nothing(shared: Path, tmp_path: Path) -> None:
    lines = [line.encode() for line in case(shared, "in-01")["input"]["lines"]]
    with open_job([batch(tmp_path / "x", *lines)], tmp_path) as job:
        assert [p.line for p in job.problems] == [2, 3, 4, 5, 6]
        assert [job.custom_id(row) for row in range(7)] == ["a", "b", None, None, None, "c", "d"]
        assert np.flatnonzero(~job.bad).tolist() == [0, 6]


def test_case_in_02_duplicates_are_refused_and_only_answered_when_asked_for(shared: Path, tmp_path: Path) -> None:
    path = batch(tmp_path / "x", *[line.encode() for line in case(shared, "in-02")["input"]["lines"]])
    with pytest.raises(InputError, match=r":3 \(custom_id 'r1'\): duplicate_custom_id: .*:1\."):
        open_job([path], tmp_path)
    with open_job([path], tmp_path, allow_duplicates=True) as job:
        contents = [job.request(row).body["messages"][0]["content"] for row in range(3)]
        assert contents == ["first", "second", "third"]


def test_case_in_04_byte_order_mark_crlf_and_blank_lines(shared: Path, tmp_path: Path) -> None:
    given = case(shared, "in-04")["input"]
    path = tmp_path / "x"
    path.write_bytes(bytes.fromhex(given["bytes_hex_prefix"]) + "\r\n".join(given["lines_crlf"]).encode())
    with open_job([path], tmp_path) as job:
        (warning,) = job.problems
        assert warning.severity == "warning" and "byte-order mark" in warning.message and warning.line == 1
        assert [(job.custom_id(row), job.location(row)) for row in range(job.n)] == [
            ("b1", f"{path}:1"),
            ("b2", f"{path}:3"),
            ("b3", f"{path}:5"),
        ]


def test_case_in_05_wrong_urls_methods_and_models(shared: Path, tmp_path: Path) -> None:
    path = batch(tmp_path / "x", *[line.encode() for line in case(shared, "in-05")["input"]["lines"]])
    with open_job([path], tmp_path) as job:
        named = {p.custom_id: p.code for p in reversed(job.problems)}
        assert named == {"k2": "url_mismatch", "k3": "url_mismatch", "k5": "invalid_method"}
        (unknown,) = model_problems(job, ["m"])
        assert (unknown.custom_id, unknown.code) == ("k4", "model_not_found") and "serves: m" in unknown.message
        assert np.flatnonzero(~job.bad).tolist() == [0, 3]
