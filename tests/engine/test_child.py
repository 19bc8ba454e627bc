"""A child process and its group: messages, its death in words, and nobody left behind."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import pytest

from plait.engine.child import Child
from plait.errors import EngineError
from tests.cli.command import wait_until


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def ask(child: Child, text: bytes) -> bytes:
    child.send(framed(text))
    while True:
        for message in child.receive(10.0):
            return message


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_messages_of_any_size_come_back_whole() -> None:
    child = Child("tests.engine.echo_child")
    for size in (0, 1, 70_000, 1_000_000):
        assert ask(child, b"x" * size) == b"x" * size
    child.close(10.0)
    child.close(10.0)
    with pytest.raises(EngineError, match="closed"):
        child.send(b"")


def test_a_child_that_answers_while_more_is_sent_blocks_nobody() -> None:
    child = Child("tests.engine.echo_child")
    texts = [bytes([i % 256]) * 1000 for i in range(4000)]  # far more than the socket's buffers hold
    child.send(b"".join(framed(text) for text in texts))
    echoed: list[bytes] = []
    while len(echoed) < len(texts):
        echoed += child.receive(10.0)
    child.close(10.0)
    assert echoed == texts


@pytest.mark.parametrize("last", [b"", b"deaf"])
def test_closing_ends_what_the_child_started_even_if_it_does_not_listen(last: bytes) -> None:
    child = Child("tests.engine.echo_child")
    grandchild = int(ask(child, b"spawn"))
    child.send(framed(last))
    child.close(0.5)  # the deaf one would go on for an hour
    assert gone(child.pid)
    wait_until(lambda: gone(grandchild))


def test_a_death_is_told_with_its_cause_and_ends_the_group() -> None:
    child = Child("tests.engine.echo_child")
    grandchild = int(ask(child, b"spawn"))
    child.send(framed(b"fail"))
    with pytest.raises(EngineError, match="ended with status 1: RuntimeError: as asked"):
        while True:
            child.receive(10.0)
    wait_until(lambda: gone(grandchild))
    child.close(0.0)


def test_a_signal_is_told() -> None:
    child = Child("tests.engine.echo_child")
    ask(child, b"up")
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="was killed by signal 9"):
        while True:
            child.receive(10.0)
    child.close(0.0)
