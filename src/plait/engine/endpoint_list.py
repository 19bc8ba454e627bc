"""A file of endpoints, one URL a line, that is read again whenever it changes: servers come and go while a job runs."""

from __future__ import annotations

from pathlib import Path

from plait.engine.http_settings import endpoint_fault
from plait.errors import UsageError


class EndpointList:
    """Blank lines and lines that begin with # are skipped. ``keyed``: an API key is sent to all of them."""

    def __init__(self, path: Path, keyed: bool) -> None:
        self.path, self.keyed = path, keyed
        self._stamp: tuple[int, int] | None = None

    def read(self) -> tuple[str, ...]:
        """The endpoints. Raises UsageError for a file that cannot be read and the first line that cannot be used."""
        try:
            found = self.path.stat()
            text = self.path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--endpoints-file {self.path}: cannot be read ({error})") from error
        self._stamp = (found.st_mtime_ns, found.st_size)
        endpoints = []
        for number, line in enumerate(text.split("\n"), 1):
            endpoint = line.strip()
            if not endpoint or endpoint.startswith("#"):
                continue
            fault = endpoint_fault(endpoint, self.keyed)
            if fault:
                raise UsageError(f"{self.path}:{number}: {fault}")
            endpoints.append(endpoint)
        return tuple(dict.fromkeys(endpoints))

    def changed(self) -> tuple[str, ...] | None:
        """The endpoints, if the file is another one than when it was last read and is in order; else None: a file that
        is just being written, or has gone, changes nothing."""
        try:
            found = self.path.stat()
            if (found.st_mtime_ns, found.st_size) == self._stamp:
                return None
            return self.read()
        except (OSError, UsageError):
            return None
