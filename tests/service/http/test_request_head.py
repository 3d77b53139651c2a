"""Requests with the same head as an earlier request of their connection, which are not parsed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.service.http import protocol
from tarry.service.http.request_head import RequestHead
from tests.service.http.harness import CHUNKED, GET, HEAD, POST, FastRoute

LONGER = HEAD + b"Content-Length: 11\r\n\r\nhello again"
EMPTY = HEAD + b"Content-Length: 0\r\n\r\n"
LOWER_CASE = POST.replace(b"Content-Length", b"content-length")
LENGTH_FIRST = b"POST /hot HTTP/1.1\r\nContent-Length:5\r\nHost: h\r\n\r\nhello"
FIRST_REQUESTS = {
    "usual": POST,
    "lower case": LOWER_CASE,
    "length first": LENGTH_FIRST,
    "no space": POST.replace(b"Length: 5", b"Length:5"),
    "blanks before the length": POST.replace(b"Length: 5", b"Length: \t 5"),
    "blank after the length": POST.replace(b"Length: 5", b"Length: 5 "),
    "leading zero": POST.replace(b"Length: 5", b"Length: 05"),
    "bytes before": b"\r\n" + POST,
    "bytes after": POST + b"\r\n",
    "pipelined": POST + POST,
    "chunked": CHUNKED,
    "upgrade": POST.replace(b"X-A: 1", b"Connection: Upgrade\r\nUpgrade: h2c"),
    "repeated header": POST.replace(b"X-A: 1", b"X-A: 1\r\nX-A: 2"),
    "folded header": POST.replace(b"X-A: 1", b"X-A: 1\r\n 2"),
    "line feeds": POST.replace(b"\r\n", b"\n"),
    "length in a header": POST.replace(b"X-A: 1", b"X-A: content-length: 5"),
    "longer": LONGER,
    "empty": EMPTY,
}
NEXT_REQUESTS = {
    **FIRST_REQUESTS,
    "longer, then another": LONGER + POST,
    "too short": LONGER[:-1],
    "too long": LONGER + b"!",
    "no length": HEAD + b"Content-Length: \r\n\r\nhello",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\nhello",
    "signed length": HEAD + b"Content-Length: +5\r\n\r\nhello",
    "underscore": HEAD + b"Content-Length: 1_1\r\n\r\nhello again",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list of lengths": HEAD + b"Content-Length: 5, 5\r\n\r\nhello",
    "huge length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "length and coding": CHUNKED.replace(b"X-A: 1", b"Content-Length: 5"),
    "head in two lines": HEAD + b"Content-Length: 5\r\nX-B: 1\r\n\r\nhello",
    "only a part of the head": HEAD,
    "other value": POST.replace(b"X-A: 1", b"X-A: 2"),
    "other host": POST.replace(b"Host: h", b"Host: g"),
    "no host": POST.replace(b"Host: h\r\n", b""),
    "invalid host": POST.replace(b"Host: h", b"Host: a b"),
    "close": POST.replace(b"X-A: 1", b"Connection: close"),
    "GET": GET,
}


async def serve(requests: list[bytes]) -> tuple[list[Any], list[bytes], bytes, bool]:
    """Return what the fast route and uvicorn got, what was written, and whether it is closed."""
    route = FastRoute()
    for request in requests:
        route.receive(request)
        await asyncio.sleep(0)
        while route.responders:
            route.respond()
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    fast = [
        (sorted(scope["headers"]), scope["path"], scope["method"], body)
        for scope, body in route.requests
    ]
    is_closed = route.connection.transport.is_closed
    for task in tuple(route.connection.state.tasks):
        task.cancel()
    return fast, route.bodies, route.written, is_closed


@pytest.mark.parametrize("first", FIRST_REQUESTS.values(), ids=FIRST_REQUESTS)
@pytest.mark.parametrize("second", NEXT_REQUESTS.values(), ids=NEXT_REQUESTS)
async def test_results_are_those_of_the_parser(
    monkeypatch: pytest.MonkeyPatch, first: bytes, second: bytes
) -> None:
    """Any sequence of requests has the same results as if each request was parsed."""
    requests = [first, second, first, second, second[:30], second[30:]]
    results = await serve(requests)
    monkeypatch.setattr(protocol.ServiceHttpProtocol, "_head_captures_left", 0)
    assert await serve(requests) == results


@pytest.mark.parametrize("cut", range(1, len(POST)))
async def test_head_of_a_split_request_is_not_kept_in_part(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The rest of a request that began in an earlier read is not taken for a whole head."""
    requests = [POST[:cut], POST[cut:], POST[cut:]]
    results = await serve(requests)
    monkeypatch.setattr(protocol.ServiceHttpProtocol, "_head_captures_left", 0)
    assert await serve(requests) == results


