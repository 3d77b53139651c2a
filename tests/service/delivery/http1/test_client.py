from __future__ import annotations

import asyncio
import os
import resource
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDelivery
from tarry.service.delivery.messages import DeliveryResult, Fault
from tarry.service.delivery.targets import parse_target
from tests.integration.hostile import Hostile
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    request,
    run,
    send,
    send_all,
    wait_for,
    wait_until_empty,
)

pytestmark = pytest.mark.usefixtures("either_loop")


def test_an_answer_comes_back_whole(hostile: Hostile) -> None:
    """Status, headers, body, where from and how long it took."""
    result = send(hostile.url + "ok")
    assert (200, b"ok", "127.0.0.1") == (result.status, result.excerpt, result.remote)
    assert [("content-length", "2")] == result.headers
    assert result.fault is None
    assert result.connect_ms is not None
    assert result.first_byte_ms is not None
    assert result.tls_ms is None
    assert 0 < result.connect_ms <= result.duration_ms


def test_a_request_goes_out_as_it_is(hostile: Hostile) -> None:
    """Our own headers are few: no content type is made up, no compression asked for."""
    headers = [("X-One", "1"), ("X-Empty", ""), ("X-Word", "grüß"), ("Content-Type", "a/b")]
    send(hostile.url + "ok?q=%2F..%2F", method="PUT", headers=headers, body=b"\x00\xff")
    seen = hostile.seen[-1]
    assert ("PUT", b"\x00\xff") == (seen.method, seen.body)
    assert seen.head.splitlines()[1:-1] == [
        f"Host: {hostile.url.split('/')[2]}",
        f"user-agent: tarry/{version('tarry')}",
        "accept: */*",
        "accept-encoding: identity",
        "X-One: 1",
        "X-Empty: ",
        "X-Word: grüß",
        "Content-Type: a/b",
        "Content-Length: 2",
    ]
    send(hostile.url + "ok", headers=[("user-agent", "mine/1")])
    head = hostile.seen[-1].head.lower()
    assert "user-agent: mine/1\r\n" in head
    assert "tarry/" not in head
    assert "content-type" not in head


def test_a_path_is_not_tidied_up(hostile: Hostile) -> None:
    """Its canonical form is what reaches the target: dots, slashes, escapes, odd percent signs."""
    target = parse_target(hostile.url + "x/..//%41%2e%zz/;a=b/ok?%e4=%&a[]=!'()*")
    send(target.url)
    assert target.path == hostile.seen[-1].path


@pytest.mark.parametrize("body", [b"", b"abc"])
@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "HEAD"]
)
def test_any_method_with_or_without_a_body(hostile: Hostile, method: str, body: bytes) -> None:
    """Also one after the other on one handle; only HEAD has no body."""
    result = run(
        send_all(
            HttpDelivery(LOOPBACK_GUARD),
            request(hostile.url + "ok"),
            request(hostile.url + "ok", method=method, body=body),
            request(hostile.url + "ok", method="GET", body=b""),
        )
    )
    if method == "HEAD" and body:
        assert (Fault.INVALID, "body must be empty") == (
            result[1].fault,
            (result[1].error or "")[:18],
        )
        return
    assert [200, 200, 200] == [each.status for each in result]
    before, seen, after = hostile.seen[-3:]
    assert ("POST", b"{}") == (before.method, before.body)
    assert (method, body) == (seen.method, seen.body)
    assert ("GET", b"", False) == (after.method, after.body, "content-length" in after.head.lower())


def test_connections_are_kept(hostile: Hostile) -> None:
    """The second request needs no look-up and no connection."""
    before = hostile.connections
    first, second = run(
        send_all(
            HttpDelivery(LOOPBACK_GUARD), request(hostile.url + "ok"), request(hostile.url + "ok")
        )
    )
    assert 1 == hostile.connections - before
    assert first.connect_ms is not None
    assert (None, None) == (second.dns_ms, second.connect_ms)


def test_a_large_body_is_sent_without_asking_first(hostile: Hostile) -> None:
    """No `Expect: 100-continue`, which costs a second with targets that do not know it."""
    body = bytes(2_000_000)
    assert 200 == send(hostile.url + "ok", body=body).status
    assert body == hostile.seen[-1].body
    assert "expect" not in hostile.seen[-1].head.lower()


