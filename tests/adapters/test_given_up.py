"""A response that was given up is marked, so that an SDK does not retry it again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import pytest
import requests

import tarry
from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tarry.adapters.requests import RetryAdapter
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")

FAILURES = ",".join(["503"] * 12)
SDK_ATTEMPTS = 3
Response = tuple[int, str | None]
"""The status of a response, and its header X-Should-Retry."""


async def call_httpx(method: str, url: str, options: dict[str, Any]) -> Response:
    """Send a request with httpx."""
    with httpx.Client(transport=RetryTransport(**options)) as client:
        response = await asyncio.to_thread(client.request, method, url)
        return response.status_code, response.headers.get("x-should-retry")


async def call_async_httpx(method: str, url: str, options: dict[str, Any]) -> Response:
    """Send a request with the async client of httpx."""
    async with httpx.AsyncClient(transport=AsyncRetryTransport(**options)) as client:
        response = await client.request(method, url)
        return response.status_code, response.headers.get("x-should-retry")


async def call_requests(method: str, url: str, options: dict[str, Any]) -> Response:
    """Send a request with requests."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter(**options))
        response = await asyncio.to_thread(session.request, method, url, timeout=60)
        return response.status_code, response.headers.get("x-should-retry")


async def call_aiohttp(method: str, url: str, options: dict[str, Any]) -> Response:
    """Send a request with aiohttp."""
    async with (
        aiohttp.ClientSession(middlewares=[RetryMiddleware(**options)]) as session,
        session.request(method, url) as response,
    ):
        return response.status, response.headers.get("x-should-retry")


Call = Callable[[str, str, dict[str, Any]], Awaitable[Response]]


@pytest.fixture(params=[call_httpx, call_async_httpx, call_requests, call_aiohttp])
def call(request: pytest.FixtureRequest) -> Call:
    """Return the function of each client in turn."""
    function: Call = request.param
    return function


def call_sdk(call: Call, method: str, url: str, **options: Any) -> Response:
    """Send a request as an SDK does: retry 408, 409, 429 and 5xx unless the header forbids it."""

    async def main() -> Response:
        response = await call(method, url, options)
        for _ in range(SDK_ATTEMPTS - 1):
            status, should_retry = response
            if should_retry == "false" or (status < 500 and status not in {408, 409, 429}):
                break
            response = await call(method, url, options)
        return response

    return asyncio.run(main())


def test_sdk_does_not_retry_again(server: FlakyServerView, call: Call) -> None:
    """The attempts of an SDK and of the transport do not multiply: 4 requests instead of 12."""
    assert (503, "false") == call_sdk(call, "GET", server.url(FAILURES))
    assert 4 == len(server.received_requests)


def test_sdk_does_not_retry_a_post_with_a_key_again(server: FlakyServerView, call: Call) -> None:
    """The same holds for a POST that an idempotency key makes repeatable."""
    response = call_sdk(call, "POST", server.url(FAILURES), idempotency_key="auto")
    assert (503, "false") == response
    assert 4 == len(server.received_requests)


def test_mark_can_be_turned_off(server: FlakyServerView, call: Call) -> None:
    """With `mark_given_up=False` the response is returned as the server sent it."""
    assert (503, None) == call_sdk(call, "GET", server.url(FAILURES), mark_given_up=False)
    assert 12 == len(server.received_requests)


@pytest.mark.parametrize(
    ("method", "options"),
    [("POST", {}), ("GET", {"policy": tarry.Policy(max_attempts=1)})],
    ids=["not repeatable", "one attempt"],
)
def test_sdk_retries_what_was_not_retried(
    server: FlakyServerView, call: Call, method: str, options: dict[str, Any]
) -> None:
    """A response that was not retried has no mark, so the SDK decides."""
    assert (503, None) == call_sdk(call, method, server.url(FAILURES), **options)
    assert SDK_ATTEMPTS == len(server.received_requests)


@pytest.mark.parametrize("transport", [RetryTransport, RetryAdapter, RetryMiddleware])
def test_mark_must_be_a_flag(transport: Callable[..., object]) -> None:
    """A value that is neither True nor False is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="mark_given_up must be True or False"):
        transport(mark_given_up="no")
