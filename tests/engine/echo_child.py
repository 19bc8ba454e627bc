"""A child for test_child.py: sends every message back; starts a process of its own on "spawn", fails on "fail", sleeps
through its parent's end on "deaf"."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time

from plait.engine.wire import frames


def main() -> None:
    """Until the parent is gone."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    buffer = bytearray()
    while data := sock.recv(1 << 16):
        buffer += data
        for message in frames(buffer):
            if message == b"fail":
                raise RuntimeError("as asked")
            if message == b"deaf":
                sock.close()
                time.sleep(3600)
            told = message
            if message == b"spawn":
                told = str(subprocess.Popen(["sleep", "3600"]).pid).encode()
            sock.sendall(struct.pack("<I", len(told)) + told)


if __name__ == "__main__":
    main()
