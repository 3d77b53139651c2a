"""Invalid bytes and endless requests to a running service. Nothing is stored, and other clients are
served.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.tenants import Tenants, two_tenants

HEAD = (
    b"POST /retry-tasks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\n"
    b"Content-Type: application/json\r\n"
)
GOOD = b'{"targetUrl": "https://example.com/"}'
SIZED = b"Content-Length: %d\r\n\r\n" % len(GOOD)
MEGABYTE = b"x" * 1_048_576


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Run a service with two tenants."""
    with two_tenants(tmp_path_factory.mktemp("service")) as both:
        yield both


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bytes", (b"\x00\xff\xfe\r\n\r\n",)),
        ("tls", (bytes.fromhex("1603010200010001fc0303"), b"\0" * 600)),
        ("bare line feed", (HEAD[:-1].replace(b"\r\n", b"\n"), b"\n", SIZED, GOOD)),
        ("null in a header", (HEAD, b"X-A: a\0b\r\n", SIZED, GOOD)),
        ("blank before the colon", (HEAD, b"X-A : a\r\n", SIZED, GOOD)),
        ("two lengths", (HEAD, b"Content-Length: 5\r\n", SIZED, GOOD)),
        ("length and chunks", (HEAD, b"Transfer-Encoding: chunked\r\n", SIZED, GOOD)),
        ("bad chunk", (HEAD, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", GOOD)),
        ("bad encoding", (HEAD, b"Transfer-Encoding: sideways\r\n\r\n", GOOD)),
        ("bad length", (HEAD, b"Content-Length: -5\r\n\r\n", GOOD)),
        ("bad version", (HEAD.replace(b"/1.1", b"/9.9"), SIZED, GOOD)),
    ],
)
def test_invalid_bytes_are_400(callers: Tenants, name: str, parts: tuple[bytes, ...]) -> None:
    """The connection is closed, so that no second request can be smuggled in."""
    with callers.check_nothing_stored():
        answer = callers.raw(*parts)
    assert answer.startswith(b"HTTP/1.1 400 "), name
    assert b'"type": "/docs#problem-not-http"' in answer
    assert 1 == answer.count(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (431, (HEAD, b"X-Long: ", *[MEGABYTE] * 20)),
        (431, (HEAD, *[b"X-Line: value\r\n" * 70_000] * 20)),
        (431, (b"GET /", *[MEGABYTE] * 20)),
        (431, (HEAD, b"X-Long: ", b"x" * 70_000, b"\r\n", SIZED, GOOD)),
        (431, (HEAD + b"X-Long: " + b"x" * 70_000 + b"\r\n" + SIZED + GOOD,)),
        (413, (HEAD, b"Content-Length: 10485761\r\n\r\n")),
        (413, (HEAD, b"Content-Length: 99999999999999999\r\n\r\n")),
        (
            413,
            (
                HEAD,
                b"Transfer-Encoding: chunked\r\n\r\n",
                *[b"100000\r\n" + MEGABYTE + b"\r\n"] * 20,
            ),
        ),
        (431, (HEAD, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X-A: b\r\n" * 150_000] * 20)),
    ],
)
def test_endless_requests_are_rejected(
    callers: Tenants, status: int, parts: tuple[bytes, ...]
) -> None:
    """Headers, trailers and bodies are limited; the problem names the limit."""
    with callers.check_nothing_stored():
        answer = callers.raw(*parts)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"application/problem+json" in answer
    kind = {413: b"too-large", 431: b"headers-too-large"}[status]
    assert b'"type": "/docs#problem-%b"' % kind in answer


def test_idle_connections_do_not_block_other_clients(callers: Tenants) -> None:
    """Hundreds of connections with half a request each."""
    with callers.check_nothing_stored(), ExitStack() as open_ones:
        for n in range(300):
            wire = socket.create_connection(("127.0.0.1", callers.running.port), 30)
            open_ones.enter_context(wire)
            wire.sendall((b"", HEAD[:40], HEAD, HEAD + SIZED + GOOD[:5])[n % 4])
        assert 200 == callers.ask("ann", "GET", "/retry-tasks").status
