"""Behaviour specific to httpx and httpx2: two transports, forms, extensions."""

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


def test_types_fit_both_clients(server: FlakyServerView) -> None:
    """Type checkers accept the transports for httpx and httpx2."""
    with httpx.Client(transport=RetryTransport()) as one:
        assert 200 == one.get(server.url("503,200")).status_code
    with httpx2.Client(transport=RetryTransport(httpx2.HTTPTransport())) as two:
        assert 200 == two.get(server.url("200")).status_code

    async def main() -> None:
        async with httpx.AsyncClient(transport=AsyncRetryTransport()) as three:
            assert 200 == (await three.get(server.url("200"))).status_code
        async with httpx2.AsyncClient(
            transport=AsyncRetryTransport(httpx2.AsyncHTTPTransport())
        ) as four:
            assert 200 == (await four.get(server.url("200"))).status_code

    asyncio.run(main())


def test_retries_on_trio(server: FlakyServerView) -> None:
    """The async transport works on trio."""

    async def main() -> int:
        async with httpx.AsyncClient(transport=AsyncRetryTransport()) as client:
            return (await client.get(server.url("503,drop,200"))).status_code

    assert 200 == trio.run(main)


def test_hedges_on_trio(server: FlakyServerView) -> None:
    """Hedging works on trio, and the loser is cancelled."""

    async def main() -> str:
        transport = AsyncRetryTransport(hedging=Hedging(after=0))
        async with httpx.AsyncClient(transport=transport) as client:
            return (await client.get(server.url("hang,200"))).text

    assert "answer 2" == trio.run(main)


# --- bodies ---------------------------------------------------------------------------------------


@PACKAGES
def test_response_is_streamed(server: FlakyServerView, package: Any) -> None:
    """The first half of a response is available before the server sends the second."""
    transport = RetryTransport(package.HTTPTransport())
    with (
        package.Client(transport=transport) as client,
        client.stream("GET", server.url("503,stream")) as response,
    ):
        pieces = response.iter_bytes()
        first = next(pieces)
        server.resume()
        rest = b"".join(pieces)

    assert (b"first", b"later") == (first, rest)


@PACKAGES
def test_response_is_streamed_async(server: FlakyServerView, package: Any) -> None:
    """The same for the async client."""

    async def main() -> tuple[bytes, bytes]:
        transport = AsyncRetryTransport(package.AsyncHTTPTransport())
        async with (
            package.AsyncClient(transport=transport) as client,
            client.stream("GET", server.url("503,stream")) as response,
        ):
            pieces = response.aiter_bytes()
            first = await anext(pieces)
            server.resume()
            return first, b"".join([piece async for piece in pieces])

    assert (b"first", b"later") == asyncio.run(main())


class UnseekableFile:
    """A file that cannot be rewound."""

    def __init__(self) -> None:
        self._rest = [b"report", b""]

    def read(self, _: int = -1) -> bytes:
        """Return the content, once."""
        return self._rest.pop(0)


@PACKAGES
@pytest.mark.parametrize(
    ("make", "arrive"),
    [(lambda: b"report", 3), (lambda: io.BytesIO(b"report"), 3), (UnseekableFile, 1)],
    ids=["bytes", "file", "file that cannot go back"],
)
def test_form_with_a_file(
    server: FlakyServerView, package: Any, make: Callable[[], Any], arrive: int
) -> None:
    """A form is sent again completely, unless one of its files cannot be rewound."""
    transport = RetryTransport(package.HTTPTransport())
    with package.Client(transport=transport) as client:
        client.put(server.url("503,503,200"), data={"a": "b"}, files={"report": make()})

    assert [True] * arrive == [b"report\r\n" in seen.body for seen in server.seen]


@PACKAGES
@pytest.mark.parametrize(
    ("make", "arrive"),
    [(lambda: b"report", 2), (lambda: io.BytesIO(b"report"), 1)],
    ids=["bytes", "file"],
)
def test_copies_of_a_form(
    server: FlakyServerView, package: Any, make: Callable[[], Any], arrive: int
) -> None:
    """Two copies cannot read one file in parallel, so a form with a file is sent once."""
    transport = RetryTransport(package.HTTPTransport(), hedging=Hedging(after=3600))
    with package.Client(transport=transport) as client:
        client.put(server.url("503,200"), data={"a": "b"}, files={"report": make()})

    assert [True] * arrive == [b"report\r\n" in seen.body for seen in server.seen]


