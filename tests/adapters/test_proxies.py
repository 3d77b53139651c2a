"""Requests through a proxy, with every client library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import pytest
import requests

import tarry
from tarry import Reason
from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tarry.adapters.requests import RetryAdapter
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")

Send = Callable[[str, str, str, Any], object]
"""Takes the URL of the proxy, the method, the URL and the body."""


def send_with_httpx(proxy: str, method: str, url: str, body: Any) -> object:
    """Send a request through the proxy of the inner transport."""
    with httpx.Client(transport=RetryTransport(httpx.HTTPTransport(proxy=proxy))) as client:
        return client.request(method, url, content=body)


def send_with_async_httpx(proxy: str, method: str, url: str, body: Any) -> object:
    """Send a request through the proxy of the inner transport."""

    async def main() -> object:
        inner = httpx.AsyncHTTPTransport(proxy=proxy)
        async with httpx.AsyncClient(transport=AsyncRetryTransport(inner)) as client:
            return await client.request(method, url, content=body)

    return asyncio.run(main())


def send_with_requests(proxy: str, method: str, url: str, body: Any) -> object:
    """Send a request with `proxies`."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter())
        session.mount("https://", RetryAdapter())
        proxies = {"http": proxy, "https": proxy}
        return session.request(method, url, data=body, proxies=proxies, timeout=10)


def send_with_aiohttp(proxy: str, method: str, url: str, body: Any) -> object:
    """Send a request with `proxy`."""

    async def main() -> object:
        async with (
            aiohttp.ClientSession(middlewares=(RetryMiddleware(),)) as session,
            session.request(method, url, data=body, proxy=proxy) as response,
        ):
            return await response.read()

    return asyncio.run(main())


@pytest.fixture(
    params=[send_with_httpx, send_with_async_httpx, send_with_requests, send_with_aiohttp]
)
def send(request: pytest.FixtureRequest) -> Send:
    """Return the send function of each client library in turn."""
    param: Send = request.param
    return param


def reason_and_attempts(error: BaseException) -> tuple[Reason | None, int]:
    """Return the reason and the number of attempts of a call that raises."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason, record.attempts


def url_behind_proxy(server: FlakyServerView, plan: str) -> str:
    """Return a URL that only the proxy can reach."""
    return server.url(plan).replace(server.flaky.url, "http://example.test")


def chunks() -> Iterator[bytes]:
    """Return a body that can be sent only once."""
    yield from (b"hello", b"world")


def test_failure_through_a_proxy_is_retried(server: FlakyServerView, send: Send) -> None:
    """A failed response or a dropped connection of a proxy is retried."""
    send(server.flaky.url, "GET", url_behind_proxy(server, "503,drop,200"), None)

    assert 3 == len(server.received_requests)


def test_post_is_not_resent_if_the_proxy_disconnects(server: FlakyServerView, send: Send) -> None:
    """A POST is not retried if the proxy disconnects, because the server may have received it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each library has its own error
        send(server.flaky.url, "POST", url_behind_proxy(server, "drop,200"), b"order")

    assert (Reason.NOT_REPEATABLE, 1) == reason_and_attempts(caught.value)
    assert [b"order"] == [request.body for request in server.received_requests]


def test_iterator_is_not_resent_if_the_proxy_disconnects(server: FlakyServerView) -> None:
    """An iterator is not sent again if the proxy disconnects, because it has been consumed."""
    with pytest.raises(requests.ConnectionError) as caught:
        send_with_requests(server.flaky.url, "PUT", url_behind_proxy(server, "drop,200"), chunks())

    assert (Reason.NOT_REPEATABLE, 1) == reason_and_attempts(caught.value)
    assert [b"helloworld"] == [request.body for request in server.received_requests]


@pytest.mark.parametrize(
    ("status", "reason", "attempts"),
    [(407, Reason.PERMANENT, 1), (403, Reason.PERMANENT, 1), (503, Reason.ATTEMPTS, 4)],
)
def test_proxy_rejects_the_tunnel(
    server: FlakyServerView, send: Send, status: int, reason: Reason, attempts: int
) -> None:
    """A 4xx response to CONNECT is permanent; after a 5xx even a POST is retried."""
    host = f"{status}.{send.__name__.replace('_', '-')}.test"
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each library has its own error
        send(server.flaky.url, "POST", f"https://{host}/", b"order")

    assert (reason, attempts) == reason_and_attempts(caught.value)
    assert attempts == len(server.flaky.received_requests[host])
