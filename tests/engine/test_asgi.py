"""A web application called in this process: its reply, its errors, and a client that leaves."""

from __future__ import annotations

import asyncio
import json

from plait.engine.asgi import Message, Receive, Send, call


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    """Answers in two parts; waits for its client to leave at /wait; breaks at /break and, having answered, at /late."""
    body = (await receive())["body"]
    if scope["path"] == "/break":
        raise RuntimeError("broken")
    if scope["path"] == "/wait":
        assert (await receive())["type"] == "http.disconnect"
    told = json.dumps({"method": scope["method"], "path": scope["path"], "body": body.decode()}).encode()
    await send({"type": "http.response.start", "status": 201, "headers": [(b"Content-Type", b"application/json")]})
    await send({"type": "http.response.body", "body": told[:5], "more_body": True})
    await send({"type": "http.response.body", "body": told[5:]})
    if scope["path"] == "/late":
        raise RuntimeError("too late to matter")


def test_the_whole_reply_is_collected() -> None:
    reply = asyncio.run(call(echo, "POST", "/v1/x", b'{"a": 1}'))
    assert reply.status == 201 and reply.headers == {"content-type": "application/json"}
    assert json.loads(reply.body) == {"method": "POST", "path": "/v1/x", "body": '{"a": 1}'}


def test_an_unhandled_error_is_status_500_unless_there_is_a_reply() -> None:
    reply = asyncio.run(call(echo, "POST", "/break"))
    assert reply.status == 500 and json.loads(reply.body)["error"]["message"] == "RuntimeError: broken"
    assert asyncio.run(call(echo, "POST", "/late")).status == 201


def test_the_application_hears_of_a_client_that_leaves() -> None:
    async def leave() -> int:
        hang_up = asyncio.Event()
        waiting = asyncio.ensure_future(call(echo, "POST", "/wait", hang_up=hang_up))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        hang_up.set()
        return (await waiting).status

    assert asyncio.run(leave()) == 201
