"""Invalid bytes and endless requests to a running service."""

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
TASK = b'{"targetUrl": "https://example.com/"}'
CONTENT_LENGTH = b"Content-Length: %d\r\n\r\n" % len(TASK)
MEGABYTE = b"x" * 1_048_576


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Run a service with two tenants."""
    with two_tenants(tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bytes", (b"\x00\xff\xfe\r\n\r\n",)),
        ("tls", (bytes.fromhex("1603010200010001fc0303"), b"\0" * 600)),
        ("bare line feed", (HEAD[:-1].replace(b"\r\n", b"\n"), b"\n", CONTENT_LENGTH, TASK)),
        ("null in a header", (HEAD, b"X-A: a\0b\r\n", CONTENT_LENGTH, TASK)),
        ("blank before the colon", (HEAD, b"X-A : a\r\n", CONTENT_LENGTH, TASK)),
        ("two lengths", (HEAD, b"Content-Length: 5\r\n", CONTENT_LENGTH, TASK)),
        ("length and chunks", (HEAD, b"Transfer-Encoding: chunked\r\n", CONTENT_LENGTH, TASK)),
        ("bad chunk", (HEAD, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", TASK)),
        ("bad encoding", (HEAD, b"Transfer-Encoding: sideways\r\n\r\n", TASK)),
        ("bad length", (HEAD, b"Content-Length: -5\r\n\r\n", TASK)),
        ("bad version", (HEAD.replace(b"/1.1", b"/9.9"), CONTENT_LENGTH, TASK)),
    ],
)
def test_invalid_bytes_are_400(tenants: Tenants, name: str, parts: tuple[bytes, ...]) -> None:
    """The connection is closed after one response, which prevents request smuggling."""
    with tenants.check_nothing_stored():
        response = tenants.send_raw(*parts)
    assert response.startswith(b"HTTP/1.1 400 "), name
    assert b'"type": "/docs#problem-not-http"' in response
    assert 1 == response.count(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (431, (HEAD, b"X-Long: ", *[MEGABYTE] * 20)),
        (431, (HEAD, *[b"X-Line: value\r\n" * 70_000] * 20)),
        (431, (b"GET /", *[MEGABYTE] * 20)),
        (431, (HEAD, b"X-Long: ", b"x" * 70_000, b"\r\n", CONTENT_LENGTH, TASK)),
        (431, (HEAD + b"X-Long: " + b"x" * 70_000 + b"\r\n" + CONTENT_LENGTH + TASK,)),
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
    tenants: Tenants, status: int, parts: tuple[bytes, ...]
) -> None:
    """Headers, trailers and bodies are limited; the problem type depends on the limit."""
    with tenants.check_nothing_stored():
        response = tenants.send_raw(*parts)
    assert response.startswith(b"HTTP/1.1 %d " % status), response[:200]
    assert b"application/problem+json" in response
    problem_type = {413: b"too-large", 431: b"headers-too-large"}[status]
    assert b'"type": "/docs#problem-%b"' % problem_type in response


def test_idle_connections_do_not_block_other_clients(tenants: Tenants) -> None:
    """A request is served while 300 connections with incomplete requests are open."""
    with tenants.check_nothing_stored(), ExitStack() as connections:
        for n in range(300):
            connection = socket.create_connection(("127.0.0.1", tenants.service.port), 30)
            connections.enter_context(connection)
            connection.sendall((b"", HEAD[:40], HEAD, HEAD + CONTENT_LENGTH + TASK[:5])[n % 4])
        assert 200 == tenants.request("ann", "GET", "/retry-tasks").status


def test_an_upgrade_is_ignored(tenants: Tenants) -> None:
    """The request of `curl --http2` is handled in HTTP/1.1, and so is the next one."""
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    last = HEAD + b"Connection: close\r\n" + CONTENT_LENGTH + TASK
    before = len(tenants.request("ann", "GET", "/retry-tasks").body["items"])
    response = tenants.send_raw(HEAD + upgrade, CONTENT_LENGTH + TASK, last)
    assert 2 == response.count(b"HTTP/1.1 ") == response.count(b"HTTP/1.1 201 ")
    assert before + 2 == len(tenants.request("ann", "GET", "/retry-tasks").body["items"])


def test_invalid_bytes_do_not_replace_the_response_of_a_task(tenants: Tenants) -> None:
    """A stored task is answered with 201, although invalid bytes follow in the same packet."""
    before = len(tenants.request("ann", "GET", "/retry-tasks").body["items"])
    response = tenants.send_raw(HEAD + CONTENT_LENGTH + TASK + b"nonsense\r\n\r\n")
    assert [b"201", b"400"] == [part[:3] for part in response.split(b"HTTP/1.1 ")[1:]]
    assert before + 1 == len(tenants.request("ann", "GET", "/retry-tasks").body["items"])


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (400, HEAD.replace(b"Host: x\r\n", b"") + CONTENT_LENGTH + TASK),
        (400, HEAD + b"Host: y\r\n" + CONTENT_LENGTH + TASK),
        (400, HEAD + b"Authorization: Bearer x\r\nConnection: close\r\n" + CONTENT_LENGTH + TASK),
        (431, HEAD + b"a:\r\n" * 16_000 + CONTENT_LENGTH + TASK),
        (501, HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n%x\r\n" % len(TASK) + TASK),
        (505, HEAD.replace(b"HTTP/1.1", b"HTTP/2.0") + CONTENT_LENGTH + TASK),
        (
            401,
            HEAD.replace(b"Authorization: Bearer KEY", b"Connection: close")
            + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(TASK), TASK)
            + b"0\r\nAuthorization: Bearer KEY\r\n\r\n",
        ),
    ],
)
def test_ambiguous_requests_are_rejected(tenants: Tenants, status: int, request_: bytes) -> None:
    """A proxy could read such a request differently. Nothing is stored."""
    with tenants.check_nothing_stored():
        response = tenants.send_raw(request_)
    assert response.startswith(b"HTTP/1.1 %d " % status), response[:200]
