"""Servers that are added and taken away while a pool works."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from plait.engine.endpoint_list import EndpointList
from plait.engine.http import HttpPool
from plait.errors import UsageError
from plait.events import Event
from plait.testing_server import LoopbackServer, answer, echo
from tests.engine_http.pools import chat, collect, content, endings, settings


def slow(delay_s: float) -> LoopbackServer:
    """A server that takes its time."""
    return LoopbackServer(
        lambda call: answer(call, call.prompt, delay_s=delay_s) if call.method == "POST" else echo(call)
    )


def wait_for_work(pool: HttpPool, server: LoopbackServer, limit_s: float = 60.0) -> list[Event]:
    """Events until the server has got a request; fails the test when that takes too long."""
    events: list[Event] = []
    until_s = time.monotonic() + limit_s
    while not server.calls:
        assert time.monotonic() < until_s, "the added server got no work"
        events += pool.poll(0.05)
    return events


def test_a_server_that_is_added_while_running_is_probed_and_takes_work(tmp_path: Path) -> None:
    listing = tmp_path / "endpoints.txt"
    with slow(0.02) as first, slow(0.02) as second:
        listing.write_text(f"# the pool\n{first.url}\n")
        pool = HttpPool(settings(endpoints_file=listing, patience_s=1.0, max_concurrency=8))
        pool.submit([chat(row) for row in range(600)])
        events = pool.poll(0.2)
        assert not second.calls
        listing.write_text(f"{first.url}\n\n{second.url}\n")
        events += wait_for_work(pool, second)
        events += collect(pool, 600 - len(endings(events)))
        pool.close()
    ended = endings(events)
    assert {row: content(event) for row, event in ended.items()} == {r: f"prompt of row {r}" for r in range(600)}
    assert len(second.calls) > 20


def test_a_server_that_is_added_before_it_is_up_is_used_once_it_answers(tmp_path: Path) -> None:
    listing = tmp_path / "endpoints.txt"
    with slow(0.02) as first, slow(0.02) as second:
        second.kill()
        pool = HttpPool(settings(first.url, endpoints_file=listing_of(listing), patience_s=1.0, max_concurrency=8))
        pool.submit([chat(row) for row in range(600)])
        listing_of(listing, second.url)
        events = collect_for(pool, 0.6)
        assert not second.calls
        second.revive()
        events += wait_for_work(pool, second)
        events += collect(pool, 600 - len(endings(events)))
        pool.close()
    assert all(content(event) for event in endings(events).values())


def test_a_server_that_is_taken_away_finishes_what_it_has_and_gets_no_more_until_it_is_back(tmp_path: Path) -> None:
    listing = tmp_path / "endpoints.txt"
    with slow(0.02) as first, slow(0.02) as second:
        listing_of(listing, first.url, second.url)
        pool = HttpPool(settings(endpoints_file=listing, patience_s=1.0, max_concurrency=8))
        pool.submit([chat(row) for row in range(400)])
        events = pool.poll(0.1)
        listing_of(listing, first.url)
        events += collect_for(pool, 0.8)
        seen = len(second.calls)
        events += collect(pool, 400 - len(endings(events)))
        assert len(second.calls) == seen
        assert all(content(event) for event in endings(events).values()), "nothing was cut off"
        listing_of(listing, first.url, second.url)
        time.sleep(0.8)
        pool.submit([chat(row) for row in range(400, 500)])
        collect(pool, 100)
        pool.close()
        assert len(second.calls) > seen


def collect_for(pool: HttpPool, seconds: float) -> list[Event]:
    """Events of the next seconds."""
    events: list[Event] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        events += pool.poll(0.05)
    return events


def listing_of(path: Path, *urls: str) -> Path:
    """The file with these endpoints."""
    path.write_text("".join(f"{url}\n" for url in urls))
    return path


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
