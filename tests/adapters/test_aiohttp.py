"""Behaviour specific to aiohttp: built-in retry, total timeout and payloads."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

import tarry
from tarry import Breaker, Downstream, Policy, Reason
from tarry.adapters.aiohttp import RetryMiddleware
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


@asynccontextmanager
async def open_session(**options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session whose middleware has these options."""
    async with aiohttp.ClientSession(middlewares=(RetryMiddleware(**options),)) as session:
        yield session


# --- aiohttp's built-in retry ---------------------------------------------------------------------


async def test_aiohttp_does_not_retry_again(server: FlakyServerView) -> None:
    """A call that the middleware gave up is not resent by aiohttp, and neither is the next call."""
    counts: list[int] = []
    async with open_session() as session:
        for _ in range(2):
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await session.get(server.url("drop"))
            counts.append(len(server.received_requests))
    assert [4, 8] == counts


async def test_call_in_another_task_is_another_call(server: FlakyServerView) -> None:
    """A task makes its own attempts, also if the task that started it has given up a call."""

    async def fail_with_disconnect(session: aiohttp.ClientSession) -> None:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await session.get(server.url("drop"))

    async with open_session(policy=Policy(max_attempts=2)) as session:
        await fail_with_disconnect(session)
        await asyncio.gather(
            *(asyncio.create_task(fail_with_disconnect(session)) for _ in range(3))
        )
    assert 8 == len(server.received_requests)


# --- timeouts -------------------------------------------------------------------------------------


async def test_total_timeout_ends_the_call(server: FlakyServerView) -> None:
    """The session's total timeout covers all attempts and counts as a failure for the breaker."""
    payments = Downstream("payments", breaker=Breaker(consecutive=2))

    results: list[tuple[Reason | None, int]] = []
    async with open_session(downstream=payments) as session:
        for _ in range(2):
            with pytest.raises(TimeoutError) as caught:
                await session.get(server.url("hang"), timeout=aiohttp.ClientTimeout(total=0.2))
            record = tarry.record_of(caught.value)
            assert record is not None
            results.append((record.reason, record.attempts))
    assert [(Reason.DEADLINE, 1), (Reason.BREAKER_OPEN, 1)] == results


async def test_read_timeout_ends_one_attempt(server: FlakyServerView) -> None:
    timeout = aiohttp.ClientTimeout(sock_read=0.2)
    async with (
        open_session() as session,
        session.get(server.url("hang,200"), timeout=timeout) as response,
    ):
        result = response.status
    assert 200 == result
    assert 2 == len(server.received_requests)


# --- bodies ---------------------------------------------------------------------------------------


async def test_response_is_streamed(server: FlakyServerView) -> None:
    """The first half of a response can be read before the server sends the second half."""
    async with open_session() as session, session.get(server.url("503,stream")) as response:
        first = await response.content.readany()
        server.resume()
        result = (first, await response.read())
    assert (b"first", b"later") == result


@pytest.fixture
def pipe() -> Iterator[Any]:
    """Return a file that cannot be rewound."""
    reader, writer = os.pipe()
    os.write(writer, b"report")
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        yield file


def form_with_file(file: Any) -> aiohttp.FormData:
    """Return a form with a text field and this file."""
    data = aiohttp.FormData({"a": "b"})
    data.add_field("report", file, filename="report.txt")
    return data


@pytest.mark.parametrize(
    ("make_payload", "request_count"),
    [
        (lambda _: "report", 3),
        (lambda _: io.BytesIO(b"report"), 3),
        (lambda _: aiohttp.FormData({"a": "report"}), 3),
        (lambda _: form_with_file(io.BytesIO(b"report")), 3),
        (lambda _: aiohttp.JsonPayload("report"), 3),
        (lambda pipe: pipe, 1),
        (form_with_file, 1),
    ],
    ids=["text", "file", "form", "form with a file", "json", "pipe", "form with a pipe"],
)
async def test_payload_is_resent_if_it_can_be_rewound(
    server: FlakyServerView, pipe: Any, make_payload: Callable[[Any], Any], request_count: int
) -> None:
    """A payload is resent completely; one that cannot be rewound is sent once."""
    async with (
        open_session() as session,
        session.put(server.url("503,503,200"), data=make_payload(pipe)),
    ):
        pass
    assert [True] * request_count == [
        b"report" in request.body for request in server.received_requests
    ]
    assert 1 == len({len(request.body) for request in server.received_requests})


