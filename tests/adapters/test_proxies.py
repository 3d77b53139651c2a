"""Proxies that are reached: what they have read is not sent again, what they refuse was not."""

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
from tests.adapters.conftest import Server

pytestmark = pytest.mark.usefixtures("_hurry")

Send = Callable[[str, str, str, Any], object]
"""Takes the proxy, the method, the URL and the body."""


def by_httpx(proxy: str, method: str, url: str, body: Any) -> object:
    """Send through the transport inside."""
    with httpx.Client(transport=RetryTransport(httpx.HTTPTransport(proxy=proxy))) as client:
        return client.request(method, url, content=body)


def by_httpx_looped(proxy: str, method: str, url: str, body: Any) -> object:
    """Send through the transport inside."""

    async def main() -> object:
        inner = httpx.AsyncHTTPTransport(proxy=proxy)
        async with httpx.AsyncClient(transport=AsyncRetryTransport(inner)) as client:
            return await client.request(method, url, content=body)

    return asyncio.run(main())


def by_requests(proxy: str, method: str, url: str, body: Any) -> object:
    """Send through the session's proxies."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter())
        session.mount("https://", RetryAdapter())
        proxies = {"http": proxy, "https": proxy}
        return session.request(method, url, data=body, proxies=proxies, timeout=10)


def by_aiohttp(proxy: str, method: str, url: str, body: Any) -> object:
    """Send through the proxy of the request."""

    async def main() -> object:
        async with (
            aiohttp.ClientSession(middlewares=(RetryMiddleware(),)) as session,
            session.request(method, url, data=body, proxy=proxy) as response,
        ):
            return await response.read()

    return asyncio.run(main())


@pytest.fixture(params=[by_httpx, by_httpx_looped, by_requests, by_aiohttp])
def send(request: pytest.FixtureRequest) -> Send:
    """Every client in turn."""
    found: Send = request.param
    return found


def ended(error: BaseException) -> tuple[Reason, int]:
    """Return how the call that ended with an error went."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason, record.attempts


def beyond(server: Server, plan: str) -> str:
    """Return an address that only the proxy can answer for."""
    return server.url(plan).replace(server.flaky.url, "http://example.test")


def pieces() -> Iterator[bytes]:
    """Return a body that can be sent once."""
    yield from (b"hello", b"world")


def test_proxy_that_answers(server: Server, send: Send) -> None:
    """What comes through a proxy is retried as if it came from the server."""
    send(server.flaky.url, "GET", beyond(server, "503,drop,200"), None)

    assert 3 == len(server.seen)


def test_post_that_a_proxy_has_read(server: Server, send: Send) -> None:
    """A connection that breaks behind a proxy may have carried the request to the server."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each client has its own
        send(server.flaky.url, "POST", beyond(server, "drop,200"), b"order")

    assert (Reason.UNSAFE, 1) == ended(caught.value)
    assert [b"order"] == [seen.body for seen in server.seen]


def test_body_that_a_proxy_has_used_up(server: Server) -> None:
    """An iterator is not sent a second time, empty as it would be."""
    with pytest.raises(requests.ConnectionError) as caught:
        by_requests(server.flaky.url, "PUT", beyond(server, "drop,200"), pieces())

    assert (Reason.UNSAFE, 1) == ended(caught.value)
    assert [b"helloworld"] == [seen.body for seen in server.seen]


@pytest.mark.parametrize(
    ("status", "reason", "attempts"),
    [(407, Reason.PERMANENT, 1), (403, Reason.PERMANENT, 1), (503, Reason.ATTEMPTS, 4)],
)
def test_proxy_that_does_not_connect(
    server: Server, send: Send, status: int, reason: Reason, attempts: int
) -> None:
    """Whoever is not let through stays so; a proxy in trouble has sent nothing on."""
    host = f"{status}.{send.__name__.replace('_', '-')}.test"
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each client has its own
        send(server.flaky.url, "POST", f"https://{host}/", b"order")

    assert (reason, attempts) == ended(caught.value)
    assert attempts == len(server.flaky.seen[host])
