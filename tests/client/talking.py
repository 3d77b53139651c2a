"""Both clients behind one face, so that one scenario goes through both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import copy_context
from inspect import isawaitable
from typing import Any

from tarry.client import AsyncClient, Client


class Talker:
    """A client; what it would await or iterate over is the answer."""

    client: Any

    def do(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method to its end."""
        raise NotImplementedError

    def events(self, most: int) -> list[Any]:
        """Listen to so many events, and leave."""
        raise NotImplementedError

    def named(self, method: str | Callable[..., Any]) -> Callable[..., Any]:
        """A method of the client, or of what it gave."""
        found: Callable[..., Any] = (
            getattr(self.client, method) if isinstance(method, str) else method
        )
        return found


class Blocking(Talker):
    """With `Client`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def do(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        result = self.named(method)(*args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result

    def events(self, most: int) -> list[Any]:
        """Listen."""
        with closing(self.client.events()) as events:
            return [next(events) for _ in range(most)]


class Awaiting(Talker):
    """With `AsyncClient`, on a loop that runs while a call does."""

    def __init__(self, client: AsyncClient, run: Callable[[Callable[[], Any]], Any]) -> None:
        self.client = client
        self.run = run

    def do(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it, and await or iterate."""

        async def call() -> Any:
            result = self.named(method)(*args, **kwargs)
            if isawaitable(result):
                return await result
            assert isinstance(result, AsyncIterator)
            return [item async for item in result]

        return self.run(call)

    def events(self, most: int) -> list[Any]:
        """Listen."""

        async def call() -> Any:
            async with aclosing(self.client.events()) as events:
                return [await anext(events) for _ in range(most)]

        found: list[Any] = self.run(call)
        return found


@contextmanager
def blocking(url: str, **options: Any) -> Iterator[Talker]:
    """The client that blocks."""
    with Client(url, **options) as client:
        yield Blocking(client)


@contextmanager
def on_asyncio(url: str, **options: Any) -> Iterator[Talker]:
    """The client that awaits, on asyncio."""
    with asyncio.Runner() as runner:
        client = AsyncClient(url, **options)
        try:
            yield Awaiting(client, lambda call: runner.run(call(), context=copy_context()))
        finally:
            runner.run(client.aclose())


OPENED = {"blocking": blocking, "asyncio": on_asyncio}
