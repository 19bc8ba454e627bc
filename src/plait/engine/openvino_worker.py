"""The embedded engine's child process: OpenVINO GenAI's continuous batching, one step after the other.

Started as ``python -m plait.engine.openvino_worker FD`` by ``plait.engine.openvino``; speaks ``plait.engine.wire`` over
that socket. A process of its own because a step holds the interpreter lock. It ends with its parent: the kernel kills
it (PR_SET_PDEATHSIG), and a closed socket ends it at the latest after the step in progress.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence

import numpy as np

from plait.engine.chat import answer
from plait.engine.flight import Account, Flight
from plait.engine.shadow import BLOCK_TOKENS
from plait.engine.wire import Batch, Cancel, Go, Ready, Refused, Sampling, Setup, Submit, frame, frames, to_child
from plait.events import Failed, Finished, Preempted, Progress, Started, Step

_PR_SET_PDEATHSIG = 1
_SOURCE_POSITION = re.compile(r"^(\[[\d:]+\] )?/\S+:\d+: ")
_RECV_BYTES = 1 << 16
_FLUSH_S = 0.1
"""Progress and steps are sent together at least this often; beginnings and endings at once."""
_ANSWER_S = 0.02
"""Longest wait for the parent's answer to a beginning or an ending; it takes about 1 ms when nothing else runs."""


class GoneError(Exception):
    """The parent closed the socket."""


