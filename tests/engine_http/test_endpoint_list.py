"""Servers that are added and taken away while a pool works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest

from plait.engine.endpoint_list import EndpointList
from plait.engine.http import HttpPool
from plait.errors import UsageError
from plait.events import Event
from plait.testing_server import LoopbackServer, answer, echo
from tests.engine_http.pools import LIMIT_S, chat, collect, content, endings, settings

BUSY = 32
"""Rows that are always waiting or in flight: four times as many as may be in flight."""


def slow(delay_s: float) -> LoopbackServer:
    """A server that takes its time."""
    return LoopbackServer(
        lambda call: answer(call, call.prompt, delay_s=delay_s) if call.method == "POST" else echo(call)
    )


def busy_until(true: Callable[[], bool], pool: HttpPool, rows: Iterator[int]) -> list[Event]:
    """Keeps the pool busy with new rows until something is true; the events meanwhile."""
    events: list[Event] = []
    waiting = 0
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s, "it did not happen in time"
        if waiting < BUSY:
            pool.submit([chat(row) for row in islice(rows, BUSY)])
            waiting += BUSY
        new = pool.poll(0.05)
        waiting -= len(endings(new))
        events += new
    return events


def test_a_server_that_is_added_while_running_is_probed_and_takes_work(tmp_path: Path) -> None:
    listing = tmp_path / "endpoints.txt"
    with slow(0.02) as first, slow(0.02) as second:
        listing.write_text(f"# the pool\n{first.url}\n")
        pool = HttpPool(settings(endpoints_file=listing, max_concurrency=8))
        rows = count()
        events = busy_until(lambda: len(first.calls) > 8, pool, rows)
        listing_of(listing, first.url, "", second.url)
        events += busy_until(lambda: len(second.calls) > 20, pool, rows)
        n = next(rows)
        events += collect(pool, n - len(endings(events)))
        pool.close()
    ended = endings(events)
    assert {row: content(event) for row, event in ended.items()} == {r: f"prompt of row {r}" for r in range(n)}


def test_a_server_that_is_added_before_it_is_up_is_used_once_it_answers(tmp_path: Path) -> None:
    listing = tmp_path / "endpoints.txt"
    with slow(0.02) as first, slow(0.02) as second:
        second.kill()
        pool = HttpPool(settings(first.url, endpoints_file=listing_of(listing), max_concurrency=8))
        rows, servers = count(), pool._dispatcher.servers
        listing_of(listing, second.url)
        events = busy_until(lambda: len(servers) == 2 and bool(servers[1].last_error), pool, rows)
        assert not second.calls
        second.revive()
        events += busy_until(lambda: bool(second.calls), pool, rows)
        events += collect(pool, next(rows) - len(endings(events)))
        pool.close()
    assert all(content(event) for event in endings(events).values())


def test_a_server_that_is_taken_away_finishes_what_it_has_and_gets_no_more_until_it_is_back(tmp_path: Path) -> None:
    listing = tmp_path / "endpoints.txt"
    with slow(0.02) as first, slow(0.02) as second:
        listing_of(listing, first.url, second.url)
        pool = HttpPool(settings(endpoints_file=listing, max_concurrency=8))
        rows, (kept, gone) = count(), pool._dispatcher.servers
        members = pool._dispatcher.balancer.members
        events = busy_until(lambda: min(len(first.calls), len(second.calls)) > 8, pool, rows)
        listing_of(listing, first.url)
        events += busy_until(lambda: gone.retired and not members[gone.index].in_flight, pool, rows)
        seen, before = len(second.calls), len(first.calls)
        events += busy_until(lambda: len(first.calls) > before + 50, pool, rows)
        assert len(second.calls) == seen and not kept.retired
        listing_of(listing, first.url, second.url)
        events += busy_until(lambda: len(second.calls) > seen, pool, rows)
        n = next(rows)
        events += collect(pool, n - len(endings(events)))
        pool.close()
        assert len(endings(events)) == n and all(content(event) for event in endings(events).values())
        assert len(first.calls) + len(second.calls) == n, "nothing was cut off"


def listing_of(path: Path, *lines: str) -> Path:
    """The file with these endpoints, there as a whole at once."""
    path.with_suffix(".new").write_text("".join(f"{line}\n" for line in lines))
    return path.with_suffix(".new").rename(path)


def test_the_list_skips_comments_and_names_the_line_that_is_no_url(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.txt"
    path.write_text("# a\n\n http://a:1/v1 \nhttp://a:1/v1\nhttps://b/v1\n")
    listing = EndpointList(path, keyed=False)
    assert listing.read() == ("http://a:1/v1", "https://b/v1")
    assert listing.changed() is None
    path.write_text("http://c:1/v1\nftp://user:secret@d\n")
    assert listing.changed() is None, "a file with a bad line changes nothing"
    with pytest.raises(UsageError, match=r"endpoints.txt:2: endpoint 'ftp://d' is not a URL") as caught:
        listing.read()
    assert "secret" not in str(caught.value)
    path.unlink()
    assert listing.changed() is None
    with pytest.raises(UsageError, match="cannot be read"):
        listing.read()


def test_a_key_and_a_password_of_an_endpoint_are_refused_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_TEST_KEY", "sk")
    url = "http://me:secret@a/v1"
    for given in (
        settings(url, api_key_env="PLAIT_TEST_KEY"),
        settings(endpoints_file=listing_of(tmp_path / "e", url)),
    ):
        with pytest.raises(UsageError, match=r"endpoint 'http://a/v1' has a user .* or --api-key-env out") as caught:
            HttpPool(replace(given, api_key_env="PLAIT_TEST_KEY"))
        assert "secret" not in str(caught.value)


def test_an_empty_list_and_no_endpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no endpoint in it"):
        HttpPool(settings(endpoints_file=listing_of(tmp_path / "endpoints.txt")))
