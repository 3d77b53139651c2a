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
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.targets import parse_target
from tests.integration.hostile import HostileTargets
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    new_request,
    run,
    send,
    send_all,
    wait_for,
    wait_until_empty,
)

pytestmark = pytest.mark.usefixtures("each_loop")


def test_result_has_the_whole_response(hostile: HostileTargets) -> None:
    """The result has status, headers, body, remote address and durations."""
    result = send(hostile.url + "ok")
    assert (200, b"ok", "127.0.0.1") == (result.status, result.excerpt, result.remote)
    assert [("content-length", "2")] == result.headers
    assert result.fault is None
    assert result.connect_ms is not None
    assert result.first_byte_ms is not None
    assert result.tls_ms is None
    assert 0 < result.connect_ms <= result.duration_ms


def test_request_is_sent_unchanged(hostile: HostileTargets) -> None:
    """The client adds only a few default headers, and no content type or compression."""
    headers = {"X-One": "1", "X-Empty": "", "X-Word": "grüß", "Content-Type": "a/b"}
    send(hostile.url + "ok?q=%2F..%2F", method="PUT", headers=headers, body=b"\x00\xff")
    received = hostile.received_requests[-1]
    assert ("PUT", b"\x00\xff") == (received.method, received.body)
    assert received.head.splitlines()[1:-1] == [
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
    send(hostile.url + "ok", headers={"user-agent": "mine/1"})
    head = hostile.received_requests[-1].head.lower()
    assert "user-agent: mine/1\r\n" in head
    assert "tarry/" not in head
    assert "content-type" not in head


async def test_requests_with_the_same_header_names_have_their_own_values(
    hostile: HostileTargets,
) -> None:
    """A pool caches a limited number of head parts, without the values of headers."""
    headers = [{"X-A": "1", "X-B": "2"}, {"X-A": "", "X-B": "4"}, {"X-B": "5"}]
    headers += [{f"X-{number}": "6"} for number in range(40)] + headers[:1]

    before = len(hostile.received_requests)
    delivery = HttpDeliveryClient(LOOPBACK_GUARD)
    for number, each in enumerate(headers):
        await delivery.send(new_request(f"{hostile.url}ok?{number}", headers=each))
    (pool,) = delivery._pools.values()
    cached_count = len(pool.head_parts)
    await delivery.close()
    assert 1 <= (cached_count) <= 16
    for number, each in enumerate(headers):
        received = hostile.received_requests[before + number]
        lines = [f"{name}: {value}" for name, value in each.items()]
        assert (f"/ok?{number}", [*lines, "Content-Length: 2"]) == (
            received.path,
            received.head.splitlines()[5:-1],
        )


def test_path_is_not_normalized(hostile: HostileTargets) -> None:
    """Dots, slashes, escapes and stray percent signs of the canonical path reach the target."""
    target = parse_target(hostile.url + "x/..//%41%2e%zz/;a=b/ok?%e4=%&a[]=!'()*")
    send(target.url)
    assert target.path_and_query == hostile.received_requests[-1].path


@pytest.mark.parametrize("body", [b"", b"abc"])
@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "HEAD"]
)
def test_every_method_works_with_and_without_a_body(
    hostile: HostileTargets, method: str, body: bytes
) -> None:
    """All methods work on one connection, with and without a body; HEAD must have no body."""
    result = run(
        send_all(
            HttpDeliveryClient(LOOPBACK_GUARD),
            new_request(hostile.url + "ok"),
            new_request(hostile.url + "ok", method=method, body=body),
            new_request(hostile.url + "ok", method="GET", body=b""),
        )
    )
    if method == "HEAD" and body:
        assert (Fault.INVALID, "body must be empty") == (
            result[1].fault,
            (result[1].error or "")[:18],
        )
        return
    assert [200, 200, 200] == [each.status for each in result]
    before, received, after = hostile.received_requests[-3:]
    assert ("POST", b"{}") == (before.method, before.body)
    assert (method, body) == (received.method, received.body)
    assert ("GET", b"", False) == (after.method, after.body, "content-length" in after.head.lower())


