"""One run at a time on one output: an advisory lock file that names its holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from plait.errors import JournalError
from plait.run.files import disk_errors


class RunLock:
    """Held from construction to ``release``; the kernel releases it if the process dies."""

    def __init__(self, path: Path) -> None:
        """Raises JournalError naming the holder's process id."""
        self._path = path
        while True:
            with disk_errors(path):
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(self._descriptor)
                raise JournalError(
                    f"another run (process {holder}) is writing this output and holds {path}; "
                    "wait for it, stop it, or choose another -o"
                ) from None
            if self._is_current():
                break
            os.close(self._descriptor)  # the holder before us removed the file between our open and our lock
        with disk_errors(path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the file and let go. Idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
