from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode

import pytest

from tarry.errors import ConfigurationError
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connector import parse_proxy
from tests.integration.hostile import OK, HostileTargets
from tests.service.delivery.harness import LOOPBACK_GUARD, close_and_wait, request, run, send_all
from tests.service.delivery.scripted_server import TUNNEL_OPEN, never_respond, run_proxy, run_server

pytestmark = pytest.mark.usefixtures("either_loop")


def send_through_proxy(
    url: str,
    says: bytes | None = None,
    ca_file: str | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    guard: Guard | None = None,
    user: str = "",
) -> tuple[DeliveryResult, list[str]]:
    """Send a request send_through_proxy a proxy; return the result and the requests it got."""

    async def main() -> tuple[DeliveryResult, list[str]]:
        async with run_proxy(says, tls) as (proxy, asked):
            delivery = HttpDeliveryClient(
                guard or Guard(), proxy=proxy.url.replace("://", f"://{user}"), ca_file=ca_file
            )
            return (await send_all(delivery, request(url)))[0], asked

    return run(main())


def test_plain_http_goes_to_the_proxy() -> None:
    """The proxy resolves the name, which is unknown here."""
    result, (head,) = send_through_proxy("http://only-there.invalid/x", OK)
    assert 200 == result.status
    assert "POST http://only-there.invalid/x HTTP/1.1" == head.partition("\r\n")[0]
    assert "\r\nHost: only-there.invalid\r\n" in head


def test_https_goes_through_a_tunnel(hostile: HostileTargets) -> None:
    """TLS is with the target, and headers of the proxy are not part of the response."""
    url = hostile.tls["good"] + "ok"
    result, (head,) = send_through_proxy(url, ca_file=hostile.ca, guard=LOOPBACK_GUARD)
    authority = url.split("/")[2]
    assert f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n" == head
    assert (200, [("content-length", "2")]) == (result.status, result.headers)
    assert result.tls_ms is not None


def test_certificate_is_checked_in_a_tunnel(hostile: HostileTargets) -> None:
    """The proxy could have connected to any server."""
    before = len(hostile.seen)
    for kind in ("wronghost", "expired", "selfsigned"):
        result, asked = send_through_proxy(
            hostile.tls[kind] + "ok", ca_file=hostile.ca, guard=LOOPBACK_GUARD
        )
        assert (Fault.TLS, 1) == (result.fault, len(asked))
        assert "certificate" in (result.error or "")
    assert before == len(hostile.seen)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_with_tls(hostile: HostileTargets, scheme: str) -> None:
    """TLS with the target runs inside TLS with the proxy."""
    good = hostile.contexts["good"]
    if scheme == "http":
        result, asked = send_through_proxy("http://only-there.invalid/", OK, hostile.ca, tls=good)
    else:
        url = hostile.tls["good"] + "ok"
        result, asked = send_through_proxy(url, ca_file=hostile.ca, tls=good, guard=LOOPBACK_GUARD)
    assert (200, b"ok", 1) == (result.status, result.excerpt, len(asked))


def test_tunnels_are_reused(hostile: HostileTargets) -> None:
    """Tunnels are reused, also through a proxy with TLS, and closed at the end."""

    async def main(tls: ssl.SSLContext | None) -> tuple[list[DeliveryResult], int, int]:
        async with run_proxy(tls=tls) as (proxy, asked):
            delivery = HttpDeliveryClient(
                LOOPBACK_GUARD, proxy=proxy.url, ca_file=hostile.ca, max_connections=3
            )
            url = hostile.tls["good"] + "ok"
            result = [await delivery.send(request(url, body=bytes(300_000))) for _ in range(3)]
            return result, len(asked), await close_and_wait(delivery)

    for tls in (None, hostile.contexts["good"]):
        result, tunnels, left = run(main(tls))
        assert ([200] * 3, 1, 3) == ([each.status for each in result], tunnels, left)


def test_certificate_of_the_proxy_is_checked(hostile: HostileTargets) -> None:
    """No request is sent to a proxy with an invalid certificate: an internal fault."""
    tls = hostile.contexts["wronghost"]
    result, asked = send_through_proxy(
        "https://target.invalid/", TUNNEL_OPEN, hostile.ca, tls=tls, user="u:p@"
    )
    assert (Fault.INTERNAL, []) == (result.fault, asked)
    assert "No connection to the egress proxy" in (result.error or "")


def test_failed_handshake_in_a_tunnel(hostile: HostileTargets) -> None:
    """The target is charged, and the connection is freed."""
    url = hostile.tls["expired"] + "ok"
    result, _ = send_through_proxy(
        url, ca_file=hostile.ca, tls=hostile.contexts["good"], guard=LOOPBACK_GUARD
    )
    assert Fault.TLS is result.fault


