"""The server's side of retrying at one layer."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

import tarry
from tarry.adapters.asgi import OneLayerMiddleware
from tarry.testing import no_wait

Message = MutableMapping[str, Any]


def handled(app: Any, *headers: tuple[bytes, bytes]) -> tuple[list[Message], Exception | None]:
    """Send one request through the middleware; return what it sent and what it raised."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": list(headers)}
    try:
        asyncio.run(OneLayerMiddleware(app)(scope, receive, send))
    except Exception as error:
        return sent, error
    return sent, None


def answers(status: int, *headers: tuple[bytes, bytes], fails: bool = False, once: bool = False):  # type: ignore[no-untyped-def]
    """Return an application that makes a call, which may fail, and then answers."""

    async def call() -> None:
        if fails:
            raise ConnectionError("down")

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        try:
            with no_wait():
                await tarry.acall(call, on=ConnectionError, attempts=1 if once else 4)
        except ConnectionError:
            if not status:
                raise
        await send({"type": "http.response.start", "status": status or 200, "headers": [*headers]})
        await send({"type": "http.response.body", "body": b"done"})

    return app


@pytest.mark.parametrize(
    ("status", "fails", "once", "expected"),
    [
        (503, True, False, b"false"),
        (500, True, False, b"false"),
        (200, True, False, None),
        (404, True, False, None),
        (503, False, False, None),
        (503, True, True, None),
    ],
)
def test_a_failure_that_was_retried_below_says_so(
    status: int, fails: bool, once: bool, expected: bytes | None
) -> None:
    """Only a failure, only after a call was given up on, and only if that was retried."""
    sent, error = handled(answers(status, fails=fails, once=once))

    assert None is error
    assert expected == dict(sent[0]["headers"]).get(b"x-should-retry")


def test_the_application_has_the_last_word() -> None:
    """What it says about retries itself is not changed."""
    sent, _ = handled(answers(503, (b"X-Should-Retry", b"true"), fails=True))

    assert [(b"X-Should-Retry", b"true")] == sent[0]["headers"]


def test_a_handler_that_raises_is_answered_for() -> None:
    """The client learns not to retry, and the error still reaches the server's log."""
    sent, error = handled(answers(0, fails=True))

    assert isinstance(error, ConnectionError)
    assert (503, b"false") == (sent[0]["status"], dict(sent[0]["headers"])[b"x-should-retry"])
    assert b"Service Unavailable" in sent[1]["body"]


def test_an_open_breaker_says_when_to_come_back() -> None:
    """A call that was not let through is answered with its Retry-After."""
    breaker = tarry.Breaker(consecutive=1, open_for=7.0, spread=0.0)
    downstream = tarry.Downstream("below", breaker=breaker)

    async def fail() -> None:
        raise ConnectionError("down")

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await tarry.acall(fail, on=ConnectionError, attempts=1, downstream=downstream)

    _, first = handled(app)
    sent, second = handled(app)

    assert isinstance(first, ConnectionError)
    assert isinstance(second, tarry.BreakerOpen)
    assert (b"7", b"false") == (
        dict(sent[0]["headers"])[b"retry-after"],
        dict(sent[0]["headers"])[b"x-should-retry"],
    )


def test_other_errors_are_not_ours() -> None:
    """A handler that fails by itself is left to the framework."""

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("a bug")

    sent, error = handled(app)

    assert ([], "a bug") == (sent, str(error))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        ([(b"x-deadline-ms", b"1500")], 1.5),
        ([(b"X-Deadline-Ms", b"1500")], 1.5),
        ([(b"x-deadline-ms", b"soon")], None),
        ([(b"x-deadline-ms", b"-1")], None),
        ([(b"x-deadline-ms", b"1"), (b"x-deadline-ms", b"2")], None),
    ],
)
def test_the_clients_deadline_is_shared(
    headers: list[tuple[bytes, bytes]], expected: float | None
) -> None:
    """Calls of the handler have the time that the client has; oddities are ignored."""
    left: list[float | None] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        left.append(tarry.remaining())

    handled(app, *headers)

    assert (expected is None) == (left[0] is None)
    assert (expected or 0.0) >= (left[0] or 0.0)
    assert None is tarry.remaining()


def test_other_connections_pass_through() -> None:
    """Lifespan and websockets are none of its business."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    scope, receive, send = {"type": "lifespan"}, object(), object()
    asyncio.run(OneLayerMiddleware(app)(scope, receive, send))  # type: ignore[arg-type]

    assert [(scope, receive, send)] == seen