def test_the_excerpt_is_bounded(hostile: Hostile) -> None:
    """It may be less than the answer, or nothing."""
    for most, excerpt, truncated in ((0, b"", True), (1, b"o", True), (2, b"ok", False)):
        result = send(hostile.url + "ok", max_excerpt=most)
        assert (excerpt, truncated) == (result.excerpt, result.truncated)


@pytest.mark.parametrize(
    "headers",
    [
        [("X-A", "1\r\nX-B: 2")],
        [("X-A", "1\nX-B: 2")],
        [("X-A", "1\0")],
        [("X-A: 1\r\nX-B", "2")],
        [("X-A:", "1")],
        [("X A", "1")],
        [("", "1")],
        [("Host", "other.example")],
        [("Content-Length", "5")],
        [("Transfer-Encoding", "chunked")],
        [("connection", "close")],
        [("X-A", "\ud800")],
    ],
)
def test_headers_that_would_break_out_are_not_sent(
    hostile: Hostile, headers: list[tuple[str, str]]
) -> None:
    """Line breaks, names that are no tokens, and headers that frame the request."""
    before = len(hostile.seen)
    result = send(hostile.url + "ok", headers=headers)
    assert (None, Fault.INVALID) == (result.status, result.fault)
    assert before == len(hostile.seen)


@pytest.mark.parametrize("method", ["", "GET /", "POST\r\n", "CONNECT", "trace"])
def test_a_bad_method_is_not_sent(hostile: Hostile, method: str) -> None:
    """Nor one that opens tunnels or sends everything back."""
    assert Fault.INVALID is send(hostile.url + "ok", method=method).fault


@pytest.mark.parametrize(
    "url",
    [
        "http://0177.0.0.1/",
        "http://127.1:1/",
        "http://2130706433/",
        "http://localhost:1@127.0.0.1:1/",
        "http://127.0.0.1:1/ HTTP/1.1",
        "http://127.0.0.1:1/\r\nX: y",
        "ftp://127.0.0.1:1/",
        "http://\ud800/",
    ],
)
def test_a_url_that_is_not_canonical_is_not_sent(url: str) -> None:
    """The same parser judges once more before a connection is made."""
    assert send(url).fault in {Fault.INVALID, Fault.PROTOCOL}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"])
def test_the_guard_judges_when_a_connection_is_made(hostile: Hostile, host: str) -> None:
    """Nothing reaches an address that is refused."""
    before = hostile.connections
    result = send(hostile.url.replace("127.0.0.1", host) + "ok", Guard())
    assert Fault.BLOCKED is result.fault
    assert "address" in (result.error or "")
    assert before == hostile.connections


def test_a_name_that_points_inside_is_refused(hostile: Hostile, dns: dict[str, list[str]]) -> None:
    """What counts is the address it resolves to; an allowed one among them is used."""
    url = hostile.url.replace("127.0.0.1", "rebound.example") + "ok"
    dns["rebound.example"] = ["127.0.0.1", "169.254.169.254"]
    assert Fault.BLOCKED is send(url, Guard()).fault
    assert 200 == send(url, Guard(["*.example"])).status
    dns["rebound.example"] = ["169.254.169.254", "127.0.0.1"]
    result = send(url)
    assert (200, "127.0.0.1") == (result.status, result.remote)
    assert result.dns_ms is not None


def test_nobody_there() -> None:
    """A name that does not exist and a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert Fault.REFUSED is send(f"http://127.0.0.1:{taken.getsockname()[1]}/").fault
    assert Fault.DNS is send("http://does-not-exist.invalid/").fault


def test_a_url_without_a_path_is_not_sent_to_a_server_that_is_known(hostile: Hostile) -> None:
    """Its last digit is no path, and the port without it no port it named."""

    async def main() -> list[DeliveryResult]:
        urls = hostile.url + "ok", hostile.url.strip("/") + "1", hostile.url.strip("/")
        return await send_all(HttpDelivery(LOOPBACK_GUARD), *map(request, urls))

    before = len(hostile.seen)
    assert [None, Fault.INVALID, Fault.INVALID] == [each.fault for each in run(main())]
    assert 1 == len(hostile.seen) - before


def test_the_environment_has_no_say(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither proxies nor a .netrc from there."""
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert 200 == send(hostile.url + "ok").status