def test_connections_are_reused(hostile: HostileTargets) -> None:
    """The second request needs no DNS lookup and no new connection."""
    before = hostile.connections
    first, second = run(
        send_all(
            HttpDeliveryClient(LOOPBACK_GUARD),
            new_request(hostile.url + "ok"),
            new_request(hostile.url + "ok"),
        )
    )
    assert 1 == hostile.connections - before
    assert first.connect_ms is not None
    assert (None, None) == (second.dns_ms, second.connect_ms)


def test_large_body_is_sent_without_expect(hostile: HostileTargets) -> None:
    """No `Expect: 100-continue` is sent, because some targets ignore it and cause a delay."""
    body = bytes(2_000_000)
    assert 200 == send(hostile.url + "ok", body=body).status
    assert body == hostile.received_requests[-1].body
    assert "expect" not in hostile.received_requests[-1].head.lower()


def test_excerpt_is_bounded(hostile: HostileTargets) -> None:
    """The excerpt has at most `max_excerpt` bytes, and `truncated` is set if more exist."""
    for limit, excerpt, truncated in ((0, b"", True), (1, b"o", True), (2, b"ok", False)):
        result = send(hostile.url + "ok", max_excerpt=limit)
        assert (excerpt, truncated) == (result.excerpt, result.truncated)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-A": "1\r\nX-B: 2"},
        {"X-A": "1\nX-B: 2"},
        {"X-A": "1\0"},
        {"X-A: 1\r\nX-B": "2"},
        {"X-A:": "1"},
        {"X A": "1"},
        {"": "1"},
        {"Host": "other.example"},
        {"Content-Length": "5"},
        {"Transfer-Encoding": "chunked"},
        {"connection": "close"},
        {"X-A": "\ud800"},
    ],
)
def test_unsafe_headers_are_not_sent(hostile: HostileTargets, headers: dict[str, str]) -> None:
    """Line breaks, invalid names and connection headers fail the request with INVALID."""
    before = len(hostile.received_requests)
    result = send(hostile.url + "ok", headers=headers)
    assert (None, Fault.INVALID) == (result.status, result.fault)
    assert before == len(hostile.received_requests)


@pytest.mark.parametrize("method", ["", "GET /", "POST\r\n", "CONNECT", "trace"])
def test_invalid_method_is_not_sent(hostile: HostileTargets, method: str) -> None:
    """Invalid methods, CONNECT and TRACE fail the request with INVALID."""
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
def test_url_that_is_not_canonical_is_not_sent(url: str) -> None:
    """A URL that is not canonical fails before a connection is opened."""
    assert send(url).fault in {Fault.INVALID, Fault.PROTOCOL}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"])
def test_guard_checks_when_a_connection_is_opened(hostile: HostileTargets, host: str) -> None:
    """No connection is opened to an address that the guard blocks."""
    before = hostile.connections
    result = send(hostile.url.replace("127.0.0.1", host) + "ok", Guard())
    assert Fault.BLOCKED is result.fault
    assert "address" in (result.error or "")
    assert before == hostile.connections


def test_name_with_a_private_address_is_blocked(
    hostile: HostileTargets, dns: dict[str, list[str]]
) -> None:
    """The guard checks the resolved addresses, and the first allowed address is used."""
    url = hostile.url.replace("127.0.0.1", "rebound.example") + "ok"
    dns["rebound.example"] = ["127.0.0.1", "169.254.169.254"]
    assert Fault.BLOCKED is send(url, Guard()).fault
    assert 200 == send(url, Guard(["127.0.0.0/8"])).status
    dns["rebound.example"] = ["169.254.169.254", "127.0.0.1"]
    result = send(url)
    assert (200, "127.0.0.1") == (result.status, result.remote)
    assert result.dns_ms is not None


def test_fault_of_an_unknown_name_and_a_closed_port() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert Fault.REFUSED is send(f"http://127.0.0.1:{bound.getsockname()[1]}/").fault
    assert Fault.DNS is send("http://does-not-exist.invalid/").fault


async def test_url_without_a_path_does_not_match_an_existing_pool(hostile: HostileTargets) -> None:
    """A URL without a path is INVALID, even if its start is the key of a pool."""
    before = len(hostile.received_requests)
    urls = hostile.url + "ok", hostile.url.strip("/") + "1", hostile.url.strip("/")
    assert [None, Fault.INVALID, Fault.INVALID] == [
        each.fault
        for each in (await send_all(HttpDeliveryClient(LOOPBACK_GUARD), *map(new_request, urls)))
    ]
    assert 1 == len(hostile.received_requests) - before


