"""What can be known of the vLLM engine without a vLLM: its arguments, and what is refused before anything is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from plait.engine.vllm import check_model, command_line, flags
from plait.errors import UsageError
from plait.run.vllm import Vllm
from tests.cli.command import plait


def test_engine_arguments_are_typed_as_json_or_text() -> None:
    given = ["a=1", "b=0.5", "c=true", "d=[1, 2]", 'e={"x": 1}', "f=fp8", "--tensor-parallel-size=2", "g=a=b"]
    numbers, others = {"a": 1, "b": 0.5, "tensor_parallel_size": 2}, {"c": True, "d": [1, 2], "e": {"x": 1}}
    assert flags(given) == {**numbers, **others, "f": "fp8", "g": "a=b"}


@pytest.mark.parametrize("bad", ["x", "=1", "--=3"])
def test_an_argument_without_key_or_value_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="key=value"):
        flags([bad])


def test_engine_arguments_become_the_servers_command_line() -> None:
    given = {"max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False, "dtype": "bfloat16"}
    assert command_line({**given, "lora_modules": ["a=x", "b=y"], "additional_config": {"k": [1]}}) == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching", "--dtype", "bfloat16"),
        *("--lora-modules", "a=x", "b=y", "--additional-config", '{"k": [1]}'),
    ]


def test_only_arguments_that_change_answers_belong_to_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_vllm(monkeypatch, True)
    place = Vllm(str(tmp_path), {"max_num_seqs": 4, "quantization": "fp8"}, lambda line: None)
    assert place.answer_settings == {
        "engine": "vllm",
        "model": str(tmp_path),
        "engine_args": {"quantization": "fp8"},
    }
    place.close()


def pretend_vllm(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        return (object() if here else None) if name == "vllm" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_what_no_vllm_could_load_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, True)
    check_model("owner/name")
    with pytest.raises(UsageError, match="needs --model"):
        check_model(None)
    for name in ("no-such-model", "./nowhere/x", "a/b/c"):
        with pytest.raises(UsageError, match="neither a directory here nor"):
            check_model(name)


def test_a_missing_vllm_ends_with_status_2_and_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_vllm(monkeypatch, False)
    done = run(tmp_path, "--engine", "vllm", "--model", "owner/name")
    assert done.exit_code == 2 and "pip install 'plait[vllm]'" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine-arg", "a=1"], "--engine-arg is for --engine vllm"),
        (["--engine", "vllm", "--endpoint", "http://x/v1"], "exclude each other"),
        (["--engine", "vllm", "--max-num-seqs", "3"], "--engine-arg"),
        (["--engine", "vllm", "--kv-tokens", "300"], "--engine-arg"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    done = run(tmp_path, *options)
    assert done.exit_code == 2 and words in done.output


def run(tmp_path: Path, *options: str) -> Any:
    given = tmp_path / "in.jsonl"
    given.write_text('{"prompt": "a"}\n')
    return plait("run", given, "-o", tmp_path / "out.jsonl", *options)