# --- requests of an attempt -----------------------------------------------------------------------


@PACKAGES
@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, (1.8, 2.0)), (5.0, (1.8, 2.0)), (1.0, (1.0, 1.0))],
    ids=["no timeout", "a longer one", "a shorter one"],
)
def test_timeouts_are_limited(
    package: Any, given: float | None, expected: tuple[float, float]
) -> None:
    """No phase takes longer than the attempt, and connecting takes less."""
    seen: list[dict[str, float]] = []

    def answer(request: Any) -> Any:
        seen.append(request.extensions["timeout"])
        return package.Response(200)

    transport = RetryTransport(package.MockTransport(answer), policy=Policy(attempt_timeout=2))
    with package.Client(transport=transport, timeout=given) as client:
        client.get("http://example.test")

    connecting, sending = expected
    assert [{"connect": connecting, "pool": connecting, "read": sending, "write": sending}] == seen


@PACKAGES
def test_user_request_is_not_changed(package: Any) -> None:
    """The headers of an attempt are set on a copy of the request."""
    seen: list[Any] = []

    def answer(request: Any) -> Any:
        seen.append(request)
        return package.Response(200 if len(seen) > 1 else 503)

    transport = RetryTransport(package.MockTransport(answer), policy=Policy(attempt_timeout=2))
    with package.Client(transport=transport) as client, tarry.deadline(60):
        request = client.build_request("GET", "http://example.test")
        before = dict(request.headers), dict(request.extensions)
        response = client.send(request)

    assert before == (dict(request.headers), dict(request.extensions))
    assert request is response.request
    assert [None, "2"] == [one.headers.get("X-Retry-Attempt") for one in seen]


@PACKAGES
def test_redirect_resets_the_attempt_number(server: FlakyServerView, package: Any) -> None:
    """The headers of a redirected request do not contain the attempt number."""
    there = server.url("200").replace("&", "%26")
    first = server.url(f"503,307:location={there}", run="-first")
    transport = RetryTransport(package.HTTPTransport())
    with package.Client(transport=transport, follow_redirects=True) as client:
        assert 200 == client.get(first).status_code

    assert [None] == server.received("X-Retry-Attempt")


@PACKAGES
@pytest.mark.parametrize(
    "name", ["UnsupportedProtocol", "LocalProtocolError", "DecodingError", "TooManyRedirects"]
)
def test_invalid_request_is_permanent(package: Any, name: str) -> None:
    """An invalid request is not retried."""

    def fail(_: object) -> None:
        raise getattr(package, name)("no")

    with (
        package.Client(transport=RetryTransport(package.MockTransport(fail))) as client,
        pytest.raises(getattr(package, name)) as caught,
    ):
        client.get("http://example.test")

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.PERMANENT, 1) == (record.reason, record.attempts)


@PACKAGES
@pytest.mark.parametrize("name", ["ConnectError", "ConnectTimeout", "PoolTimeout"])
def test_connection_errors_are_retried(package: Any, name: str) -> None:
    """Without a connection, any method is retried."""
    attempts = 0

    def fail(_: object) -> None:
        nonlocal attempts
        attempts += 1
        raise getattr(package, name)("no")

    with (
        package.Client(transport=RetryTransport(package.MockTransport(fail))) as client,
        pytest.raises(getattr(package, name)),
    ):
        client.post("http://example.test")

    assert 4 == attempts


def test_error_while_draining(server: FlakyServerView) -> None:
    """If draining a response fails, the call goes on."""

    class Broken(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            raise httpx.ReadError("gone")

    responses = iter(
        [
            httpx.Response(503, headers={"content-length": "5"}, stream=Broken()),
            httpx.Response(200),
        ]
    )
    inner = httpx.MockTransport(lambda _: next(responses))
    with httpx.Client(transport=RetryTransport(inner)) as client:
        assert 200 == client.get("http://example.test").status_code