def test_out_of_sockets_is_our_fault(hostile: Hostile) -> None:
    """Nobody is charged for it."""

    async def main() -> DeliveryResult:
        delivery = HttpDelivery(LOOPBACK_GUARD)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            return await delivery.send(request(hostile.url + "ok"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await delivery.close()

    assert Fault.INTERNAL is run(main()).fault


def test_a_connection_that_never_comes_free_is_our_fault(hostile: Hostile) -> None:
    """Our limit held the request back, not the target."""

    async def main() -> list[DeliveryResult]:
        delivery = HttpDelivery(LOOPBACK_GUARD, max_host_connections=1)
        try:
            first = delivery.send(request(hostile.url + "never", timeout=0.3))
            second = delivery.send(request(hostile.url + "ok", timeout=0.1))
            return [await first, await second]
        finally:
            await delivery.close()

    first, second = run(main())
    assert (Fault.TIMEOUT, Fault.INTERNAL) == (first.fault, second.fault)


def test_a_cancelled_attempt_leaves_nothing(hostile: Hostile) -> None:
    """The next one works, and what was cancelled is no connection any more."""

    async def main() -> tuple[int, DeliveryResult]:
        delivery = HttpDelivery(LOOPBACK_GUARD, max_connections=3)
        before = len(hostile.seen)
        task = delivery.send(request(hostile.url + "never"))
        await wait_for(lambda: len(hostile.seen) > before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = await wait_until_empty(delivery)
        return left, (await send_all(delivery, request(hostile.url + "ok")))[0]

    left, result = run(main())
    assert (3, 200) == (left, result.status)


def test_close_ends_what_runs(hostile: Hostile) -> None:
    """As a fault of ours, and so does every attempt after it."""

    async def main() -> list[DeliveryResult]:
        delivery = HttpDelivery(LOOPBACK_GUARD)
        before = len(hostile.seen)
        task = delivery.send(request(hostile.url + "never"))
        await wait_for(lambda: len(hostile.seen) > before)
        await delivery.close()
        await delivery.close()
        return [await task, await delivery.send(request(hostile.url + "ok"))]

    assert [Fault.INTERNAL, Fault.INTERNAL] == [each.fault for each in run(main())]


def test_many_at_once(hostile: Hostile) -> None:
    """Each gets its own answer."""

    async def main() -> list[DeliveryResult]:
        delivery = HttpDelivery(LOOPBACK_GUARD)
        names = ["ok", "redirect", "http10", "status-999"] * 25
        try:
            sent = [delivery.send(request(hostile.url + name)) for name in names]
            return [await each for each in sent]
        finally:
            await delivery.close()

    assert [200, 302, 200, 999] * 25 == [each.status for each in run(main())]


def test_a_target_with_a_good_certificate(hostile: Hostile) -> None:
    """Trusted through `ca`, and not without it."""
    url = hostile.tls["good"] + "ok"
    result = send(url, ca=hostile.ca)
    assert 200 == result.status
    assert result.tls_ms is not None
    assert Fault.TLS is send(url).fault


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ca": "/nowhere/ca.pem"}, "ca must be a file"),
        ({"proxy": "example.com:80"}, "proxy must be a URL"),
        ({"proxy": "http://[::1"}, "proxy must be a URL"),
        ({"proxy": "http://proxy:99999"}, "proxy must be a URL"),
        ({"proxy": "ftp://user:hunter2@example.com"}, "proxy must be a URL"),
        ({"max_body": 0}, "max_body must be at least 1"),
        ({"max_connections": 0}, "max_connections must be at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    """The message names the option, and no secret."""
    with pytest.raises(ConfigurationError, match=words) as refused:
        HttpDelivery(LOOPBACK_GUARD, **options)
    assert "hunter2" not in str(refused.value)


def test_without_certificates_https_is_our_fault(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine without trusted certificates can still reach plain HTTP."""
    monkeypatch.setattr("tarry.service.delivery.http1.client._create_tls_context", lambda ca: None)
    assert Fault.INTERNAL is send(hostile.tls["good"] + "ok").fault
    assert 200 == send(hostile.url + "ok").status
