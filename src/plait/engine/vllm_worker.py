"""The process that holds vLLM: its ``AsyncLLM``, and its server's own endpoints called without a socket.

Started as ``python -m plait.engine.vllm_worker FD`` by ``plait.engine.vllm``; speaks ``plait.engine.vllm_wire`` over
that socket. Requests go through the application that ``vllm serve`` would put behind its port, so bodies, answers and
errors are the server's. When the parent is gone, so is everything here: the process group that this process leads and
vLLM's own processes belong to is ended, after a moment for vLLM to clean up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from plait.data.schema import BODIES
from plait.engine.answers import Answer, read_reply
from plait.engine.asgi import Reply, call
from plait.engine.vllm_wire import BadArguments, Call, Encode, Encoded, EngineDead, Load, Loaded, ToChild, to_child
from plait.engine.wire import Batch, Cancel, frame, frames
from plait.events import Event, Failed, Finished, Preempted, Progress, Started

CLEAN_UP_S = 8.0
"""For vLLM to end its processes before they are killed."""
STREAM_INTERVAL = 16
"""Tokens between two signs of progress."""
TOKENIZED = ("prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message", "tools")
TEMPLATED = ("chat_template", "chat_template_kwargs", "mm_processor_kwargs")
"""What of a body its prompt tokens depend on."""
_RECV_BYTES = 1 << 18


class Link:
    """Messages from and to the parent. Reads in a thread of its own, so that the parent's end is noticed at any time,
    also while a model is loading, and the parent never waits for room to send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[ToChild | None] = asyncio.Queue()

    def first(self) -> Load:
        """The message that says what to load."""
        while not (found := frames(self._buffer)):
            data = self._sock.recv(_RECV_BYTES)
            if not data:
                sys.exit(0)
            self._buffer += data
        message = to_child(found[0])
        assert isinstance(message, Load)
        return message

    def start(self) -> None:
        """Read from now on."""
        threading.Thread(target=self._read, name="plait-link", daemon=True).start()

    async def receive(self) -> ToChild | None:
        """The next message; None once the parent is gone."""
        return await self._queue.get()

    def serve(self) -> None:
        """The caller's event loop takes messages from now on; until then the parent's end is everybody's at once."""
        self._loop = asyncio.get_running_loop()

    def send(self, message: msgspec.Struct) -> None:
        """To the parent; nobody listens if it is gone."""
        with contextlib.suppress(ConnectionError):
            self._sock.sendall(frame(message))

    def _read(self) -> None:
        while data := self._recv():
            self._buffer += data
            for found in frames(self._buffer):
                assert self._loop is not None, "the parent speaks when it is spoken to"
                self._loop.call_soon_threadsafe(self._queue.put_nowait, to_child(found))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
            time.sleep(CLEAN_UP_S)
        os.killpg(0, signal.SIGKILL)

    def _recv(self) -> bytes:
        try:
            return self._sock.recv(_RECV_BYTES)
        except ConnectionError:
            return b""


