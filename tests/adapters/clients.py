"""All HTTP client libraries behind one interface, so that a test can run with each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import httpx
import httpx2
import pytest
import requests

from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tarry.adapters.requests import RetryAdapter
from tarry.runtime.effects import effects

Headers = dict[str, str]
Send = Callable[[str, str, Any, Headers], Any]
"""Takes method, URL, body and headers; returns a `ClientResponse`, or an awaitable of one."""

CHUNKS = (b"some", b"thing")
"""The chunks of a body that is sent from an iterator."""


class ClientResponse(NamedTuple):
    """The response of a call."""

    status: int
    text: str


class SyncSession:
    """An open sync client."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def send(
        self, method: str, url: str, body: Any = None, headers: Headers | None = None
    ) -> ClientResponse:
        """Make one call."""
        response: ClientResponse = self._send(method, url, body, headers or {})
        return response

    def iterator(self) -> Any:
        """Return a body that can be sent only once."""
        return iter(CHUNKS)

    def call_during_waits(
        self, patch: pytest.MonkeyPatch, method: str, url: str
    ) -> list[ClientResponse]:
        """Make another call during every wait of a call; return the responses."""
        responses: list[ClientResponse] = []

        def sleep(*_: object) -> None:
            responses.append(self.send(method, url))

        patch.setattr(effects, "blocking_sleep", sleep)
        return responses


class AsyncSession:
    """An open async client. Its event loop runs only during a call."""

    def __init__(self, runner: asyncio.Runner, send: Send) -> None:
        self._runner = runner
        self._send = send

    def send(
        self, method: str, url: str, body: Any = None, headers: Headers | None = None
    ) -> ClientResponse:
        """Make one call."""
        call = self._send(method, url, body, headers or {})
        response: ClientResponse = self._runner.run(call, context=copy_context())
        return response

    def iterator(self) -> Any:
        """Return a body that can be sent only once."""

        async def chunks() -> AsyncIterator[bytes]:
            for chunk in CHUNKS:
                yield chunk

        return chunks()

    def close(self, other: Any) -> None:
        """Close another object that has used the event loop."""
        self._runner.run(other.aclose())

    def call_during_waits(
        self, patch: pytest.MonkeyPatch, method: str, url: str
    ) -> list[ClientResponse]:
        """Make another call during every wait of a call; return the responses."""
        responses: list[ClientResponse] = []

        async def async_sleep(_: float) -> None:
            responses.append(await self._send(method, url, None, {}))

        patch.setattr(effects, "async_sleep", async_sleep)
        return responses


Session = SyncSession | AsyncSession


@contextmanager
def open_httpx_client(package: Any, options: dict[str, Any]) -> Iterator[Session]:
    """Open a `Client` of httpx or httpx2."""
    limits = package.Limits(max_connections=options.pop("connections"))
    inner = package.HTTPTransport(verify=False, limits=limits)
    timeout = options.pop("timeout")
    with package.Client(transport=RetryTransport(inner, **options), timeout=timeout) as client:

        def send(method: str, url: str, body: Any, headers: Headers) -> ClientResponse:
            response = client.request(method, url, content=body, headers=headers)
            return ClientResponse(response.status_code, response.text)

        yield SyncSession(send)


@contextmanager
def open_httpx_async_client(package: Any, options: dict[str, Any]) -> Iterator[Session]:
    """Open an `AsyncClient` of httpx or httpx2."""
    limits = package.Limits(max_connections=options.pop("connections"))
    inner = package.AsyncHTTPTransport(verify=False, limits=limits)
    timeout = options.pop("timeout")
    client = package.AsyncClient(transport=AsyncRetryTransport(inner, **options), timeout=timeout)

    async def send(method: str, url: str, body: Any, headers: Headers) -> ClientResponse:
        response = await client.request(method, url, content=body, headers=headers)
        return ClientResponse(response.status_code, response.text)

    with asyncio.Runner() as runner:
        try:
            yield AsyncSession(runner, send)
        finally:
            runner.run(client.aclose())


@contextmanager
def open_requests_session(options: dict[str, Any]) -> Iterator[Session]:
    """Open a `Session` of requests."""
    connections, timeout = options.pop("connections"), options.pop("timeout")
    adapter = RetryAdapter(pool_maxsize=connections, pool_block=True, **options)
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", adapter)
        session.mount("https://", adapter)

        def send(method: str, url: str, body: Any, headers: Headers) -> ClientResponse:
            response = session.request(method, url, data=body, headers=headers, timeout=timeout)
            return ClientResponse(response.status_code, response.text)

        yield SyncSession(send)


@contextmanager
def open_aiohttp_session(options: dict[str, Any]) -> Iterator[Session]:
    """Open a `ClientSession` of aiohttp."""
    connections, timeout = options.pop("connections"), options.pop("timeout")

    async def open_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=3 * timeout, sock_read=timeout),
            middlewares=(RetryMiddleware(**options),),
        )

    with asyncio.Runner() as runner:
        session = runner.run(open_session())

        async def send(method: str, url: str, body: Any, headers: Headers) -> ClientResponse:
            async with session.request(method, url, data=body, headers=headers) as response:
                return ClientResponse(response.status, await response.text())

        try:
            yield AsyncSession(runner, send)
        finally:
            runner.run(session.close())


@dataclass(frozen=True)
class ClientLibrary:
    """A client library and the exceptions that it raises."""

    name: str
    opener: Callable[[dict[str, Any]], AbstractContextManager[Session]]
    connect_error: type[Exception]
    disconnect_error: type[Exception]
    timeout_errors: tuple[type[Exception], ...]
    tls_error: type[Exception]

    def __str__(self) -> str:
        return self.name

    def open(self, **options: Any) -> AbstractContextManager[Session]:
        """Open a client with `connections` (1 by default) and these options of the adapter."""
        return self.opener({"connections": 1, "timeout": 10.0} | options)


CLIENT_LIBRARIES = [
    ClientLibrary(
        f"{package.__name__}-{suffix}",
        partial(opener, package),
        package.ConnectError,
        package.RemoteProtocolError,
        (package.ReadTimeout, TimeoutError),
        package.ConnectError,
    )
    for package in (httpx, httpx2)
    for suffix, opener in (("sync", open_httpx_client), ("async", open_httpx_async_client))
] + [
    ClientLibrary(
        "requests",
        open_requests_session,
        requests.exceptions.ConnectionError,
        requests.exceptions.ConnectionError,
        (requests.exceptions.ReadTimeout,),
        requests.exceptions.SSLError,
    ),
    ClientLibrary(
        "aiohttp",
        open_aiohttp_session,
        aiohttp.ClientConnectorError,
        aiohttp.ServerDisconnectedError,
        (TimeoutError,),
        aiohttp.ClientConnectorSSLError,
    ),
]

HEDGING_LIBRARIES = [client for client in CLIENT_LIBRARIES if client.name != "aiohttp"]
"""The libraries that can hedge: an aiohttp request cannot be sent twice in parallel."""
