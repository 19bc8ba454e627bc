"""Running the command line as a user does, against a server of our own or the real engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from click.testing import CliRunner, Result

from plait.cli import cli, main
from plait.testing_server import Behaviour, Call, LoopbackServer, Reply, answer, error, models


def plait(*arguments: object, stdin: bytes = b"") -> Result:
    """Run a command in this process; only a SystemExit is taken, any other exception fails the test."""
    return CliRunner().invoke(_Main(), list(map(str, arguments)), input=stdin, catch_exceptions=False)


class _Main(type(cli)):  # type: ignore[misc]
    """The real entry point behind the interface that CliRunner needs: PlaitErrors become exit codes in ``main``."""

    def __init__(self) -> None:
        super().__init__(name="plait")

    def main(self, args: list[str], **_: object) -> None:
        before, sys.argv = sys.argv, ["plait", *args]
        try:
            main()
        finally:
            sys.argv = before


def serving(model: str = "m", reply: Behaviour | None = None, **kwargs: int) -> LoopbackServer:
    """A server of one model that says what it was asked; other model names get 404."""

    def behave(call: Call) -> Reply:
        if call.method == "GET":
            return models(model, **kwargs) if call.path.endswith("/models") else error(404, f"no route {call.path}")
        if call.body.get("model") != model:
            return error(404, "no such model", "model_not_found")
        return reply(call) if reply else answer(call, call.prompt)

    return LoopbackServer(behave)


def spawn(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """``plait`` as a process of its own, in a process group of its own."""
    command = [sys.executable, "-m", "plait", *map(str, arguments)]
    return subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=_take_interrupts,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def _take_interrupts() -> None:
    """As in a terminal, even if the tests themselves run in the background, where shells have SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def press(process: subprocess.Popen[str], number: int = signal.SIGINT) -> None:
    """What a terminal does on Ctrl-C: the signal goes to the whole process group."""
    os.killpg(process.pid, number)


def wait_until(true: Callable[[], bool], limit_s: float = 300.0) -> None:
    """Wait for something to become true: on a busy machine whose compiled code is not cached yet this takes minutes."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