def test_environment_is_ignored(hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies in environment variables are ignored."""
    for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert 200 == send(hostile.url + "ok").status


def test_lack_of_sockets_is_an_internal_fault(hostile: HostileTargets) -> None:
    """An attempt fails with INTERNAL when this process has no free file descriptors."""

    async def main() -> DeliveryResult:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            return await delivery.send(new_request(hostile.url + "ok"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await delivery.close()

    assert Fault.INTERNAL is run(main()).fault


def test_full_pool_is_an_internal_fault(hostile: HostileTargets) -> None:
    """A request that times out while it waits for a connection fails with INTERNAL."""

    async def main() -> list[DeliveryResult]:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_pool_connections=1)
        try:
            first = delivery.send(new_request(hostile.url + "never", timeout=0.3))
            second = delivery.send(new_request(hostile.url + "ok", timeout=0.1))
            return [await first, await second]
        finally:
            await delivery.close()

    first, second = run(main())
    assert (Fault.TIMEOUT, Fault.INTERNAL) == (first.fault, second.fault)


async def test_cancelled_attempt_closes_its_connection(hostile: HostileTargets) -> None:
    delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=3)
    before = len(hostile.received_requests)
    task = delivery.send(new_request(hostile.url + "never"))
    await wait_for(lambda: len(hostile.received_requests) > before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free_slots = await wait_until_empty(delivery)
    [result] = await send_all(delivery, new_request(hostile.url + "ok"))
    assert (3, 200) == (free_slots, result.status)


async def test_close_fails_running_attempts(hostile: HostileTargets) -> None:
    """Attempts that run or start after the close end with an INTERNAL fault."""
    delivery = HttpDeliveryClient(LOOPBACK_GUARD)
    before = len(hostile.received_requests)
    task = delivery.send(new_request(hostile.url + "never"))
    await wait_for(lambda: len(hostile.received_requests) > before)
    await delivery.close()
    await delivery.close()
    assert [Fault.INTERNAL, Fault.INTERNAL] == [
        each.fault for each in ([await task, await delivery.send(new_request(hostile.url + "ok"))])
    ]


def test_concurrent_requests_get_their_own_responses(hostile: HostileTargets) -> None:
    async def main() -> list[DeliveryResult]:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        names = ["ok", "redirect", "http10", "status-999"] * 25
        try:
            sent = [delivery.send(new_request(hostile.url + name)) for name in names]
            return [await each for each in sent]
        finally:
            await delivery.close()

    assert [200, 302, 200, 999] * 25 == [each.status for each in run(main())]


def test_certificate_is_verified_with_ca_file(hostile: HostileTargets) -> None:
    """A certificate of a private CA is valid only with the `ca_file` of that CA."""
    url = hostile.tls_urls["good"] + "ok"
    result = send(url, ca_file=hostile.ca_file)
    assert 200 == result.status
    assert result.tls_ms is not None
    assert Fault.TLS is send(url).fault


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ca_file": "/nowhere/ca.pem"}, "ca_file must be a file"),
        ({"proxy": "example.com:80"}, "proxy must be a URL"),
        ({"proxy": "http://[::1"}, "proxy must be a URL"),
        ({"proxy": "http://proxy:99999"}, "proxy must be a URL"),
        ({"proxy": "ftp://user:hunter2@example.com"}, "proxy must be a URL"),
        ({"max_response_bytes": 0}, "max_response_bytes must be at least 1"),
        ({"max_connections": 0}, "max_connections must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    """The message names the option and shows no secret."""
    with pytest.raises(ConfigurationError, match=message) as raised:
        HttpDeliveryClient(LOOPBACK_GUARD, **options)
    assert "hunter2" not in str(raised.value)


def test_missing_certificates_are_an_internal_fault(
    hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without trusted CA certificates, HTTPS fails with INTERNAL and plain HTTP works."""
    monkeypatch.setattr("tarry.service.delivery.http1.client._create_tls_context", lambda ca: None)
    assert Fault.INTERNAL is send(hostile.tls_urls["good"] + "ok").fault
    assert 200 == send(hostile.url + "ok").status
