"""`OneRetryLayerMiddleware`: clients do not retry a request whose calls were retried already."""

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
from tarry.runtime.scopes import current_scope
from tarry.testing import no_wait
from tests.adapters.conftest import FlakyServerView

Message = MutableMapping[str, Any]


def handle_request(
    app: Any, *headers: tuple[bytes, bytes]
) -> tuple[list[Message], Exception | None]:
    """Send one request through the middleware; return the messages and the error."""
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


def make_app(
    status: int, *headers: tuple[bytes, bytes], call_fails: bool = False, one_attempt: bool = False
) -> Any:
    """Return an application that makes a call and responds; with status 0 it raises the error."""

    async def call() -> None:
        if call_fails:
            raise ConnectionError("down")

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        try:
            with no_wait():
                await tarry.acall(call, on=ConnectionError, attempts=1 if one_attempt else 4)
        except ConnectionError:
            if not status:
                raise
        await send({"type": "http.response.start", "status": status or 200, "headers": [*headers]})
        await send({"type": "http.response.body", "body": b"done"})

    return app


@pytest.mark.parametrize(
    ("status", "call_fails", "one_attempt", "expected"),
    [
        (503, True, False, b"false"),
        (500, True, False, b"false"),
        (200, True, False, None),
        (404, True, False, None),
        (503, False, False, None),
        (503, True, True, None),
    ],
)
def test_failure_after_retries_has_the_header(
    status: int, call_fails: bool, one_attempt: bool, expected: bytes | None
) -> None:
    """A 5xx response has the header if a call of its handler was retried and then given up."""
    sent, error = handle_request(make_app(status, call_fails=call_fails, one_attempt=one_attempt))

    assert None is error
    assert expected == dict(sent[0]["headers"]).get(b"x-should-retry")


@pytest.mark.parametrize("header", [(b"X-Should-Retry", b"true"), (b"Retry-After", b"1")])
def test_headers_of_the_application_are_kept(header: tuple[bytes, bytes]) -> None:
    """If the application sets Retry-After or X-Should-Retry, the middleware adds no header."""
    sent, _ = handle_request(make_app(503, header, call_fails=True))

    assert [header] == sent[0]["headers"]


def test_error_of_a_given_up_call_becomes_a_503() -> None:
    """The client gets a 503 with the header, and the error reaches the server, which logs it."""
    sent, error = handle_request(make_app(0, call_fails=True))

    assert isinstance(error, ConnectionError)
    assert (503, b"false") == (sent[0]["status"], dict(sent[0]["headers"])[b"x-should-retry"])
    assert b"Service Unavailable" in sent[1]["body"]


def test_open_breaker_sets_retry_after() -> None:
    """If a breaker rejects the call, the response has the breaker's Retry-After."""
    breaker = tarry.Breaker(consecutive=1, open_for=7.0, spread=0.0)
    downstream = tarry.Downstream("payments", breaker=breaker)

    async def fail() -> None:
        raise ConnectionError("down")

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await tarry.acall(fail, on=ConnectionError, attempts=1, downstream=downstream)

    _, first = handle_request(app)
    sent, second = handle_request(app)

    assert isinstance(first, ConnectionError)
    assert isinstance(second, tarry.BreakerOpen)
    assert (b"7", b"false") == (
        dict(sent[0]["headers"])[b"retry-after"],
        dict(sent[0]["headers"])[b"x-should-retry"],
    )


def make_failing_app(**options: Any) -> Any:
    """Return an application whose only call fails with a transient outcome of these options."""
    outcome = tarry.Outcome(tarry.Kind.TRANSIENT, **options)

    async def call() -> None:
        raise ConnectionError("down")

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await tarry.acall(call, on=lambda _: outcome)

    return app


def test_call_that_is_not_repeatable_gets_no_response() -> None:
    """The middleware sends no response if the call failed because it was not repeatable."""
    sent, error = handle_request(make_failing_app(repeatable=False))

    assert [] == sent
    assert isinstance(error, ConnectionError)
    assert tarry.Reason.NOT_REPEATABLE == getattr(tarry.record_of(error), "reason", None)


def test_long_retry_after_is_passed_on() -> None:
    """A Retry-After too long to wait for is sent to the client of this server."""
    sent, _ = handle_request(make_failing_app(hint=tarry.Hint(600.0)))

    assert (b"600", b"false") == (
        dict(sent[0]["headers"])[b"retry-after"],
        dict(sent[0]["headers"])[b"x-should-retry"],
    )


def test_app_must_be_callable() -> None:
    """A value that is not callable raises when the middleware is created."""
    with pytest.raises(tarry.ConfigurationTypeError, match="app must be an ASGI application"):
        OneRetryLayerMiddleware("app")  # type: ignore[arg-type]


