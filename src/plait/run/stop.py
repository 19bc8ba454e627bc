"""When a run ends early: the user's interrupts, or too many failures in a row."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plait.drive import Stop


class Stopper:
    """Once: stop sending and drain for at most ``grace_s``. Twice: stop now."""

    def __init__(self, grace_s: float) -> None:
        self.interrupted = False
        self.reason = ""
        """Why the run gave up by itself; empty if it did not."""
        self._grace_s = grace_s
        self._deadline_s: float | None = None

    def interrupt(self) -> None:
        """The user wants to stop. Safe in a signal handler."""
        if self.interrupted:
            self._deadline_s = 0.0
        self.interrupted = True
        self._start_draining()

    def give_up(self, reason: str) -> None:
        """End the run, to be resumed later."""
        self.reason = self.reason or reason
        self._start_draining()

    def wanted(self) -> Stop:
        """What the loop should do now."""
        if self._deadline_s is None:
            return Stop.RUN
        return Stop.DRAIN if time.monotonic() < self._deadline_s else Stop.NOW

    def left_s(self) -> float:
        """How long a stopping run still waits for what is running, seconds."""
        return max(0.0, (self._deadline_s or 0.0) - time.monotonic())

    def _start_draining(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s


@contextmanager
def interrupts(stopper: Stopper) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the stopper; a third one acts as usual. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        stopper.interrupt()
        if seen == 2:
            for each, handler in before.items():
                signal.signal(each, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