class Link:
    """Messages from and to the parent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def receive(self, timeout_s: float | None) -> list[Setup | Submit | Cancel | Go]:
        """Messages that have come; waits for the first, None: for ever. Raises GoneError."""
        found: list[bytes] = []
        while True:
            self._sock.settimeout(0.0 if found else timeout_s)
            try:
                data = self._sock.recv(_RECV_BYTES)
            except (BlockingIOError, TimeoutError):
                return [to_child(message) for message in found]
            except ConnectionError:
                raise GoneError from None
            if not data:
                raise GoneError
            self._buffer += data
            found += frames(self._buffer)

    def send(self, message: Ready | Refused | Batch) -> None:
        """Raises GoneError."""
        self._sock.setblocking(True)
        try:
            self._sock.sendall(frame(message))
        except ConnectionError:
            raise GoneError from None


class Worker:
    """The pipeline and its requests."""

    def __init__(self, link: Link, setup: Setup) -> None:
        """Loads the model. Raises RuntimeError as OpenVINO does."""
        self._link, self._setup = link, setup
        self._batch = Batch()
        self._progress: dict[int, int] = {}
        self._flushed_s = 0.0
        self._asking = False
        self._proven: set[tuple[str | None, ...]] = set()
        self._bad: dict[tuple[str | None, ...], str] = {}
        self._trial: int | None = None
        self._untried: list[Submit] = []
        self._load()

    def _load(self) -> None:
        """A pipeline without requests."""
        from plait.engine.openvino_pipeline import Pipeline

        self._pipeline = Pipeline(self._setup)
        self._account = Account(self._setup.kv_blocks, self._setup.max_batched_tokens)

    def run(self) -> None:
        """Until the parent is gone."""
        while True:
            self._listen()
            if self._account.flights:
                self._step()
            self._flush()

    def _listen(self) -> None:
        """Take what has come. After a batch that asks, wait for the parent's answer: a step without it would leave the
        place of each ended sequence empty."""
        due_s = time.perf_counter() + _ANSWER_S
        while True:
            patience_s = max(0.0, due_s - time.perf_counter()) if self._asking else 0.0
            for message in self._link.receive(patience_s if self._account.flights else None):
                if isinstance(message, Submit):
                    self._take(message)
                elif isinstance(message, Cancel):
                    self._cancel(message.rows)
                else:
                    self._asking = False
            if not self._asking or time.perf_counter() >= due_s:
                self._asking = False
                return

    def _now_s(self) -> float:
        return time.perf_counter() - self._setup.start_s

    def _take(self, message: Submit) -> None:
        """Add a request. A grammar that the engine cannot compile ends the whole pipeline when it is first used, so
        one grammar is tried at a time: if a step breaks, it is clear whose fault it was."""
        form = grammar_of(message.sampling)
        if form is None or form in self._proven:
            self._add(message)
        elif form in self._bad:
            self._fail(message.row, "invalid_value", self._bad[form], False, "response_format")
        elif self._trial is None:
            self._trial = message.row
            self._add(message)
        else:
            self._untried.append(message)

    def _end_trial(self, row: int, form: tuple[str | None, ...] | None = None) -> None:
        """The row under trial has a token (``form`` is good then) or is gone; the next may come."""
        if row != self._trial:
            return
        self._trial = None
        if form is not None:
            self._proven.add(form)
        again, self._untried = self._untried, []
        for message in again:
            self._take(message)

    def _broken(self, error: RuntimeError) -> None:
        """A step raised: fail the request under trial, hand all others back, start a new pipeline. Raises the error
        again where nobody is under trial."""
        if self._trial is None:
            raise error
        culprit, now_s = self._trial, self._now_s()
        for row, flight in self._account.flights.items():
            if row != culprit:
                self._batch.preempted.append(Preempted(row, now_s, flight.output_tokens, requeue=True))
        message = f"the engine cannot compile the requested output format: {last_line(error)}"
        form = grammar_of(self._account.flights[culprit].sampling)
        if form is not None:
            self._bad[form] = message
        self._progress.clear()
        self._load()
        self._fail(culprit, "invalid_value", message, False, "response_format")
        self._end_trial(culprit)

    def _add(self, message: Submit) -> None:
        ids = np.frombuffer(message.token_ids, np.int32)
        try:
            handle = self._pipeline.add(ids, message.sampling)
        except RuntimeError as error:
            self._fail(message.row, "invalid_value", f"the engine refuses this request: {last_line(error)}", False)
            self._end_trial(message.row)
            return
        self._account.add(message.row, message.chat, ids, message.sampling).handle = handle

    def _cancel(self, rows: Sequence[int]) -> None:
        for message in [m for m in self._untried if m.row in rows]:
            self._untried.remove(message)
            self._batch.preempted.append(Preempted(message.row, self._now_s(), requeue=True))
        for row in rows:
            flight = self._account.flights.get(row)
            if flight is not None:
                flight.handle.cancel()
                self._account.remove(flight)
                self._progress.pop(row, None)
                self._end_trial(row)
                self._batch.preempted.append(Preempted(row, self._now_s(), flight.output_tokens, requeue=True))

    def _step(self) -> None:
        began_s = time.perf_counter()
        try:
            scheduled, used_blocks = self._pipeline.step()
        except RuntimeError as error:
            self._broken(error)
            return
        duration_s = time.perf_counter() - began_s
        now_s = self._now_s()
        moved = {flight for flight in self._account.flights.values() if self._pipeline.read(flight)}
        work = self._account.after_step(moved, scheduled, used_blocks)
        for flight in work.began:
            self._batch.started.append(Started(flight.row, now_s, flight.cached_tokens))
            self._end_trial(flight.row, grammar_of(flight.sampling))
        for flight in work.preempted:
            self._batch.preempted.append(Preempted(flight.row, now_s, flight.context_tokens))
        for flight in moved:
            self._progress[flight.row] = flight.output_tokens
        self._batch.steps.append(
            Step(
                now_s,
                duration_s,
                work.prefill_tokens,
                work.decode_seqs,
                used_blocks * BLOCK_TOKENS,
                work.prefill_context_tokens,
                work.decode_context_tokens,
            )
        )
        for flight in [f for f in self._account.flights.values() if self._pipeline.ended(f)]:
            self._end(flight, now_s)

    def _end(self, flight: Flight, now_s: float) -> None:
        """The engine is done with a request."""
        self._account.remove(flight)
        self._progress.pop(flight.row, None)
        self._end_trial(flight.row)
        if self._pipeline.dropped(flight):
            self._fail(flight.row, "kv_exhausted", "the engine ran out of KV cache and dropped this request", True)
            return
        outputs = [flight.outputs[key] for key in sorted(flight.outputs)]
        prompt, cached = len(flight.ids), flight.cached_tokens
        name, sampling = self._setup.model_name, flight.sampling
        done = answer(flight.chat, name, prompt, cached, outputs, sampling, self._pipeline.decode)
        self._batch.finished.append(
            Finished(flight.row, now_s, 200, done.body, prompt, cached, done.output_tokens, done.finish_reasons)
        )

    def _fail(self, row: int, code: str, message: str, retryable: bool, param: str | None = None) -> None:
        status = 500 if retryable else 400
        self._batch.failed.append(Failed(row, self._now_s(), code, message, param, status, retryable=retryable))

    def _flush(self) -> None:
        """Send what happened, at once if a request began or ended."""
        batch, now_s = self._batch, self._now_s()
        if not batch.asks and now_s - self._flushed_s < _FLUSH_S:
            return
        batch.progress = [Progress(row, now_s, tokens) for row, tokens in self._progress.items()]
        if batch.asks or batch.steps:
            self._link.send(batch)
        self._asking = batch.asks
        self._batch, self._progress, self._flushed_s = Batch(), {}, now_s


def grammar_of(sampling: Sampling) -> tuple[str | None, ...] | None:
    """What stands for the request's output format; None for free text."""
    form = (sampling.json_schema, sampling.regex, sampling.grammar)
    return form if any(form) else None


def last_line(error: Exception) -> str:
    """OpenVINO's messages begin with source positions and end with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _SOURCE_POSITION.sub("", lines[-1]) if lines else type(error).__name__


def main() -> None:
    """Serve one parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    link = Link(socket.socket(fileno=fd))
    try:
        setup = link.receive(None)[0]
        assert isinstance(setup, Setup)
        began_s = time.perf_counter()
        try:
            worker = Worker(link, setup)
        except (RuntimeError, ImportError) as error:
            link.send(Refused(last_line(error)))
            return
        link.send(Ready(time.perf_counter() - began_s))
        worker.run()
    except GoneError:
        pass


if __name__ == "__main__":
    main()
