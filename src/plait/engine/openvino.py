"""The embedded engine: OpenVINO GenAI's continuous batching on this machine's CPU, in a child process of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from plait.data.problems import Fault, context_length_exceeded, kv_capacity_exceeded
from plait.data.schema import BODIES, CHAT
from plait.data.tokenize import Tokenizer
from plait.engine.child import Child
from plait.engine.machine import EngineSettings, Limits, resolve
from plait.engine.models import LocalModel
from plait.engine.sampling import read_sampling
from plait.engine.shadow import BLOCK_TOKENS
from plait.engine.wire import (
    Batch,
    Cancel,
    FromChild,
    Go,
    Ready,
    Refused,
    Setup,
    Submit,
    frame,
    from_child,
)
from plait.errors import EngineError
from plait.events import Capacity, EngineRequest, Event, Failed
from plait.table import I32

_LOAD_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 5.0


class OpenVinoEngine:
    """Satisfies ``plait.events.Engine``. Create it in a thread that lives as long as the engine: the kernel ends the
    child when that thread ends. Raises UsageError for settings that cannot work, EngineError if the model cannot be
    loaded."""

    def __init__(self, model: LocalModel, settings: EngineSettings | None = None) -> None:
        self.model = model
        self.limits: Limits = resolve(settings or EngineSettings(), model)
        self._capacity = capacity_of(model, self.limits)
        self._start_s = time.perf_counter()
        self._events: deque[Event] = deque()
        self._flying: set[int] = set()
        self._tokenizer: Tokenizer | None = None
        self._asked = False
        self._child = Child("plait.engine.openvino_worker", "out of memory? lower --kv-gib")
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> Capacity:
        """Constant after construction."""
        return self._capacity

    @property
    def pid(self) -> int:
        """Of the child process."""
        return self._child.pid

    def now_s(self) -> float:
        """Seconds since the engine was created."""
        return time.perf_counter() - self._start_s

    def submit(self, requests: Sequence[EngineRequest], prefill_budget_tokens: int | None = None) -> None:
        """Queue requests; ones that cannot run come back as Failed. Raises EngineError if the child is gone."""
        messages = bytearray()
        for request in requests:
            message = self._checked(request)
            if isinstance(message, Fault):
                text = f"{message.message}. {message.fix}".strip()
                self._events.append(
                    Failed(request.row, self.now_s(), message.code, text, message.param, status_code=400)
                )
            else:
                self._flying.add(request.row)
                messages += frame(message)
        self._child.send(messages)
        self._answer()

    def cancel(self, rows: Sequence[int]) -> None:
        """Drop requests; each unfinished one comes back as ``Preempted(requeue=True)``."""
        known = [row for row in rows if row in self._flying]
        if known:
            self._child.send(frame(Cancel(known)))

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call, oldest first. Raises EngineError if the child died."""
        self._answer()
        deadline_s = self.now_s() + timeout_s
        while True:
            self._receive(0.0 if self._events else max(0.0, deadline_s - self.now_s()))
            if self._events or self.now_s() >= deadline_s:
                events = list(self._events)
                self._events.clear()
                return events

    def close(self) -> None:
        """End the child. Idempotent."""
        self._child.close(0.0 if self._flying else _CLOSE_TIMEOUT_S)

    def _load(self) -> None:
        self._child.send(frame(self._setup()))
        deadline_s = self.now_s() + _LOAD_TIMEOUT_S
        while self.now_s() < deadline_s:
            for message in self._messages(1.0):
                if isinstance(message, Refused):
                    raise EngineError(f"model {self.model.path} cannot be loaded by OpenVINO GenAI: {message.message}")
                if isinstance(message, Ready):
                    return
        raise EngineError(f"model {self.model.path} was not loaded within {_LOAD_TIMEOUT_S:.0f} s")

    def _setup(self) -> Setup:
        limits = self.limits
        return Setup(
            model_path=str(self.model.path),
            model_name=self.model.name,
            threads=limits.threads,
            kv_blocks=limits.kv_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            prefix_caching=limits.prefix_caching,
            start_s=self._start_s,
        )

    def _checked(self, request: EngineRequest) -> Submit | Fault:
        """The message to the child, or why the request cannot run. A prompt that outgrows the KV cache must never
        reach the child: its engine would drop everything in flight."""
        if request.url not in BODIES:
            message = f"url is {request.url}; the embedded engine serves {' and '.join(BODIES)}"
            return Fault("unsupported_url", message, "url", "Run the file on a server that has this endpoint.")
        sampling = read_sampling(request.url, request.body, request.max_tokens)
        if isinstance(sampling, Fault):
            return sampling
        ids = self._prompt_ids(request)
        if isinstance(ids, Fault):
            return ids
        prompt, output = len(ids), request.max_tokens
        if prompt + output > self.model.context_tokens:
            return context_length_exceeded(prompt, output, self.model.context_tokens)
        if blocks_needed(prompt, output, sampling.n) > self.limits.kv_blocks:
            return kv_capacity_exceeded(prompt, output * sampling.n, self.capacity.kv_tokens)
        if sampling.n > self.limits.max_num_seqs:
            message = f"n is {sampling.n}; the engine runs {self.limits.max_num_seqs} sequences at once"
            return Fault("invalid_value", message, "n", "Lower n or raise --max-num-seqs.")
        return Submit(request.row, request.url == CHAT, ids.astype("<i4").tobytes(), sampling)

    def _prompt_ids(self, request: EngineRequest) -> I32 | Fault:
        if request.token_ids is not None:
            return np.asarray(request.token_ids, np.int32)
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self.model.path)
        return self._tokenizer.prompt_ids(request.url, request.body)

    def _answer(self) -> None:
        """Whoever calls has decided on all events so far: let the child go on."""
        if self._asked:
            self._asked = False
            self._child.send(frame(Go()))

    def _receive(self, timeout_s: float) -> None:
        for message in self._messages(timeout_s):
            assert isinstance(message, Batch)
            self._asked |= message.asks
            self._events += message.events()
            ended = {event.row for event in message.finished} | {event.row for event in message.failed}
            self._flying -= ended | {event.row for event in message.preempted if event.requeue}

    def _messages(self, timeout_s: float) -> list[FromChild]:
        """What the child sent; waits for the first. Raises EngineError if it is gone."""
        return [from_child(message) for message in self._child.receive(timeout_s)]


def blocks_needed(prompt_tokens: int, max_tokens: int, n: int) -> int:
    """KV blocks a request may come to hold: sequences share the prompt's full blocks."""
    if n == 1:
        return -(-(prompt_tokens + max_tokens) // BLOCK_TOKENS)
    shared = prompt_tokens // BLOCK_TOKENS
    return shared + n * -(-(prompt_tokens - shared * BLOCK_TOKENS + max_tokens) // BLOCK_TOKENS)


def capacity_of(model: LocalModel, limits: Limits) -> Capacity:
    """What the engine will hold, known before it is loaded."""
    return Capacity(
        kv_tokens=limits.kv_blocks * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        max_context_tokens=model.context_tokens,
        prefix_lookup_at_submit=True,
        preempts_on_request=True,
    )