@pytest.mark.parametrize("call_fails", [False, True])
def test_other_errors_are_left_to_the_framework(call_fails: bool) -> None:
    """The middleware sends no response for an unrelated error, also after a call was given up."""
    call = make_app(200, call_fails=call_fails)

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        async def discard(_message: Any) -> None:
            pass

        await call(scope, receive, discard)
        raise ValueError("a bug")

    sent, error = handle_request(app)

    assert ([], "a bug") == (sent, str(error))


@pytest.mark.parametrize("link", ["cause", "context", "group"])
def test_errors_caused_by_a_call_get_a_response(link: str) -> None:
    """An error whose cause, context or group contains the error of a given-up call gets a 503."""
    call = make_app(0, call_fails=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await call(scope, receive, send)
        except ConnectionError as error:
            if link == "context":
                raise RuntimeError  # noqa: B904 - tests the implicit context
            if link == "group":
                raise ExceptionGroup("all", [error]) from None
            raise RuntimeError from error

    sent, error = handle_request(app)

    assert isinstance(error, RuntimeError | ExceptionGroup)
    assert b"false" == dict(sent[0]["headers"])[b"x-should-retry"]


def test_raise_for_status_gets_a_response(server: FlakyServerView) -> None:
    """An error of `raise_for_status` gets a 503, because it refers to the response of the call."""

    async def with_httpx(_scope: Any, _receive: Any, _send: Any) -> None:
        async with httpx.AsyncClient(transport=AsyncRetryTransport(), trust_env=False) as client:
            (await client.get(server.url("503,503,503,503"))).raise_for_status()

    async def with_requests(_scope: Any, _receive: Any, _send: Any) -> None:
        def send() -> None:
            with requests.Session() as session:
                session.trust_env = False
                session.mount("http://", RetryAdapter())
                session.get(server.url("503,503,503,503", run_suffix="-2")).raise_for_status()

        await asyncio.to_thread(send)

    with no_wait():
        results = [handle_request(with_httpx), handle_request(with_requests)]

    assert [httpx.HTTPStatusError, requests.HTTPError] == [type(error) for _, error in results]
    assert [b"false"] * 2 == [dict(sent[0]["headers"])[b"x-should-retry"] for sent, _ in results]


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
def test_client_deadline_is_shared(
    headers: list[tuple[bytes, bytes]], expected: float | None
) -> None:
    """The client's deadline applies to calls of the handler; an invalid header is ignored."""
    remaining: list[float | None] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        remaining.append(tarry.remaining())

    handle_request(app, *headers)

    assert (expected is None) == (remaining[0] is None)
    assert (expected or 0.0) >= (remaining[0] or 0.0)


DEADLINE_HEADER = (b"x-deadline-ms", b"60000")


@pytest.mark.parametrize("fails", [False, True])
async def test_deadline_ends_with_the_request(fails: bool) -> None:
    """A task that handles several requests does not keep the deadline after a request."""
    scopes: list[Any] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        scopes.append(current_scope.get())
        if fails:
            raise ValueError

    scope = {"type": "http", "headers": [DEADLINE_HEADER]}
    with suppress(ValueError):
        await OneRetryLayerMiddleware(app)(scope, None, None)  # type: ignore[arg-type]
    scopes.append(current_scope.get())
    assert [True, False] == [scope is not None for scope in scopes]


@pytest.mark.parametrize("last_message", ["http.response.body", "http.response.pathsend"])
@pytest.mark.parametrize("in_task", [False, True])
def test_deadline_ends_with_the_response(in_task: bool, last_message: str) -> None:
    """Code that runs after the last message has no deadline, whichever task sent the message."""
    remaining: list[float | None] = []

    async def run_in_background(responded: asyncio.Event) -> None:
        remaining.append(tarry.remaining())
        await responded.wait()
        remaining.append(tarry.remaining())

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        async def respond() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
            remaining.append(tarry.remaining())
            await send({"type": last_message})

        responded = asyncio.Event()
        task = asyncio.create_task(run_in_background(responded))
        await asyncio.sleep(0)
        await (asyncio.create_task(respond()) if in_task else respond())
        remaining.append(tarry.remaining())
        responded.set()
        await task

    handle_request(app, DEADLINE_HEADER)

    assert [True, True, False, False] == [seconds is not None for seconds in remaining]


def test_calls_after_the_response_have_no_deadline(server: FlakyServerView) -> None:
    """A call that is made after the response is not limited by the client's deadline."""
    statuses: list[int] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        async def respond() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        await asyncio.create_task(respond())
        async with httpx.AsyncClient(transport=AsyncRetryTransport(), trust_env=False) as client:
            statuses.append((await client.get(server.url("200"))).status_code)

    _, error = handle_request(app, (b"x-deadline-ms", b"0"))

    assert (None, [200]) == (error, statuses)
    assert [None] == server.header_values("X-Deadline-Ms")


def test_other_scopes_pass_through() -> None:
    """A lifespan scope is passed to the application unchanged."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    scope, receive, send = {"type": "lifespan"}, object(), object()
    asyncio.run(OneRetryLayerMiddleware(app)(scope, receive, send))  # type: ignore[arg-type]

    assert [(scope, receive, send)] == seen
