"""Behaviour specific to httpx and httpx2: types, trio, bodies, timeouts and errors."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest
import trio

import tarry
from tarry import Hedging, Policy, Reason
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")

PACKAGES = pytest.mark.parametrize("package", [httpx, httpx2], ids=lambda package: package.__name__)


def test_transports_work_in_both_packages(server: FlakyServerView) -> None:
    """The transports work in the clients of httpx and httpx2; mypy checks the types here."""
    with httpx.Client(transport=RetryTransport()) as client:
        assert 200 == client.get(server.url("503,200")).status_code
    with httpx2.Client(transport=RetryTransport(httpx2.HTTPTransport())) as client2:
        assert 200 == client2.get(server.url("200")).status_code

    async def main() -> None:
        async with httpx.AsyncClient(transport=AsyncRetryTransport()) as client:
            assert 200 == (await client.get(server.url("200"))).status_code
        async with httpx2.AsyncClient(
            transport=AsyncRetryTransport(httpx2.AsyncHTTPTransport())
        ) as client2:
            assert 200 == (await client2.get(server.url("200"))).status_code

    asyncio.run(main())


def test_retries_on_trio(server: FlakyServerView) -> None:
    """The async transport retries on trio."""

    async def main() -> int:
        async with httpx.AsyncClient(transport=AsyncRetryTransport()) as client:
            return (await client.get(server.url("503,drop,200"))).status_code

    assert 200 == trio.run(main)


def test_hedges_on_trio(server: FlakyServerView) -> None:
    """The async transport hedges on trio, and the losing copy is cancelled."""

    async def main() -> str:
        transport = AsyncRetryTransport(hedging=Hedging(after=0))
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.get(server.url("hang,200"))).text

    assert "answer 2" == trio.run(main)


# --- bodies ---------------------------------------------------------------------------------------


@PACKAGES
def test_response_is_streamed(server: FlakyServerView, package: Any) -> None:
    """The first half of a response can be read before the server sends the second half."""
    transport = RetryTransport(package.HTTPTransport())
    with (
        package.Client(transport=transport) as client,
        client.stream("GET", server.url("503,stream")) as response,
    ):
        chunks = response.iter_bytes()
        first = next(chunks)
        server.resume()
        rest = b"".join(chunks)

    assert (b"first", b"later") == (first, rest)


@PACKAGES
def test_response_is_streamed_async(server: FlakyServerView, package: Any) -> None:
    """With the async client, too, the first half can be read before the second half is sent."""

    async def main() -> tuple[bytes, bytes]:
        transport = AsyncRetryTransport(package.AsyncHTTPTransport())
        async with (
            package.AsyncClient(transport=transport) as client,
            client.stream("GET", server.url("503,stream")) as response,
        ):
            chunks = response.aiter_bytes()
            first = await anext(chunks)
            server.resume()
            return first, b"".join([chunk async for chunk in chunks])

    assert (b"first", b"later") == asyncio.run(main())


class UnseekableFile:
    """A file that cannot be rewound."""

    def __init__(self) -> None:
        self._chunks = [b"report", b""]

    def read(self, _: int = -1) -> bytes:
        """Return the content the first time, then an empty string."""
        return self._chunks.pop(0)


@PACKAGES
@pytest.mark.parametrize(
    ("make_file", "request_count"),
    [(lambda: b"report", 3), (lambda: io.BytesIO(b"report"), 3), (UnseekableFile, 1)],
    ids=["bytes", "file", "unseekable file"],
)
def test_form_is_resent_if_its_file_can_be_rewound(
    server: FlakyServerView, package: Any, make_file: Callable[[], Any], request_count: int
) -> None:
    """A form is resent completely; one with a file that cannot be rewound is sent once."""
    transport = RetryTransport(package.HTTPTransport())
    with package.Client(transport=transport) as client:
        client.put(server.url("503,503,200"), data={"a": "b"}, files={"report": make_file()})

    assert [True] * request_count == [
        b"report\r\n" in request.body for request in server.received_requests
    ]


@PACKAGES
@pytest.mark.parametrize(
    ("make_file", "request_count"),
    [(lambda: b"report", 2), (lambda: io.BytesIO(b"report"), 1)],
    ids=["bytes", "file"],
)
def test_form_with_a_file_is_not_hedged(
    server: FlakyServerView, package: Any, make_file: Callable[[], Any], request_count: int
) -> None:
    """A form with a file is sent once, because two copies cannot read the file in parallel."""
    transport = RetryTransport(package.HTTPTransport(), hedging=Hedging(after=3600))
    with package.Client(transport=transport) as client:
        client.put(server.url("503,200"), data={"a": "b"}, files={"report": make_file()})

    assert [True] * request_count == [
        b"report\r\n" in request.body for request in server.received_requests
    ]


# --- requests and errors of attempts --------------------------------------------------------------


@PACKAGES
@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(None, (1.8, 2.0)), (5.0, (1.8, 2.0)), (1.0, (1.0, 1.0))],
    ids=["no timeout", "longer timeout", "shorter timeout"],
)
def test_timeouts_are_limited(
    package: Any, timeout: float | None, expected: tuple[float, float]
) -> None:
    """Every timeout of httpx is limited by the attempt timeout; connecting gets 90% of it."""
    timeouts: list[dict[str, float]] = []

    def respond(request: Any) -> Any:
        timeouts.append(request.extensions["timeout"])
        return package.Response(200)

    transport = RetryTransport(package.MockTransport(respond), policy=Policy(attempt_timeout=2))
    with package.Client(transport=transport, timeout=timeout) as client:
        client.get("http://example.test")

    connect, read = expected
    assert [{"connect": connect, "pool": connect, "read": read, "write": read}] == timeouts


@PACKAGES
def test_user_request_is_not_changed(package: Any) -> None:
    """The headers of an attempt are set on a copy of the request."""
    seen: list[Any] = []

    def respond(request: Any) -> Any:
        seen.append(request)
        return package.Response(200 if len(seen) > 1 else 503)

    transport = RetryTransport(package.MockTransport(respond), policy=Policy(attempt_timeout=2))
    with package.Client(transport=transport) as client, tarry.deadline(60):
        request = client.build_request("GET", "http://example.test")
        before = dict(request.headers), dict(request.extensions)
        response = client.send(request)

    assert before == (dict(request.headers), dict(request.extensions))
    assert request is response.request
    assert [None, "2"] == [sent.headers.get("X-Retry-Attempt") for sent in seen]


@PACKAGES
def test_redirected_request_has_no_attempt_number(server: FlakyServerView, package: Any) -> None:
    """A redirect resets the attempt number: the new request has no attempt header."""
    target = server.url("200").replace("&", "%26")
    first = server.url(f"503,307:location={target}", run_suffix="-first")
    transport = RetryTransport(package.HTTPTransport())
    with package.Client(transport=transport, follow_redirects=True) as client:
        assert 200 == client.get(first).status_code

    assert [None] == server.header_values("X-Retry-Attempt")


@PACKAGES
@pytest.mark.parametrize(
    "error_name", ["UnsupportedProtocol", "LocalProtocolError", "DecodingError", "TooManyRedirects"]
)
def test_permanent_errors_are_not_retried(package: Any, error_name: str) -> None:
    """An error that another attempt would raise too is not retried."""

    def fail(_: object) -> None:
        raise getattr(package, error_name)("no")

    with (
        package.Client(transport=RetryTransport(package.MockTransport(fail))) as client,
        pytest.raises(getattr(package, error_name)) as caught,
    ):
        client.get("http://example.test")

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.PERMANENT, 1) == (record.reason, record.attempts)


@PACKAGES
@pytest.mark.parametrize("error_name", ["ConnectError", "ConnectTimeout", "PoolTimeout"])
def test_post_is_retried_if_connecting_fails(package: Any, error_name: str) -> None:
    """If no connection was made, nothing was sent, so even a POST is retried."""
    attempts = 0

    def fail(_: object) -> None:
        nonlocal attempts
        attempts += 1
        raise getattr(package, error_name)("no")

    with (
        package.Client(transport=RetryTransport(package.MockTransport(fail))) as client,
        pytest.raises(getattr(package, error_name)),
    ):
        client.post("http://example.test")

    assert 4 == attempts


def test_call_continues_if_draining_fails() -> None:
    """A call makes its next attempt even if draining the failed response raises an error."""

    class BrokenStream(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            raise httpx.ReadError("gone")

    responses = iter(
        [
            httpx.Response(503, headers={"content-length": "5"}, stream=BrokenStream()),
            httpx.Response(200),
        ]
    )
    inner = httpx.MockTransport(lambda _: next(responses))
    with httpx.Client(transport=RetryTransport(inner)) as client:
        assert 200 == client.get("http://example.test").status_code