UPGRADES = b"Connection: Upgrade\r\n" + 2 * b"Upgrade: h2c\r\n"
SECOND_READS = {
    "an upgrade": UPGRADES.replace(b"Upgrade: h2c\r\n", b"", 1),
    "two upgrades": UPGRADES,
    "a folded header": b"X-B: 1\r\n 2\r\n",
}


@pytest.mark.parametrize("lines", SECOND_READS.values(), ids=SECOND_READS)
@pytest.mark.parametrize("host", [b"", b"Host: h\r\n"], ids=["no host", "host"])
@pytest.mark.parametrize("secret", [b"", b"Authorization: Bearer S\r\n"], ids=["no key", "key"])
async def test_head_has_no_headers_of_an_earlier_read(
    monkeypatch: pytest.MonkeyPatch, lines: bytes, host: bytes, secret: bytes
) -> None:
    """Headers that arrived before the last read of a request are not those of the next request."""
    begin = b"POST /hot HTTP/1.1\r\n" + secret + host + b"X-A: "
    rest = b"POST /hot HTTP/1.1\r\n" + lines + b"Host: h\r\nContent-Length: 5\r\n\r\nhello"
    rest = rest.replace(b"Host: h\r\n", b"") if host else rest
    requests = [begin, rest, rest]
    results = await serve(requests)
    monkeypatch.setattr(protocol.ServiceHttpProtocol, "_head_captures_left", 0)
    assert await serve(requests) == results


@pytest.mark.parametrize("first", [POST, LOWER_CASE, LENGTH_FIRST, EMPTY], ids=range(4))
async def test_repeated_head_is_not_parsed(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """After one request, others that differ in length and body only are served without parsing."""
    route = FastRoute()
    route.receive(first)
    route.respond()
    monkeypatch.setattr(route.connection.protocol, "_parse_and_serve", None)
    head = first.partition(b"\r\n\r\n")[0]
    for body in (b"", b"hello", b"hello again"):
        length = b"%d" % len(body)
        route.receive(head.replace(b"5", length).replace(b"0", length) + b"\r\n\r\n" + body)
        route.respond()
        scope, received = route.requests[-1]
        assert (body, length) == (received, dict(scope["headers"])[b"content-length"])
    assert 4 == route.connection.state.total_requests


async def test_repeated_head_waits_for_the_response_to_the_previous_request() -> None:
    """A request that arrives before the previous response is pipelined as usual."""
    route = FastRoute()
    for _ in range(2):
        route.receive(POST)
    route.receive(LONGER)
    assert 1 == len(route.requests)
    route.respond()
    await route.connection.wait_until_served()
    assert [b"hello", b"hello again"] == route.bodies


def test_large_heads_are_not_kept() -> None:
    """A connection keeps a head of at most 2 kB."""
    headers = [(b"host", b"h"), (b"x", b"y" * 2_048), (b"content-length", b"5")]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    data = b"POST /hot HTTP/1.1\r\n%b\r\nhello" % lines
    assert RequestHead.from_request(data, b"hello", b"/hot", headers, dict(headers)) is None
    headers[1] = (b"x", b"y" * 1_900)
    data = data.replace(b"y" * 2_048, b"y" * 1_900)
    assert RequestHead.from_request(data, b"hello", b"/hot", headers, dict(headers)) is not None
