"""One interface for both clients, so that each test runs with both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import copy_context
from inspect import isawaitable
from typing import Any

from tarry.client import AsyncClient, Client


class ClientDriver:
    """Calls the methods of a client; results are awaited, and iterators collected into a list."""

    client: Any

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client, by name or as a bound method; return its result."""
        raise NotImplementedError

    def events(self, count: int) -> list[Any]:
        """Read the first `count` events, and close the stream."""
        raise NotImplementedError

    def find_method(self, method: str | Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the client by its name; a callable is returned unchanged."""
        found: Callable[..., Any] = (
            getattr(self.client, method) if isinstance(method, str) else method
        )
        return found


class SyncClientDriver(ClientDriver):
    """Drives `Client`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method; collect an iterator into a list."""
        result = self.find_method(method)(*args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result

    def events(self, count: int) -> list[Any]:
        """Read the first `count` events."""
        with closing(self.client.events()) as events:
            return [next(events) for _ in range(count)]


class AsyncClientDriver(ClientDriver):
    """Drives `AsyncClient`, on an event loop that runs during each call."""

    def __init__(self, client: AsyncClient, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.client = client
        self._run = run

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method; await its result, or collect it into a list."""

        async def run() -> Any:
            result = self.find_method(method)(*args, **kwargs)
            if isawaitable(result):
                return await result
            assert isinstance(result, AsyncIterator)
            return [item async for item in result]

        return self._run(run)

    def events(self, count: int) -> list[Any]:
        """Read the first `count` events."""

        async def run() -> Any:
            async with aclosing(self.client.events()) as events:
                return [await anext(events) for _ in range(count)]

        events: list[Any] = self._run(run)
        return events


@contextmanager
def open_sync(url: str, **options: Any) -> Iterator[ClientDriver]:
    """Open `Client`."""
    with Client(url, **options) as client:
        yield SyncClientDriver(client)


@contextmanager
def open_async(url: str, **options: Any) -> Iterator[ClientDriver]:
    """Open `AsyncClient` on asyncio."""
    with asyncio.Runner() as runner:
        client = AsyncClient(url, **options)
        try:
            yield AsyncClientDriver(
                client, lambda function: runner.run(function(), context=copy_context())
            )
        finally:
            runner.run(client.aclose())


DRIVERS = {"sync": open_sync, "asyncio": open_async}
