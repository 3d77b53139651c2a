"""Sync clients called in a running event loop, where a wait would block the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
import requests

import tarry
from tarry.adapters.httpx import RetryTransport
from tarry.adapters.requests import RetryAdapter
from tests.adapters.conftest import FlakyServerView

Get = Callable[[str], int]


def get_with_httpx(url: str) -> int:
    """Send a GET request and return the status."""
    with httpx.Client(transport=RetryTransport()) as client:
        return client.get(url).status_code


def get_with_requests(url: str) -> int:
    """Send a GET request and return the status."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter())
        return session.get(url, timeout=10).status_code


@pytest.fixture(params=[get_with_httpx, get_with_requests])
def get(request: pytest.FixtureRequest) -> Get:
    """Return the get function of each sync client in turn."""
    param: Get = request.param
    return param


def run_in_event_loop(get: Get, url: str) -> int:
    """Call a sync get function in a coroutine."""

    async def main() -> int:
        return get(url)

    return asyncio.run(main())


def test_response_is_returned(server: FlakyServerView, get: Get) -> None:
    """A failed response is returned instead of a wait, with a warning that has its status."""
    advice = "AsyncRetryTransport" if get is get_with_httpx else "aiohttp"
    with pytest.warns(
        RuntimeWarning, match=f"the attempt failed with 503, and a wait .* loop; use .*{advice}"
    ):
        assert 503 == run_in_event_loop(get, server.url("503,200"))

    assert 1 == len(server.received_requests)


def test_error_is_raised(server: FlakyServerView, get: Get) -> None:
    """The error of the client is raised instead of a wait; a note explains why."""
    with pytest.raises((httpx.RemoteProtocolError, requests.ConnectionError)) as caught:
        run_in_event_loop(get, server.url("drop,200"))

    assert "would block the running event loop" in caught.value.__notes__[-1]


def test_long_response_raises(server: FlakyServerView, get: Get) -> None:
    """A long response was dropped and cannot be returned, so the call raises."""
    with pytest.raises(tarry.BlockingWait):
        run_in_event_loop(get, server.url("long,200"))
