"""What a user can say about a pool of servers, and the URLs that follow from it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.engine.endpoint_list import EndpointList


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Options of ``HttpPool``. Zero means "no limit" or "find out"."""

    endpoints: tuple[str, ...]
    """Base URLs, usually ending in /v1."""
    endpoints_file: Path | None = None
    """More of them, one a line; read again whenever it changes."""
    model: str | None = None
    """Replaces every body's ``model``."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; the key itself is never stored in settings."""
    http2: bool = False
    """Speak HTTP/2 to https endpoints that offer it."""
    max_concurrency: int = 0
    """Requests in flight over the whole pool."""
    rpm: float = 0.0
    """Requests a minute over the whole pool."""
    tpm: float = 0.0
    """Tokens (prompt + output) a minute over the whole pool."""
    stall_timeout_s: float = 300.0
    """A request is stuck when neither it nor its server has moved for this long."""
    max_wait_s: float = 600.0
    """Longest time a request is kept waiting by 429 answers; a longer Retry-After ends it as an error."""
    connect_timeout_s: float = 10.0
    retries: int = 6
    """Faults a request may meet, 429 apart, before it is recorded as failed."""
    run_retries: int = 200
    """Retries the run may spend beyond two per answer; then it stops, to be resumed."""
    backoff_s: float = 0.25
    """First pause after a fault; doubled each time up to ``max_backoff_s``, with jitter."""
    max_backoff_s: float = 15.0
    patience_s: float = 60.0
    """How long all servers may be gone before the run stops, to be resumed."""
    kv_tokens: int = 0
    """KV tokens of the whole pool, where the servers do not tell."""
    block_tokens: int = 0
    max_context_tokens: int = 0
    seed: int = 0
    """Of the jitter."""

    def check(self) -> None:
        """Raise UsageError for the first option that cannot work."""
        if not self.endpoints and self.endpoints_file is None:
            raise UsageError("no endpoint given; use --endpoint http://HOST:PORT/v1")
        for endpoint in self.endpoints:
            fault = endpoint_fault(endpoint, self.api_key_env is not None)
            if fault:
                raise UsageError(fault)
        for name in ("max_concurrency", "rpm", "tpm", "retries", "run_retries", "kv_tokens", "block_tokens"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; a number >= 0 is needed (0 = no limit)")
        for name in ("stall_timeout_s", "max_wait_s", "connect_timeout_s", "backoff_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; a number of seconds above 0 is needed")

    def endpoint_list(self) -> EndpointList | None:
        """The file of endpoints, if there is one."""
        from plait.engine.endpoint_list import EndpointList

        return None if self.endpoints_file is None else EndpointList(self.endpoints_file, self.api_key_env is not None)

    def api_key(self) -> str | None:
        """The key from the environment. Raises UsageError if the variable is named but empty."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UsageError(f"--api-key-env {self.api_key_env}: that environment variable is not set")
        return key


def endpoint_fault(endpoint: str, keyed: bool) -> str:
    """What is wrong with an endpoint; empty if nothing is. ``keyed``: an API key is sent there."""
    try:
        parts = urlsplit(endpoint)
        if keyed and "@" in parts.netloc:
            return (
                f"endpoint '{endpoint_name(endpoint)}' has a user and a password of its own, and requests have room "
                "for one authorization: leave these or --api-key-env out"
            )
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    return "" if usable else f"endpoint '{endpoint_name(endpoint)}' is not a URL like http://HOST:PORT/v1"


def endpoint_name(endpoint: str) -> str:
    """An endpoint as messages may show it: without user, password and query."""
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        return endpoint.rpartition("@")[2]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def server_root(endpoint: str) -> str:
    """An endpoint without its version: where /metrics and /props live."""
    return re.sub(r"/v\d+$", "", endpoint.rstrip("/"))


def target(endpoint: str, url: str) -> str:
    """Where a batch line's ``url`` goes: http://a/v1 + /v1/chat/completions, /v2/rerank or /score. An endpoint of
    another version (https://host/api/v3) takes the place of the line's /v1."""
    base = endpoint.rstrip("/")
    root = server_root(base)
    version = base[len(root) :]
    if version not in ("", "/v1") and url.startswith("/v1/"):
        return base + url[3:]
    return root + url