async def test_failed_attempt_stops_reading_its_body(server: FlakyServerView) -> None:
    """An attempt that gets an early response stops reading the file that the next attempt sends."""
    size = 3_000_000

    async with open_session() as session:
        data = io.BytesIO(b"x" * size)
        async with session.put(server.url("early,503,200"), data=data) as response:
            result = response.status
    assert 200 == result
    assert [0, size, size] == [len(request.body) for request in server.received_requests]


async def test_hanging_attempt_stops_reading_its_body(server: FlakyServerView) -> None:
    """An attempt that times out while it sends has stopped before the next attempt begins."""
    size = 10_000_000
    writers: list[object] = []

    async def record_writer(request: aiohttp.ClientRequest, handler: Any) -> aiohttp.ClientResponse:
        writers.append(request._writer)
        if len(writers) > 1:
            server.resume()  # the server closes the connection of the first attempt
        response: aiohttp.ClientResponse = await handler(request)
        return response

    middlewares = (RetryMiddleware(policy=Policy(attempt_timeout=1.0)), record_writer)
    async with aiohttp.ClientSession(middlewares=middlewares) as session:
        data = io.BytesIO(b"x" * size)
        async with session.put(server.url("deaf,200"), data=data) as response:
            result = response.status
    assert 200 == result
    assert [None, None] == writers
    assert [0, size] == [len(request.body) for request in server.received_requests]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (aiohttp.ServerFingerprintMismatch(b"", b"", "", 0), Reason.PERMANENT),
        (aiohttp.InvalidURL("x"), Reason.PERMANENT),
        (ValueError(), Reason.PERMANENT),
        (aiohttp.ConnectionTimeoutError(), Reason.ATTEMPTS),
        (aiohttp.SocketTimeoutError(), Reason.NOT_REPEATABLE),
        (aiohttp.ClientConnectionResetError(), Reason.NOT_REPEATABLE),
        (ConnectionResetError(), Reason.NOT_REPEATABLE),
        (aiohttp.ClientPayloadError(), Reason.NOT_REPEATABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_give_up_reason_of_a_failed_post(
    server: FlakyServerView, error: Exception, reason: Reason
) -> None:
    """A POST is retried after a connect error, but not if the server may have received it."""

    async def raise_error(request: aiohttp.ClientRequest, handler: Any) -> aiohttp.ClientResponse:
        raise error

    with pytest.raises((type(error), aiohttp.ClientOSError)) as caught:
        async with aiohttp.ClientSession(middlewares=(RetryMiddleware(), raise_error)) as session:
            await session.post(server.url("200"))

    record = tarry.record_of(caught.value.__cause__ or caught.value)
    assert record is not None
    assert reason == record.reason


# --- idempotency keys -----------------------------------------------------------------------------


async def test_redirect_keeps_the_key(server: FlakyServerView) -> None:
    """A redirected POST keeps its idempotency key; the next call has another key."""
    target = server.url("200").replace("&", "%26")

    async with open_session(idempotency_key="auto") as session:
        for suffix in ("-first", "-second"):
            async with session.post(
                server.url(f"307:location={target}", run_suffix=suffix), data=b"order"
            ):
                pass
    sent = [
        server.flaky.received_requests[server.run + suffix][0].headers["Idempotency-Key"]
        for suffix in ("-first", "-second")
    ]
    assert sent == server.header_values("Idempotency-Key")
    assert 2 == len(set(sent))
