"""Failed responses: released before a wait, and complete if they are returned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import pytest
import requests

import tarry
from tarry import Policy, Reason
from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.http import messages
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tarry.adapters.requests import RetryAdapter
from tarry.runtime.clocks import environment
from tarry.testing import captured_events, scripted_random
from tests.adapters.clients import ClientLibrary, ClientResponse
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


# --- releasing responses --------------------------------------------------------------------------


def test_stalled_response_is_dropped(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that does not end is dropped with its connection."""
    monkeypatch.setattr(messages, "DRAIN_TIMEOUT_S", 0.1)
    with client.open(timeout=60.0) as session, tarry.deadline(120):
        response = session.send("GET", server.url("stall,200"))

    assert ClientResponse(200, "answer 2") == response
    assert 0 == server.flaky.waited_for


def test_chunked_responses_keep_their_connection(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunked response is read to its end if it is short."""
    monkeypatch.setattr(messages, "DRAIN_TIMEOUT_S", 60.0)  # a busy machine may be slow
    with client.open() as session:
        response = session.send("GET", server.url("chunks"))

    assert (ClientResponse(503, "answer 4"), 1) == (response, server.opened_connections)


def test_long_chunked_response(server: FlakyServerView, client: ClientLibrary) -> None:
    """It is not read to its end, and the next attempt uses a new connection."""
    with client.open() as session:
        response = session.send("GET", server.url("many,200"))

    assert (ClientResponse(200, "answer 2"), 2) == (response, server.opened_connections)


# --- released, then returned ----------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["503", "chunks", "long"])
def test_deadline_during_the_wait(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """A short last response is complete; a long one is gone, and the error explains that."""
    now = environment.now

    def jump(*_: object) -> None:
        monkeypatch.setattr(environment, "now", lambda: now() + 100)

    async def ajump(_: float) -> None:
        jump()

    monkeypatch.setattr(environment, "blocking_sleep", jump)
    monkeypatch.setattr(environment, "async_sleep", ajump)
    with client.open() as session, tarry.deadline(60):
        if plan == "long":
            with pytest.raises(tarry.DeadlineExceeded, match="the last attempt failed with 503"):
                session.send("GET", server.url(plan))
        else:
            assert ClientResponse(503, "answer 1") == session.send("GET", server.url(plan))

    assert 1 == len(server.seen)


Get = Callable[[str, Policy], tuple[Any, bytes]]
"""Returns an answer and its body, as a user reads it who streams."""


def read_with_httpx(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return the raw body."""
    with (
        httpx.Client(transport=RetryTransport(policy=policy)) as client,
        client.stream("GET", url) as response,
    ):
        return response, b"".join(response.iter_raw())


def read_with_async_httpx(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return the raw body."""

    async def main() -> tuple[Any, bytes]:
        async with (
            httpx.AsyncClient(transport=AsyncRetryTransport(policy=policy)) as client,
            client.stream("GET", url) as response,
        ):
            return response, b"".join([piece async for piece in response.aiter_raw()])

    return asyncio.run(main())


def read_with_requests(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return the body, read in chunks."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter(policy=policy))
        response = session.get(url, stream=True, timeout=10)
        return response, b"".join(response.iter_content(3))


def read_with_aiohttp(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return the body from `read`, which treats released responses differently."""

    async def main() -> tuple[Any, bytes]:
        async with (
            aiohttp.ClientSession(middlewares=(RetryMiddleware(policy=policy),)) as session,
            session.get(url) as response,
        ):
            return response, await response.read()

    return asyncio.run(main())


GETS = pytest.mark.parametrize(
    "get", [read_with_httpx, read_with_async_httpx, read_with_requests, read_with_aiohttp]
)


@GETS
@pytest.mark.parametrize("plan", ["503", "chunks"])
def test_released_response_can_be_read(
    server: FlakyServerView, get: Get, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that was released, and is returned after all, can be streamed."""
    now = environment.now

    def late(*_: object) -> float:
        monkeypatch.setattr(environment, "now", lambda: now() + 100)
        return 0.0

    response, body = get(server.url(plan), Policy(total_budget=60, jitter=late))

    assert b"answer 1" == body
    record = tarry.record_of(response)
    assert record is not None
    assert (Reason.TOTAL_BUDGET, 1) == (record.reason, record.attempts)


@GETS
def test_last_response_has_the_record(server: FlakyServerView, get: Get) -> None:
    """The record of the call is attached to the response, as it would be to an error."""
    response, _ = get(server.url("503,429"), Policy(max_attempts=2))

    record = tarry.record_of(response)
    assert record is not None
    assert (Reason.ATTEMPTS, ["503", "429"]) == (
        record.reason,
        [step.detail for step in record.steps],
    )


@GETS
@pytest.mark.parametrize("plan", ["200", "503,200", "404"])
def test_other_responses_have_no_record(server: FlakyServerView, get: Get, plan: str) -> None:
    """A success, or a response that is never retried, has no record."""
    response, _ = get(server.url(plan), Policy())

    assert None is tarry.record_of(response)


# --- hints of the server --------------------------------------------------------------------------

WAITS = [
    "retry-after=7",
    "retry-after-ms=7000",
    "x-ms-retry-after-ms=7000",
    "x-amz-retry-after=7000",
    "retry-after=Tue~ 14 Nov 2023 22:13:27 GMT",
    'ratelimit="minute";r=0;t=7',
    "retry-after=3|retry-after=7",
    'ratelimit="second";r=0;t=1|ratelimit="minute";r=0;t=7',
]


@pytest.mark.parametrize("hint", WAITS)
def test_hint_is_obeyed(
    server: FlakyServerView, client: ClientLibrary, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is as long as the server requests, in each format."""
    monkeypatch.setattr(environment, "unix_time", lambda: 1_700_000_000.0)
    with client.open() as session, captured_events() as events, scripted_random([0.0]):
        session.send("GET", server.url(quote(f"503:{hint},200")))

    assert [7.0] == [event.delay for event in events if isinstance(event, tarry.WillWait)]


@pytest.mark.parametrize(
    ("plan", "arrive"),
    [
        ("400:stripe-should-retry=true,200", 2),
        ("503:stripe-should-retry=false,200", 1),
        ("503:x-should-retry=False,200", 1),
        ("503:x-should-retry=true|x-should-retry=false,200", 1),
    ],
)
def test_should_retry_header(
    server: FlakyServerView, client: ClientLibrary, plan: str, arrive: int
) -> None:
    """The server decides whether to retry; of two values the cautious one wins."""
    with client.open() as session:
        session.send("GET", server.url(plan))

    assert arrive == len(server.seen)


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "attempts"), [("404", 1), ("503,404", 2)])
def test_permanent_response_is_no_success(
    server: FlakyServerView, client: ClientLibrary, plan: str, attempts: int
) -> None:
    """Listeners are notified that an attempt failed and that the call was given up."""
    with client.open() as session, captured_events() as events:
        session.send("GET", server.url(plan))

    last, end = events[-2:]
    assert isinstance(last, tarry.AttemptFailed)
    assert isinstance(end, tarry.GaveUp)
    assert (tarry.Kind.PERMANENT, "404") == (last.kind, last.detail)
    assert (Reason.PERMANENT, attempts, "404") == (end.reason, end.attempts, end.detail)
    assert None is end.error  # it is an answer
    assert not any(isinstance(event, tarry.Succeeded) for event in events)
