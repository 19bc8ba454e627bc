"""vLLM without a server: its ``AsyncLLM`` in a process of ours, behind the engine protocol."""

from __future__ import annotations

import importlib.util
import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from plait.data.bytesplan import prompt_bytes, pseudo_tokens
from plait.data.problems import Fault
from plait.engine.child import Child
from plait.engine.vllm_wire import BadArguments, Call, Encode, Encoded, EngineDead, FromChild, Load, Loaded, from_child
from plait.engine.wire import Batch, Cancel, frame
from plait.errors import EngineError, UsageError
from plait.events import Capacity, EngineRequest, Event
from plait.table import I32

LOAD_TIMEOUT_S = 3600.0
"""Weights of hundreds of gigabytes, compilation, graph capture."""
CLOSE_S = 10.0
QUEUE_SHARE = 8
"""One request in so many waits inside vLLM, so that a place which falls free is taken in the next step."""


class VllmEngine:
    """Satisfies ``plait.events.Engine``. ``arguments``: as on the command line of ``vllm serve``, see ``flags``.

    Raises UsageError where vLLM is not installed or does not take the arguments, EngineError if it cannot load the
    model."""

    def __init__(self, model: str, arguments: Sequence[str] = ()) -> None:
        check_model(model)
        self._start_s = time.perf_counter()
        self._events: deque[Event] = deque()
        self._flying: set[int] = set()
        self._child = Child("plait.engine.vllm_worker")
        try:
            self._child.send(frame(Load(model, list(arguments), self._start_s)))
            self._loaded = self._wait_loaded()
        except BaseException:
            self._child.close(0.0)
            raise
        seqs = self._loaded.max_num_seqs
        self._capacity = Capacity(
            kv_tokens=self._loaded.kv_tokens,
            block_tokens=self._loaded.block_tokens,
            max_num_seqs=seqs,
            max_batched_tokens=self._loaded.max_batched_tokens,
            max_context_tokens=self._loaded.max_context_tokens,
            queued_seqs=-(-seqs // QUEUE_SHARE),
        )

    @property
    def capacity(self) -> Capacity:
        """What vLLM found room for, and a short queue."""
        return self._capacity

    @property
    def pid(self) -> int:
        """Of the process that holds vLLM; it leads the process group of everything vLLM started."""
        return self._child.pid

    @property
    def models(self) -> list[str]:
        """Names that requests may ask for: the model's, then those of LoRA adapters."""
        return self._loaded.models

    def now_s(self) -> float:
        """Seconds since the engine was created."""
        return time.perf_counter() - self._start_s

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """See ``Engine``. vLLM has a prefill budget of its own."""
        data = bytearray()
        for request in requests:
            self._flying.add(request.row)
            data += frame(Call(request.row, request.url, self._encode(request.body)))
        self._child.send(data)

    def cancel(self, rows: Sequence[int]) -> None:
        """See ``Engine``."""
        known = [row for row in rows if row in self._flying]
        if known:
            self._child.send(frame(Cancel(known)))

    def poll(self, timeout_s: float) -> list[Event]:
        """See ``Engine``."""
        deadline_s = self.now_s() + timeout_s
        while True:
            for message in self._receive(0.0 if self._events else max(0.0, deadline_s - self.now_s())):
                assert isinstance(message, Batch)
                self._take(message)
            if self._events or self.now_s() >= deadline_s:
                events = list(self._events)
                self._events.clear()
                return events

    def encode_many(self, requests: list[tuple[str, dict[str, Any]]]) -> list[I32 | Fault]:
        """Prompt tokens of each (url, body) as vLLM counts them. Where it does not say (other endpoints, prompts it
        will refuse), four bytes of text stand for a token and vLLM's own verdict is left to come."""
        self._child.send(frame(Encode([(url, msgspec.json.encode(body)) for url, body in requests])))
        while True:
            for message in self._receive(1.0):
                if isinstance(message, Encoded):
                    return [
                        np.frombuffer(ids, "<i4").astype(np.int32) if ids else self._guess(body)
                        for ids, (_, body) in zip(message.ids, requests, strict=True)
                    ]
                assert isinstance(message, Batch)
                self._take(message)

    def close(self) -> None:
        """See ``Engine``: ends vLLM with all its processes."""
        self._child.close(CLOSE_S)

    def _guess(self, body: dict[str, Any]) -> I32:
        units, _ = pseudo_tokens([prompt_bytes(body)])
        return np.ascontiguousarray(units[: max(1, self._loaded.max_context_tokens // 2)])

    def _encode(self, body: dict[str, Any]) -> bytes:
        """Where there is but one model, it is the one that is meant, whatever the body calls it."""
        models = self._loaded.models
        return msgspec.json.encode(body if len(models) > 1 else {**body, "model": models[0]})

    def _take(self, batch: Batch) -> None:
        self._events += batch.events()
        ended = {event.row for event in batch.finished} | {event.row for event in batch.failed}
        self._flying -= ended | {event.row for event in batch.preempted if event.requeue}

    def _wait_loaded(self) -> Loaded:
        while self.now_s() < LOAD_TIMEOUT_S:
            for message in self._receive(1.0):
                if isinstance(message, BadArguments):
                    raise UsageError(f"{message.message}: {self._child.faults()}")
                assert isinstance(message, Loaded)
                return message
        raise EngineError(f"vLLM did not load the model within {LOAD_TIMEOUT_S:.0f} s")

    def _receive(self, timeout_s: float) -> list[FromChild]:
        messages = [from_child(message) for message in self._child.receive(timeout_s)]
        if any(isinstance(message, EngineDead) for message in messages):
            raise EngineError(f"vLLM's engine process died: {self._child.faults()}")
        return messages


def check_model(model: str | None) -> None:
    """Raises UsageError for what no vLLM could load, before one is started."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine vllm needs vLLM, which is not installed here: pip install 'plait[vllm]'")
    if not model:
        raise UsageError("--engine vllm needs --model: a Hugging Face directory or id")
    if not Path(model).expanduser().exists() and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
        raise UsageError(f"model '{model}' is neither a directory here nor a Hugging Face id (owner/name)")


def flags(given: Sequence[str]) -> dict[str, Any]:
    """``--engine-arg key=value`` -> values by key, typed: JSON where it is JSON (numbers, true, false, lists, objects),
    else text. Raises UsageError."""
    found: dict[str, Any] = {}
    for each in given:
        key, equals, text = each.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise UsageError(f"--engine-arg is '{each}'; key=value is needed, with a key as vLLM names its argument")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as ``vllm serve`` takes them: true and false become --key and --no-key, a list several values.
    ``model`` is not among them."""
    words: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *(_word(item) for item in value)]
        elif value is not None:
            words += [f"--{name}", _word(value)]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
