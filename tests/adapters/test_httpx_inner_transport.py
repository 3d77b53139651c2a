"""The inner transport of httpx and httpx2: its connections, and invalid ones."""

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
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")

PACKAGES = pytest.mark.parametrize("package", [httpx, httpx2], ids=lambda package: package.__name__)


# --- connections ----------------------------------------------------------------------------------


@PACKAGES
def test_transport_can_be_patched_later(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that tests or tracers replace later are called."""

    def response(_self: object, _request: object) -> Any:
        return package.Response(200, text="patched")

    async def aanswer(_self: object, _request: object) -> Any:
        return package.Response(200, text="patched")

    client = package.Client(transport=RetryTransport(package.HTTPTransport()))
    aclient = package.AsyncClient(transport=AsyncRetryTransport(package.AsyncHTTPTransport()))
    monkeypatch.setattr(package.HTTPTransport, "handle_request", response)
    monkeypatch.setattr(package.AsyncHTTPTransport, "handle_async_request", aanswer)

    async def main() -> str:
        return str((await aclient.get("http://127.0.0.1:9/")).text)

    assert "patched" == client.get("http://127.0.0.1:9/").text == asyncio.run(main())


def test_exhausted_pool_is_no_server_failure(server: FlakyServerView) -> None:
    """A call that finds no free connection is retried, but the breaker does not count it."""
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
def full_server_url() -> Iterator[str]:
    """Return the URL of a server whose backlog of connections is full."""
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
def test_connect_timeout_of_an_attempt(package: Any, full_server_url: str, run: Any) -> None:
    """The attempt timeout does not hide that nothing was sent, so a POST is retried."""
    policy = Policy(attempt_timeout=0.5, max_attempts=2)

    async def main() -> None:
        transport = AsyncRetryTransport(package.AsyncHTTPTransport(), policy=policy)
        async with package.AsyncClient(transport=transport, timeout=None) as client:
            await client.post(full_server_url)

    with pytest.raises(package.ConnectTimeout) as caught:
        run(main)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 2) == (record.reason, record.attempts)


def test_unrelated_error_being_handled(unreachable_url: str) -> None:
    """A call made while the user handles a certificate error is not classified as one."""
    with httpx.Client(transport=RetryTransport()) as client:
        try:
            raise ssl.SSLCertVerificationError
        except ssl.SSLError:
            with pytest.raises(httpx.ConnectError) as caught:
                client.get(unreachable_url)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert 4 == record.attempts


# --- the inner transport --------------------------------------------------------------------------


@PACKAGES
@pytest.mark.parametrize(
    ("transport", "argument", "message"),
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
def test_invalid_transport_raises(
    package: Any, transport: Any, argument: Any, message: str
) -> None:
    """A transport that cannot send, or that retries, raises."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        transport(argument(package))


def test_transport_of_the_other_package() -> None:
    """The error names the transport that the client needs."""
    client = httpx2.Client(transport=RetryTransport())
    with client, pytest.raises(tarry.ConfigurationError, match=r"httpx2\.HTTPTransport\(\)"):
        client.get("http://example.test")


def test_other_assertion_errors_are_not_changed() -> None:
    """Only errors from mixing the two packages are explained."""

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
    """The error names the transport for each client."""

    async def main() -> None:
        opened = client(transport=transport())
        response = opened.get("http://example.test")
        await response  # the other one has raised by now

    with pytest.raises(tarry.ConfigurationError, match="a Client takes a RetryTransport"):
        asyncio.run(main())


def test_transport_in_the_wrong_client_entered() -> None:
    """The same when the client is entered."""
    with pytest.raises(tarry.ConfigurationError, match="a Client takes a RetryTransport"):
        httpx.Client(transport=AsyncRetryTransport()).__enter__()  # type: ignore[arg-type]
