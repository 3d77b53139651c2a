"""Plain clients on an event loop, as in a notebook: a wait would freeze it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
import requests

import tarry
from tarry.adapters.httpx import RetryTransport
from tarry.adapters.requests import RetryAdapter
from tests.adapters.conftest import Server

Get = Callable[[str], int]


def by_httpx(url: str) -> int:
    """Return the status."""
    with httpx.Client(transport=RetryTransport()) as client:
        return client.get(url).status_code


def by_requests(url: str) -> int:
    """Return the status."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter())
        return session.get(url, timeout=10).status_code


@pytest.fixture(params=[by_httpx, by_requests])
def get(request: pytest.FixtureRequest) -> Get:
    """Every client that blocks, in turn."""
    found: Get = request.param
    return found


def on_a_loop(get: Get, url: str) -> int:
    """Call a plain function in a coroutine."""

    async def main() -> int:
        return get(url)

    return asyncio.run(main())


def test_answer_is_not_lost(server: Server, get: Get) -> None:
    """The answer that would have been followed by a wait is returned, with a warning."""
    with pytest.warns(RuntimeWarning, match="would block the running event loop"):
        assert 503 == on_a_loop(get, server.url("503,200"))

    assert 1 == len(server.seen)


def test_error_is_not_lost(server: Server, get: Get) -> None:
    """The client's own error is raised, and a note on it says why nothing followed."""
    with pytest.raises((httpx.RemoteProtocolError, requests.ConnectionError)) as caught:
        on_a_loop(get, server.url("drop,200"))

    assert "would block the running event loop" in caught.value.__notes__[-1]


def test_long_answer_is_gone(server: Server, get: Get) -> None:
    """An answer that is not kept cannot be returned: what is left is to say why."""
    with pytest.raises(tarry.BlockingWait):
        on_a_loop(get, server.url("long,200"))
