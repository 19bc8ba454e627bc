"""A child process with a process group of its own, that speaks length-prefixed frames over a socket pair.

The group keeps a terminal's Ctrl-C with the parent, which drains, and lets the parent end whatever the child started.
The child sees the parent's end, however it came, as the end of the socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile

from plait.engine.wire import frames
from plait.errors import EngineError

_RECV_BYTES = 1 << 18
_TAIL_BYTES = 2000
_LOG_BYTES = 1 << 18
_DEATH_S = 5.0
_FAULT = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b: .+)$", re.MULTILINE)
"""The last line of a traceback, as vLLM's processes print it."""


class Child:
    """Runs ``python -m MODULE FD PID``, with this process' id. Not thread-safe. ``advice`` follows the news that the
    child was killed from outside."""

    def __init__(self, module: str, advice: str = "") -> None:
        self._advice = advice
        self._buffer = bytearray()
        self._closed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                process_group=0,  # Ctrl-C in a terminal reaches the parent only, which drains
            )
        self._sock.setblocking(False)

    @property
    def pid(self) -> int:
        """Of the child, and of its process group."""
        return self._process.pid

    def send(self, data: bytes | bytearray) -> None:
        """All of it. Reads meanwhile: the child may be waiting for room to send itself. Raises EngineError if it is
        gone."""
        self._check_open()
        view = memoryview(data)
        while view:
            readable, writable, _ = select.select([self._sock], [self._sock], [])
            if readable:
                self._read()
            if writable:
                try:
                    view = view[self._sock.send(view) :]
                except BlockingIOError:
                    continue
                except ConnectionError:
                    raise self._death() from None

    def receive(self, timeout_s: float) -> list[bytes]:
        """Messages that have come; waits for the first. Raises EngineError if the child is gone."""
        self._check_open()
        found = frames(self._buffer)
        if not found and select.select([self._sock], [], [], timeout_s)[0]:
            self._read()
            found = frames(self._buffer)
        return found

    def _read(self) -> None:
        """What has come, into the buffer. Raises EngineError at its end."""
        try:
            data = self._sock.recv(_RECV_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise self._death()
        self._buffer += data

    def close(self, grace_s: float) -> None:
        """Give the child this long to end by itself, then end its whole group. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._sock.close()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._end_group()
            self._process.wait()
            self._log.close()

    def faults(self) -> str:
        """Why the child failed, from what it printed: its first exception, which later ones only follow, else its last
        words."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_BYTES))
        text = self._log.read().decode("utf-8", "replace").strip()
        found = _FAULT.search(text)
        return found[1].strip() if found else text[-_TAIL_BYTES:]

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)

    def _death(self) -> EngineError:
        """What became of the child, in words."""
        try:
            code = self._process.wait(timeout=_DEATH_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self._end_group()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        advice = f" ({self._advice})" if self._advice and code == -signal.SIGKILL else ""
        faults = self.faults()
        return EngineError(f"the engine process {how}{advice}" + (f": {faults}" if faults else ""))
