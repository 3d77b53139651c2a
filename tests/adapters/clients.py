"""Every HTTP client behind one face, so that one scenario can go through all of them."""

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
from tarry.runtime.clocks import system

Headers = dict[str, str]
Send = Callable[[str, str, Any, Headers], Any]
"""Method, URL, body and headers; answers with an `Answer`, or something to await for one."""

PIECES = (b"some", b"thing")
"""What a body that is an iterator gives."""


class Answer(NamedTuple):
    """What came back."""

    status: int
    text: str


class Plain:
    """An open client that blocks."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def send(
        self, method: str, url: str, body: Any = None, headers: Headers | None = None
    ) -> Answer:
        """Make one call."""
        answer: Answer = self._send(method, url, body, headers or {})
        return answer

    def iterator(self) -> Any:
        """Return a body that can be sent once."""
        return iter(PIECES)

    def while_waiting(self, patch: pytest.MonkeyPatch, method: str, url: str) -> list[Answer]:
        """Make a call of its own during every wait of another."""
        answers: list[Answer] = []

        def sleep(*_: object) -> None:
            answers.append(self.send(method, url))

        patch.setattr(system, "sleep", sleep)
        return answers


class Looped:
    """An open client of an event loop, which runs only while a call does."""

    def __init__(self, runner: asyncio.Runner, send: Send) -> None:
        self._runner = runner
        self._send = send

    def send(
        self, method: str, url: str, body: Any = None, headers: Headers | None = None
    ) -> Answer:
        """Make one call."""
        call = self._send(method, url, body, headers or {})
        answer: Answer = self._runner.run(call, context=copy_context())
        return answer

    def iterator(self) -> Any:
        """Return a body that can be sent once."""

        async def pieces() -> AsyncIterator[bytes]:
            for piece in PIECES:
                yield piece

        return pieces()

    def close(self, other: Any) -> None:
        """Close something else that has used the loop."""
        self._runner.run(other.aclose())

    def while_waiting(self, patch: pytest.MonkeyPatch, method: str, url: str) -> list[Answer]:
        """Make a call of its own during every wait of another."""
        answers: list[Answer] = []

        async def asleep(_: float) -> None:
            answers.append(await self._send(method, url, None, {}))

        patch.setattr(system, "async_sleep", asleep)
        return answers


Talker = Plain | Looped


@contextmanager
def httpx_plain(package: Any, options: dict[str, Any]) -> Iterator[Talker]:
    """`Client` of httpx and of httpx2."""
    limits = package.Limits(max_connections=options.pop("connections"))
    inner = package.HTTPTransport(verify=False, limits=limits)
    patience = options.pop("timeout")
    with package.Client(transport=RetryTransport(inner, **options), timeout=patience) as client:

        def send(method: str, url: str, body: Any, headers: Headers) -> Answer:
            response = client.request(method, url, content=body, headers=headers)
            return Answer(response.status_code, response.text)

        yield Plain(send)


@contextmanager
def httpx_looped(package: Any, options: dict[str, Any]) -> Iterator[Talker]:
    """`AsyncClient` of httpx and of httpx2."""
    limits = package.Limits(max_connections=options.pop("connections"))
    inner = package.AsyncHTTPTransport(verify=False, limits=limits)
    patience = options.pop("timeout")
    client = package.AsyncClient(transport=AsyncRetryTransport(inner, **options), timeout=patience)

    async def send(method: str, url: str, body: Any, headers: Headers) -> Answer:
        response = await client.request(method, url, content=body, headers=headers)
        return Answer(response.status_code, response.text)

    with asyncio.Runner() as runner:
        try:
            yield Looped(runner, send)
        finally:
            runner.run(client.aclose())


@contextmanager
def requests_plain(options: dict[str, Any]) -> Iterator[Talker]:
    """`Session` of requests."""
    connections, patience = options.pop("connections"), options.pop("timeout")
    adapter = RetryAdapter(pool_maxsize=connections, pool_block=True, **options)
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", adapter)
        session.mount("https://", adapter)

        def send(method: str, url: str, body: Any, headers: Headers) -> Answer:
            response = session.request(method, url, data=body, headers=headers, timeout=patience)
            return Answer(response.status_code, response.text)

        yield Plain(send)


@contextmanager
def aiohttp_looped(options: dict[str, Any]) -> Iterator[Talker]:
    """`ClientSession` of aiohttp."""
    connections, patience = options.pop("connections"), options.pop("timeout")

    async def begin() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=3 * patience, sock_read=patience),
            middlewares=(RetryMiddleware(**options),),
        )

    with asyncio.Runner() as runner:
        session = runner.run(begin())

        async def send(method: str, url: str, body: Any, headers: Headers) -> Answer:
            async with session.request(method, url, data=body, headers=headers) as response:
                return Answer(response.status, await response.text())

        try:
            yield Looped(runner, send)
        finally:
            runner.run(session.close())


@dataclass(frozen=True)
class Client:
    """A kind of client, and its own names for what can happen to a connection."""

    name: str
    opened: Callable[[dict[str, Any]], AbstractContextManager[Talker]]
    refused: type[Exception]
    dropped: type[Exception]
    cut_off: tuple[type[Exception], ...]
    tls: type[Exception]

    def __str__(self) -> str:
        return self.name

    def open(self, **options: Any) -> AbstractContextManager[Talker]:
        """Open one with so many `connections` (1), whose adapter has these options."""
        return self.opened({"connections": 1, "timeout": 10.0} | options)


CLIENTS = [
    Client(
        f"{package.__name__}-{kind}",
        partial(opened, package),
        package.ConnectError,
        package.RemoteProtocolError,
        (package.ReadTimeout, TimeoutError),
        package.ConnectError,
    )
    for package in (httpx, httpx2)
    for kind, opened in (("sync", httpx_plain), ("async", httpx_looped))
] + [
    Client(
        "requests",
        requests_plain,
        requests.exceptions.ConnectionError,
        requests.exceptions.ConnectionError,
        (requests.exceptions.ReadTimeout,),
        requests.exceptions.SSLError,
    ),
    Client(
        "aiohttp",
        aiohttp_looped,
        aiohttp.ClientConnectorError,
        aiohttp.ServerDisconnectedError,
        (TimeoutError,),
        aiohttp.ClientConnectorSSLError,
    ),
]

HEDGING = [client for client in CLIENTS if client.name != "aiohttp"]
"""Those that can send a copy: a request of aiohttp can be sent by one at a time."""
