"""The server's side of retrying at one layer."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import httpx
import pytest
import requests

import tarry
from tarry.adapters.asgi import OneRetryLayerMiddleware
from tarry.adapters.httpx import AsyncRetryTransport
from tarry.adapters.requests import RetryAdapter
from tarry.runtime import deadlines
from tarry.testing import no_wait
from tests.adapters.conftest import Server

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
        asyncio.run(OneRetryLayerMiddleware(app)(scope, receive, send))
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


@pytest.mark.parametrize("header", [(b"X-Should-Retry", b"true"), (b"Retry-After", b"1")])
def test_the_application_has_the_last_word(header: tuple[bytes, bytes]) -> None:
    """What it says about retries itself is not changed: whether to come back, and when."""
    sent, _ = handled(answers(503, header, fails=True))

    assert [header] == sent[0]["headers"]


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


def failing(**options: Any) -> Any:
    """Return an application whose only call fails so."""
    outcome = tarry.Outcome(tarry.Kind.TRANSIENT, **options)

    async def call() -> None:
        raise ConnectionError("down")

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await tarry.acall(call, on=lambda _: outcome)

    return app


def test_nobody_has_retried_what_is_not_safe_to_repeat() -> None:
    """Whether the client may send its own request again is for the client to know."""
    sent, error = handled(failing(safe=False))

    assert [] == sent
    assert isinstance(error, ConnectionError)
    assert tarry.Reason.UNSAFE == getattr(tarry.record_of(error), "reason", None)


def test_a_wait_that_was_too_long_is_passed_on() -> None:
    """A server below that wants to be left alone is, by the clients of this one too."""
    sent, _ = handled(failing(hint=tarry.Hint(600.0)))

    assert (b"600", b"false") == (
        dict(sent[0]["headers"])[b"retry-after"],
        dict(sent[0]["headers"])[b"x-should-retry"],
    )


def test_an_application_is_wanted() -> None:
    """What is no application is refused before the first request."""
    with pytest.raises(tarry.ConfigurationTypeError, match="app must be an ASGI application"):
        OneRetryLayerMiddleware("app")  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [False, True])
def test_other_errors_are_not_ours(fails: bool) -> None:
    """A handler that fails by itself is left to the framework, also after a call it can miss."""
    call = answers(200, fails=fails)

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        async def unsent(_message: Any) -> None:
            pass

        await call(scope, receive, unsent)
        raise ValueError("a bug")

    sent, error = handled(app)

    assert ([], "a bug") == (sent, str(error))


@pytest.mark.parametrize("link", ["cause", "context", "group"])
def test_errors_that_come_from_a_call_are_answered_for(link: str) -> None:
    """An application may have errors of its own for what was given up on."""
    call = answers(0, fails=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await call(scope, receive, send)
        except ConnectionError as error:
            if link == "context":
                raise RuntimeError  # noqa: B904 - the very subject
            if link == "group":
                raise ExceptionGroup("all", [error]) from None
            raise RuntimeError from error

    sent, error = handled(app)

    assert isinstance(error, RuntimeError | ExceptionGroup)
    assert b"false" == dict(sent[0]["headers"])[b"x-should-retry"]


def test_an_error_made_of_the_last_answer_is_answered_for(server: Server) -> None:
    """`raise_for_status` makes its error when the call is over; it knows the answer."""

    async def with_httpx(_scope: Any, _receive: Any, _send: Any) -> None:
        async with httpx.AsyncClient(transport=AsyncRetryTransport(), trust_env=False) as client:
            (await client.get(server.url("503,503,503,503"))).raise_for_status()

    async def with_requests(_scope: Any, _receive: Any, _send: Any) -> None:
        def ask() -> None:
            with requests.Session() as session:
                session.trust_env = False
                session.mount("http://", RetryAdapter())
                session.get(server.url("503,503,503,503", "2")).raise_for_status()

        await asyncio.to_thread(ask)

    with no_wait():
        ends = [handled(with_httpx), handled(with_requests)]

    assert [httpx.HTTPStatusError, requests.HTTPError] == [type(error) for _, error in ends]
    assert [b"false"] * 2 == [dict(sent[0]["headers"])[b"x-should-retry"] for sent, _ in ends]


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


DEADLINE = (b"x-deadline-ms", b"60000")


@pytest.mark.parametrize("fails", [False, True])
def test_the_deadline_is_left_with_the_request(fails: bool) -> None:
    """Whoever handles requests in one task does not take the deadline of one to the next."""
    scopes: list[Any] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        scopes.append(deadlines.scope.get())
        if fails:
            raise ValueError

    async def main() -> None:
        scope = {"type": "http", "headers": [DEADLINE]}
        with suppress(ValueError):
            await OneRetryLayerMiddleware(app)(scope, None, None)  # type: ignore[arg-type]
        scopes.append(deadlines.scope.get())

    asyncio.run(main())

    assert [True, False] == [scope is not None for scope in scopes]


@pytest.mark.parametrize("last", ["http.response.body", "http.response.pathsend"])
@pytest.mark.parametrize("in_task", [False, True])
def test_the_deadline_ends_with_the_answer(in_task: bool, last: str) -> None:
    """Work behind the last byte has its own time, in whichever task that byte was sent."""
    left: list[float | None] = []

    async def later(answered: asyncio.Event) -> None:
        left.append(tarry.remaining())
        await answered.wait()
        left.append(tarry.remaining())

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        async def respond() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
            left.append(tarry.remaining())
            await send({"type": last})

        answered = asyncio.Event()
        task = asyncio.create_task(later(answered))
        await asyncio.sleep(0)
        await (asyncio.create_task(respond()) if in_task else respond())
        left.append(tarry.remaining())
        answered.set()
        await task

    handled(app, DEADLINE)

    assert [True, True, False, False] == [moment is not None for moment in left]


def test_calls_behind_the_answer_are_not_cut_off(server: Server) -> None:
    """A client that runs out of time does not end what is done when it has its answer."""
    statuses: list[int] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        async def respond() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        await asyncio.create_task(respond())
        async with httpx.AsyncClient(transport=AsyncRetryTransport(), trust_env=False) as client:
            statuses.append((await client.get(server.url("200"))).status_code)

    _, error = handled(app, (b"x-deadline-ms", b"0"))

    assert (None, [200]) == (error, statuses)
    assert [None] == server.received("X-Deadline-Ms")


def test_other_connections_pass_through() -> None:
    """Lifespan and websockets are none of its business."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    scope, receive, send = {"type": "lifespan"}, object(), object()
    asyncio.run(OneRetryLayerMiddleware(app)(scope, receive, send))  # type: ignore[arg-type]

    assert [(scope, receive, send)] == seen
