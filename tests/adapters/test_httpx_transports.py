"""The transport of httpx and httpx2 inside: its connections, and what it may not be."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import httpx2
import pytest
import trio

import tarry
from tarry import Breaker, Downstream, Policy, Reason
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tests.adapters.conftest import Server

pytestmark = pytest.mark.usefixtures("_hurry")

PACKAGES = pytest.mark.parametrize("package", [httpx, httpx2], ids=lambda package: package.__name__)


# --- connections ----------------------------------------------------------------------------------


@PACKAGES
def test_transport_that_is_patched_later(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test doubles and tracers replace methods of clients that are there: none goes around them."""

    def answer(_self: object, _request: object) -> Any:
        return package.Response(200, text="patched")

    async def aanswer(_self: object, _request: object) -> Any:
        return package.Response(200, text="patched")

    client = package.Client(transport=RetryTransport(package.HTTPTransport()))
    aclient = package.AsyncClient(transport=AsyncRetryTransport(package.AsyncHTTPTransport()))
    monkeypatch.setattr(package.HTTPTransport, "handle_request", answer)
    monkeypatch.setattr(package.AsyncHTTPTransport, "handle_async_request", aanswer)

    async def main() -> str:
        return str((await aclient.get("http://127.0.0.1:9/")).text)

    assert "patched" == client.get("http://127.0.0.1:9/").text == asyncio.run(main())


def test_pool_that_is_full_says_nothing_about_the_server(server: Server) -> None:
    """A call that finds all connections taken is retried, but the breaker does not count it."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    inner = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
    with (
        httpx.Client(transport=RetryTransport(inner, downstream=payments)) as client,
        client.stream("GET", server.url("stream")),
        pytest.raises(httpx.PoolTimeout) as caught,
    ):
        client.post(server.url("200"), timeout=httpx.Timeout(10, pool=0.01))

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 4) == (record.reason, record.attempts)
    assert "closed" == payments.state


@pytest.fixture
def full() -> Iterator[str]:
    """Give the address of a server whose queue of new connections is full: nobody gets in."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}/"


@PACKAGES
@pytest.mark.parametrize(
    "run", [lambda main: asyncio.run(main()), trio.run], ids=["asyncio", "trio"]
)
def test_attempt_that_found_no_connection_in_time(package: Any, full: str, run: Any) -> None:
    """The time for an attempt does not hide that nothing was sent, so that a POST is retried."""
    policy = Policy(attempt_timeout=0.5, max_attempts=2)

    async def main() -> None:
        transport = AsyncRetryTransport(package.AsyncHTTPTransport(), policy=policy)
        async with package.AsyncClient(transport=transport, timeout=None) as client:
            await client.post(full)

    with pytest.raises(package.ConnectTimeout) as caught:
        run(main)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 2) == (record.reason, record.attempts)


def test_error_that_was_being_handled_is_not_ours(refused: str) -> None:
    """A call made while the user deals with a certificate is not taken for one that failed so."""
    with httpx.Client(transport=RetryTransport()) as client:
        try:
            raise ssl.SSLCertVerificationError
        except ssl.SSLError:
            with pytest.raises(httpx.ConnectError) as caught:
                client.get(refused)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert 4 == record.attempts


# --- the transport inside -------------------------------------------------------------------------


@PACKAGES
@pytest.mark.parametrize(
    ("transport", "wrong", "says"),
    [
        (RetryTransport, lambda p: p.AsyncHTTPTransport(), r"must be HTTPTransport\(\)"),
        (AsyncRetryTransport, lambda p: p.HTTPTransport(), r"must be AsyncHTTPTransport\(\)"),
        (RetryTransport, lambda p: p.Client(), r"must be HTTPTransport\(\)"),
        (RetryTransport, lambda p: p.HTTPTransport, r"must be HTTPTransport\(\)"),
        (RetryTransport, lambda p: p.HTTPTransport(retries=3), "two layers multiply"),
        (AsyncRetryTransport, lambda p: p.AsyncHTTPTransport(retries=3), "two layers multiply"),
        (RetryTransport, lambda p: RetryTransport(p.HTTPTransport()), "two layers multiply"),
    ],
    ids=["async", "sync", "client", "class", "retries", "async retries", "twice"],
)
def test_wrong_transport(package: Any, transport: Any, wrong: Any, says: str) -> None:
    """What cannot send, or would send again, is refused when the transport is made."""
    with pytest.raises(tarry.ConfigurationError, match=says):
        transport(wrong(package))


def test_transport_of_the_other_package() -> None:
    """With both packages there, the error says which transport the client needs."""
    client = httpx2.Client(transport=RetryTransport())
    with client, pytest.raises(tarry.ConfigurationError, match=r"httpx2\.HTTPTransport\(\)"):
        client.get("http://example.test")


def test_assertion_of_another_is_left_alone() -> None:
    """Only what comes of mixing two packages is explained."""

    def fail(_: object) -> httpx.Response:
        raise AssertionError

    client = httpx.Client(transport=RetryTransport(httpx.MockTransport(fail)))
    with client, pytest.raises(AssertionError):
        client.get("http://example.test")


@pytest.mark.parametrize(
    ("client", "transport"),
    [(httpx.Client, AsyncRetryTransport), (httpx.AsyncClient, RetryTransport)],
)
def test_transport_in_the_wrong_client(client: Any, transport: Any) -> None:
    """The error says which of the two belongs where."""

    async def main() -> None:
        opened = client(transport=transport())
        answer = opened.get("http://example.test")
        await answer  # the other one has raised by now

    with pytest.raises(tarry.ConfigurationError, match="a Client takes a RetryTransport"):
        asyncio.run(main())


def test_transport_in_the_wrong_block() -> None:
    """So it does where the client is entered."""
    with pytest.raises(tarry.ConfigurationError, match="a Client takes a RetryTransport"):
        httpx.Client(transport=AsyncRetryTransport()).__enter__()  # type: ignore[arg-type]