class Worker:
    """Requests on their way through vLLM's application."""

    def __init__(self, link: Link, engine: Any, app: Any, start_s: float) -> None:
        self._link, self._engine, self._app, self._start_s = link, engine, app, start_s
        self._hang_ups: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: list[Event] = []

    async def run(self) -> None:
        """Until the parent is gone or vLLM's engine is dead."""
        while (message := await self._link.receive()) is not None:
            if isinstance(message, Call):
                self._hang_ups[message.row] = asyncio.Event()
                self._spawn(self._answer(message))
            elif isinstance(message, Encode):
                self._spawn(self._encode(message))
            elif isinstance(message, Cancel):
                for row in message.rows:
                    if row in self._hang_ups:
                        self._hang_ups[row].set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # a fault of this program: asyncio prints it

    def now_s(self) -> float:
        """The engine's clock."""
        return time.perf_counter() - self._start_s

    def emit(self, event: Event) -> None:
        """Tell the parent, with everything else of this turn of the loop."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        batch = Batch()
        places: dict[type[Event], list[Any]] = {
            Started: batch.started,
            Preempted: batch.preempted,
            Finished: batch.finished,
            Failed: batch.failed,
        }
        for event in self._events:
            if isinstance(event, Progress):
                batch.progress.append(event)
            else:
                places[type(event)].append(event)
        self._events = []
        self._link.send(batch)

    async def _answer(self, message: Call) -> None:
        from plait.engine.vllm_flight import FLIGHT, Flight

        row, hang_up = message.row, self._hang_ups[message.row]
        flight = Flight(row, self.emit, self.now_s)
        FLIGHT.set(flight)
        reply = await call(self._app, "POST", message.url, message.body, hang_up)
        del self._hang_ups[row]
        if self._engine.errored:
            self._link.send(EngineDead())
            return
        if hang_up.is_set():
            self.emit(Preempted(row, self.now_s(), requeue=True))
            return
        outcome = read_reply(reply.status, reply.headers.get("content-type"), reply.headers, reply.body)
        if isinstance(outcome, Answer):
            if outcome.status == 200:
                flight.cached_tokens = flight.cached_tokens or outcome.cached_tokens
                flight.start()
            self.emit(_finished(row, self.now_s(), outcome, flight.cached_tokens))
        else:
            code, text, status = outcome.code, outcome.message, outcome.status
            self.emit(Failed(row, self.now_s(), code, text, None, status, outcome.body, retryable=True))

    async def _encode(self, message: Encode) -> None:
        replies = await asyncio.gather(*(self._tokens(url, body) for url, body in message.requests))
        self._link.send(Encoded(list(replies)))

    async def _tokens(self, url: str, body: bytes) -> bytes:
        """Prompt ids as the server's own /tokenize gives them; empty where it does not."""
        if url not in BODIES:
            return b""
        given = msgspec.json.decode(body)
        prompt = given.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return np.asarray(prompt, "<i4").tobytes()
        asked = {name: given[name] for name in TOKENIZED + TEMPLATED if given.get(name) is not None}
        reply = await call(self._app, "POST", "/tokenize", msgspec.json.encode(asked))
        if reply.status != 200:
            return b""
        return np.asarray(msgspec.json.decode(reply.body)["tokens"], "<i4").tobytes()


def _finished(row: int, now_s: float, answer: Answer, cached_tokens: int) -> Finished:
    prompt = answer.prompt_tokens
    cached = min(max(answer.cached_tokens, cached_tokens), prompt)
    return Finished(row, now_s, answer.status, answer.body, prompt, cached, answer.output_tokens, answer.finish_reasons)


async def serve(link: Link, load: Load) -> None:
    """Load the model, then answer until the parent is gone."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    from plait.engine.vllm_flight import watch

    args = arguments(load)
    async with build_async_engine_client(args) as engine:
        watch(engine)
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # what vLLM tells to stop when its engine is dead
        link.serve()
        names = await call(app, "GET", "/v1/models")
        link.send(loaded(engine.vllm_config, names))
        await Worker(link, engine, app, load.start_s).run()


def arguments(load: Load) -> Any:
    """As ``vllm serve`` parses them. Raises SystemExit as argparse does, ValueError or TypeError as vLLM does."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = ["--model", load.model, "--enable-prompt-tokens-details", "--stream-interval", str(STREAM_INTERVAL)]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*own, *load.arguments])
    validate_parsed_serve_args(args)
    return args


def loaded(config: Any, names: Reply) -> Loaded:
    """What the engine turned out to hold."""
    cache, scheduler = config.cache_config, config.scheduler_config
    return Loaded(
        models=[model["id"] for model in msgspec.json.decode(names.body)["data"]],
        kv_tokens=(cache.num_gpu_blocks - 1) * cache.block_size,  # one block is never given out
        block_tokens=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs * config.parallel_config.data_parallel_size,
        max_batched_tokens=scheduler.max_num_batched_tokens,
        max_context_tokens=config.model_config.max_model_len,
    )


def main() -> None:
    """Serve one parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    load = link.first()
    link.start()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own command line does
    try:
        asyncio.run(serve(link, load))
    except SystemExit:
        link.send(BadArguments("vLLM does not take these engine arguments"))


if __name__ == "__main__":
    main()
