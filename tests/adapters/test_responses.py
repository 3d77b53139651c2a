"""Failed responses: releasing their connection, the record, hints and events."""

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
from tarry.runtime.effects import effects
from tarry.testing import captured_events, scripted_random
from tests.adapters.clients import ClientLibrary, ClientResponse
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


# --- releasing connections ------------------------------------------------------------------------


def test_stalled_response_is_closed(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that is not complete within the drain timeout is closed with its connection."""
    monkeypatch.setattr(messages, "DRAIN_TIMEOUT_S", 0.1)
    with client.open(timeout=60.0) as session, tarry.deadline(120):
        response = session.send("GET", server.url("stall,200"))

    assert ClientResponse(200, "answer 2") == response
    assert 0 == server.flaky.stalled_reads


def test_chunked_responses_keep_their_connection(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short chunked response is read to its end, so that its connection is reused."""
    monkeypatch.setattr(messages, "DRAIN_TIMEOUT_S", 60.0)  # enough on a slow machine
    with client.open() as session:
        response = session.send("GET", server.url("chunks"))

    assert (ClientResponse(503, "answer 4"), 1) == (response, server.opened_connections)


def test_long_chunked_response_closes_its_connection(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A long chunked response is not read to its end; the next attempt uses a new connection."""
    with client.open() as session:
        response = session.send("GET", server.url("many,200"))

    assert (ClientResponse(200, "answer 2"), 2) == (response, server.opened_connections)


# --- returned responses ---------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["503", "chunks", "long"])
def test_deadline_passes_during_the_wait(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """A short last response is returned; a long one was dropped, so the call raises."""
    now = effects.now

    def pass_deadline(*_: object) -> None:
        monkeypatch.setattr(effects, "now", lambda: now() + 100)

    async def async_pass_deadline(_: float) -> None:
        pass_deadline()

    monkeypatch.setattr(effects, "blocking_sleep", pass_deadline)
    monkeypatch.setattr(effects, "async_sleep", async_pass_deadline)
    with client.open() as session, tarry.deadline(60):
        if plan == "long":
            with pytest.raises(tarry.DeadlineExceeded, match="the last attempt failed with 503"):
                session.send("GET", server.url(plan))
        else:
            assert ClientResponse(503, "answer 1") == session.send("GET", server.url(plan))

    assert 1 == len(server.received_requests)


Read = Callable[[str, Policy], tuple[Any, bytes]]
"""Takes a URL and a policy; returns the response and its body, which is read as a stream."""


def read_with_httpx(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return a response and its raw body."""
    with (
        httpx.Client(transport=RetryTransport(policy=policy)) as client,
        client.stream("GET", url) as response,
    ):
        return response, b"".join(response.iter_raw())


def read_with_async_httpx(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return a response and its raw body."""

    async def main() -> tuple[Any, bytes]:
        async with (
            httpx.AsyncClient(transport=AsyncRetryTransport(policy=policy)) as client,
            client.stream("GET", url) as response,
        ):
            return response, b"".join([chunk async for chunk in response.aiter_raw()])

    return asyncio.run(main())


def read_with_requests(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return a response and its body, read in chunks."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter(policy=policy))
        response = session.get(url, stream=True, timeout=10)
        return response, b"".join(response.iter_content(3))


def read_with_aiohttp(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Return a response and its body from `read()`."""

    async def main() -> tuple[Any, bytes]:
        async with (
            aiohttp.ClientSession(middlewares=(RetryMiddleware(policy=policy),)) as session,
            session.get(url) as response,
        ):
            return response, await response.read()

    return asyncio.run(main())


EACH_LIBRARY = pytest.mark.parametrize(
    "read", [read_with_httpx, read_with_async_httpx, read_with_requests, read_with_aiohttp]
)


@EACH_LIBRARY
@pytest.mark.parametrize("plan", ["503", "chunks"])
def test_released_response_can_be_read(
    server: FlakyServerView, read: Read, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that is returned after its connection was released can be read as a stream."""
    now = effects.now

    def exceed_budget(*_: object) -> float:
        monkeypatch.setattr(effects, "now", lambda: now() + 100)
        return 0.0

    response, body = read(server.url(plan), Policy(total_budget=60, jitter=exceed_budget))

    assert b"answer 1" == body
    record = tarry.record_of(response)
    assert record is not None
    assert (Reason.TOTAL_BUDGET, 1) == (record.reason, record.attempts)


@EACH_LIBRARY
def test_last_response_has_the_record(server: FlakyServerView, read: Read) -> None:
    """The last failed response has the record of the call, as an error would have."""
    response, _ = read(server.url("503,429"), Policy(max_attempts=2))

    record = tarry.record_of(response)
    assert record is not None
    assert (Reason.ATTEMPTS, ["503", "429"]) == (
        record.reason,
        [step.detail for step in record.steps],
    )


@EACH_LIBRARY
@pytest.mark.parametrize("plan", ["200", "503,200", "404"])
def test_other_responses_have_no_record(server: FlakyServerView, read: Read, plan: str) -> None:
    """A successful or permanent response has no record."""
    response, _ = read(server.url(plan), Policy())

    assert None is tarry.record_of(response)


# --- a retry loop around the adapter --------------------------------------------------------------


def get_with_httpx(url: str) -> Any:
    """Return the response of an httpx client with retries."""
    with httpx.Client(transport=RetryTransport()) as session:
        return session.get(url)


def get_with_async_httpx(url: str) -> Any:
    """Return the response of an async httpx client with retries."""

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=AsyncRetryTransport()) as session:
            return await session.get(url)

    return asyncio.run(main())


def get_with_requests(url: str) -> Any:
    """Return the response of a requests session with retries."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter())
        return session.get(url, timeout=60)


EACH_GET = pytest.mark.parametrize("get", [get_with_httpx, get_with_async_httpx, get_with_requests])
Get = Callable[[str], Any]


@EACH_GET
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_outer_loop_does_not_retry_a_status_error(
    server: FlakyServerView, get: Get, is_wrapped: bool
) -> None:
    """An outer loop does not retry the error of a response that the adapter has given up on."""

    def load() -> str:
        response = get(server.url("503"))
        try:
            response.raise_for_status()
        except (httpx.HTTPStatusError, requests.HTTPError) as error:
            if is_wrapped:
                raise LookupError from error
            raise
        return str(response.text)

    with pytest.raises((httpx.HTTPStatusError, requests.HTTPError, LookupError)) as caught:
        tarry.call(load, on=(httpx.HTTPStatusError, requests.HTTPError, LookupError))

    assert 4 == len(server.received_requests)
    assert "a layer below has already retried this error" in caught.value.__notes__[-1]


@EACH_GET
def test_outer_loop_does_not_retry_a_result(server: FlakyServerView, get: Get) -> None:
    """An outer loop with `until` does not retry a response that the adapter has given up on."""
    with pytest.raises(tarry.ResultNotAccepted) as caught:
        tarry.call(get, server.url("503"), until=lambda response: response.status_code == 200)

    assert 4 == len(server.received_requests)
    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 4) == (record.reason, record.attempts)


@EACH_GET
def test_outer_loop_retries_an_old_response(server: FlakyServerView, get: Get) -> None:
    """An outer loop retries the error of a response that was received before its attempt."""
    response = get(server.url("503"))
    numbers = []

    def check() -> None:
        numbers.append(1)
        response.raise_for_status()

    with pytest.raises((httpx.HTTPStatusError, requests.HTTPError)):
        tarry.call(check, on=(httpx.HTTPStatusError, requests.HTTPError))

    assert 4 == len(numbers)


# --- hints of the server --------------------------------------------------------------------------

HINTS_OF_7_SECONDS = [
    "retry-after=7",
    "retry-after-ms=7000",
    "x-ms-retry-after-ms=7000",
    "x-amz-retry-after=7000",
    "retry-after=Tue~ 14 Nov 2023 22:13:27 GMT",
    'ratelimit="minute";r=0;t=7',
    "retry-after=3|retry-after=7",
    'ratelimit="second";r=0;t=1|ratelimit="minute";r=0;t=7',
]


@pytest.mark.parametrize("hint", HINTS_OF_7_SECONDS)
def test_wait_is_as_long_as_the_hint(
    server: FlakyServerView, client: ClientLibrary, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is as long as the server requests in any of the supported headers."""
    monkeypatch.setattr(effects, "unix_time", lambda: 1_700_000_000.0)
    with client.open() as session, captured_events() as events, scripted_random([0.0]):
        session.send("GET", server.url(quote(f"503:{hint},200")))

    assert [7.0] == [event.delay for event in events if isinstance(event, tarry.WillWait)]


@pytest.mark.parametrize(
    ("plan", "request_count"),
    [
        ("400:stripe-should-retry=true,200", 2),
        ("503:stripe-should-retry=false,200", 1),
        ("503:x-should-retry=False,200", 1),
        ("503:x-should-retry=true|x-should-retry=false,200", 1),
    ],
)
def test_should_retry_header_is_obeyed(
    server: FlakyServerView, client: ClientLibrary, plan: str, request_count: int
) -> None:
    """The server's header decides whether to retry; of two values, `false` wins."""
    with client.open() as session:
        session.send("GET", server.url(plan))

    assert request_count == len(server.received_requests)


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "attempts"), [("404", 1), ("503,404", 2)])
def test_permanent_response_emits_gave_up(
    server: FlakyServerView, client: ClientLibrary, plan: str, attempts: int
) -> None:
    """A permanent response emits `AttemptFailed` and `GaveUp`, but not `Succeeded`."""
    with client.open() as session, captured_events() as events:
        session.send("GET", server.url(plan))

    failed, gave_up = events[-2:]
    assert isinstance(failed, tarry.AttemptFailed)
    assert isinstance(gave_up, tarry.GaveUp)
    assert (tarry.Kind.PERMANENT, "404") == (failed.kind, failed.detail)
    assert (Reason.PERMANENT, attempts, "404") == (
        gave_up.reason,
        gave_up.attempts,
        gave_up.detail,
    )
    assert None is gave_up.error  # the call returned a response
    assert not any(isinstance(event, tarry.Succeeded) for event in events)