def test_credentials_are_sent_to_the_proxy_only(hostile: HostileTargets) -> None:
    """They are in the CONNECT request, or in the plain request that the proxy forwards."""
    line = f"Proxy-Authorization: Basic {b64encode(b'us@er:pa:ss').decode()}\r\n"
    url = hostile.tls["good"] + "ok"
    result, (head,) = send_through_proxy(
        url, ca_file=hostile.ca, guard=LOOPBACK_GUARD, user="us%40er:pa:ss@"
    )
    assert 200 == result.status
    assert line in head
    assert "proxy-authorization" not in hostile.seen[-1].head.lower()
    _, (head,) = send_through_proxy("http://only-there.invalid/", OK, user="us%40er:pa:ss@")
    assert line in head


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (403, Fault.BLOCKED),
        (407, Fault.INTERNAL),
        (500, Fault.INTERNAL),
        (502, Fault.REFUSED),
        (504, Fault.REFUSED),
        (302, Fault.INTERNAL),
        (101, Fault.INTERNAL),
    ],
)
def test_proxy_that_refuses_a_tunnel(status: int, fault: Fault) -> None:
    """The status of the proxy determines the fault."""
    says = f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode()
    result, _ = send_through_proxy("https://target.invalid/", says)
    assert fault is result.fault
    assert str(status) in (result.error or "")


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 Open\r\nX: y\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 Open\r\n" + b"X: y\r\n" * 100_000,
        b"x" * 1_000_000,
    ],
)
def test_invalid_response_of_a_proxy_is_an_internal_fault(says: bytes) -> None:
    """The proxy closes, speaks another protocol, or sends endless headers."""
    result, _ = send_through_proxy("https://target.invalid/", says)
    assert Fault.INTERNAL is result.fault
    assert "egress proxy" in (result.error or "")


def test_tunnel_that_closes_at_once_is_charged_to_the_target(hostile: HostileTargets) -> None:
    """The tunnel was open, so the target closed it."""
    for says in (TUNNEL_OPEN, TUNNEL_OPEN + b"no TLS at all, but something else, and rather long"):
        result, _ = send_through_proxy("https://target.invalid/", says, hostile.ca)
        assert Fault.TLS is result.fault


def test_unreachable_proxy_is_an_internal_fault() -> None:
    """The port is closed, or the name is unknown."""
    for proxy in ("http://127.0.0.1:1", "http://proxy.invalid:3128", "https://127.0.0.1:1"):
        for url in ("http://target.invalid/", "https://target.invalid/"):

            async def main(url: str = url, proxy: str = proxy) -> list[DeliveryResult]:
                return await send_all(HttpDeliveryClient(Guard(), proxy=proxy), request(url))

            assert Fault.INTERNAL is run(main())[0].fault


def test_data_before_tls_in_a_tunnel_is_rejected(hostile: HostileTargets) -> None:
    """An attacker in between could inject a response to CONNECT."""

    async def forge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TUNNEL_OPEN)
        await never_respond(reader, writer)

    async def main() -> DeliveryResult:
        async with run_server(forge) as server:
            proxy = server.url.replace("http:", "https:")
            delivery = HttpDeliveryClient(Guard(), proxy=proxy, ca_file=hostile.ca)
            return (await send_all(delivery, request("https://target.invalid/")))[0]

    result = run(main())
    assert Fault.INTERNAL is result.fault
    assert "TLS" in (result.error or "")


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://127.0.0.1/", Fault.BLOCKED),
        ("http://localhost/", Fault.BLOCKED),
        ("http://[fd00:ec2::254]/", Fault.BLOCKED),
        ("http://0x7f.1/", Fault.INVALID),
    ],
)
def test_url_is_checked_before_the_proxy_is_used(url: str, fault: Fault) -> None:
    """The proxy gets no request for a URL that is not allowed."""
    result, asked = send_through_proxy(url, OK)
    assert fault is result.fault
    assert [] == asked


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://proxy", "proxy", 80),
        ("https://proxy/", "proxy", 443),
        ("http://[::1]:3128", "::1", 3128),
        ("http://user@proxy:8080", "proxy", 8080),
    ],
)
def test_proxy_url(url: str, host: str, port: int) -> None:
    """The port is the default of the scheme, unless the URL has one."""
    proxy = parse_proxy(url)
    assert (host, port) == (proxy.host, proxy.port)


@pytest.mark.parametrize(
    "url", ["", "proxy", "socks5h://proxy", "http://", "http://proxy:0", "http://proxy:x"]
)
def test_invalid_proxy_url_is_rejected(url: str) -> None:
    """The message names the option."""
    with pytest.raises(ConfigurationError, match="proxy must be a URL like http://host:port"):
        parse_proxy(url)
