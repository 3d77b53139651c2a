"""The inner transport of httpx and httpx2: connection errors and invalid transports."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
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
async def test_patched_transport_is_called(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transport methods that a test or a tracer patches after creation are called."""

    def handle_request(_self: object, _request: object) -> Any:
        return package.Response(200, text="patched")

    async def handle_async_request(_self: object, _request: object) -> Any:
        return package.Response(200, text="patched")

    client = package.Client(transport=RetryTransport(package.HTTPTransport()))
    async_client = package.AsyncClient(transport=AsyncRetryTransport(package.AsyncHTTPTransport()))
    monkeypatch.setattr(package.HTTPTransport, "handle_request", handle_request)
    monkeypatch.setattr(package.AsyncHTTPTransport, "handle_async_request", handle_async_request)

    assert (
        "patched"
        == client.get("http://127.0.0.1:9/").text
        == (str((await async_client.get("http://127.0.0.1:9/")).text))
    )


def test_exhausted_pool_does_not_open_the_breaker(server: FlakyServerView) -> None:
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
def full_backlog_url() -> Iterator[str]:
    """Return the URL of a server whose connection backlog is full, so that connecting hangs."""
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
def test_attempt_timeout_while_connecting(
    package: Any, full_backlog_url: str, unreachable_url: str, run: Any
) -> None:
    """If the attempt timeout ends the connecting phase, nothing was sent, so a POST is retried."""
    policy = Policy(attempt_timeout=0.5, max_attempts=2)

    async def main() -> None:
        transport = AsyncRetryTransport(package.AsyncHTTPTransport(), policy=policy)
        async with package.AsyncClient(transport=transport, timeout=None) as client:
            with suppress(package.ConnectError):
                await client.post(unreachable_url)  # imports modules, which may take longer
            await client.post(full_backlog_url)

    with pytest.raises(package.ConnectTimeout) as caught:
        run(main)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 2) == (record.reason, record.attempts)


def test_error_that_the_caller_handles_is_ignored(unreachable_url: str) -> None:
    """An error that the caller handles during the call does not affect the classification."""
    with httpx.Client(transport=RetryTransport()) as client:
        try:
            raise ssl.SSLCertVerificationError
        except ssl.SSLError:
            with pytest.raises(httpx.ConnectError) as caught:
                client.get(unreachable_url)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert 4 == record.attempts


# --- invalid transports ---------------------------------------------------------------------------


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
    ids=[
        "async transport",
        "sync transport",
        "client",
        "class",
        "retries",
        "async retries",
        "nested retry transport",
    ],
)
def test_invalid_transport_raises(
    package: Any, transport: Any, argument: Any, message: str
) -> None:
    """A transport that cannot send, or that retries, raises."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        transport(argument(package))


def test_default_transport_in_an_httpx2_client() -> None:
    """The default transport raises in an httpx2 client; the error names the transport to use."""
    client = httpx2.Client(transport=RetryTransport())
    with client, pytest.raises(tarry.ConfigurationError, match=r"httpx2\.HTTPTransport\(\)"):
        client.get("http://example.test")


def test_other_assertion_errors_are_not_changed() -> None:
    """An AssertionError that does not come from mixing httpx and httpx2 is raised unchanged."""

    def fail(_: object) -> httpx.Response:
        raise AssertionError

    client = httpx.Client(transport=RetryTransport(httpx.MockTransport(fail)))
    with client, pytest.raises(AssertionError):
        client.get("http://example.test")


@pytest.mark.parametrize(
    ("client", "transport"),
    [(httpx.Client, AsyncRetryTransport), (httpx.AsyncClient, RetryTransport)],
)
def test_request_with_the_transport_of_the_other_client(client: Any, transport: Any) -> None:
    """A request through a transport of the wrong type raises; the error names the right type."""

    async def main() -> None:
        wrong_client = client(transport=transport())
        response = wrong_client.get("http://example.test")  # the sync client raises here
        await response

    with pytest.raises(tarry.ConfigurationError, match="a Client takes a RetryTransport"):
        asyncio.run(main())


def test_entering_a_client_with_the_async_transport() -> None:
    """Entering a sync client with an async transport raises the same error."""
    with pytest.raises(tarry.ConfigurationError, match="a Client takes a RetryTransport"):
        httpx.Client(transport=AsyncRetryTransport()).__enter__()  # type: ignore[arg-type]
