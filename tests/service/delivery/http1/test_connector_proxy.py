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
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    new_request,
    run,
    send_all,
)
from tests.service.delivery.scripted_server import TUNNEL_OPEN, never_respond, run_proxy, run_server

pytestmark = pytest.mark.usefixtures("each_loop")


def send_through_proxy(
    url: str,
    response: bytes | None = None,
    ca_file: str | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    guard: Guard | None = None,
    user: str = "",
) -> tuple[DeliveryResult, list[str]]:
    """Send a request through a proxy; return the result and the heads the proxy received."""

    async def main() -> tuple[DeliveryResult, list[str]]:
        async with run_proxy(response, tls) as (proxy, heads):
            delivery = HttpDeliveryClient(
                guard or Guard(), proxy=proxy.url.replace("://", f"://{user}"), ca_file=ca_file
            )
            return (await send_all(delivery, new_request(url)))[0], heads

    return run(main())


def test_plain_http_is_sent_to_the_proxy() -> None:
    """The proxy receives the absolute URL, and resolves the host name."""
    result, (head,) = send_through_proxy("http://known-to-proxy.invalid/x", OK)
    assert 200 == result.status
    assert "POST http://known-to-proxy.invalid/x HTTP/1.1" == head.partition("\r\n")[0]
    assert "\r\nHost: known-to-proxy.invalid\r\n" in head


def test_https_goes_through_a_tunnel(hostile: HostileTargets) -> None:
    """The TLS peer is the target, and headers of the proxy are not part of the response."""
    url = hostile.tls_urls["good"] + "ok"
    result, (head,) = send_through_proxy(url, ca_file=hostile.ca_file, guard=LOOPBACK_GUARD)
    authority = url.split("/")[2]
    assert f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n" == head
    assert (200, [("content-length", "2")]) == (result.status, result.headers)
    assert result.tls_ms is not None


def test_certificate_is_checked_in_a_tunnel(hostile: HostileTargets) -> None:
    """An invalid certificate of the target is a TLS fault, and no request is sent."""
    before = len(hostile.received_requests)
    for certificate in ("wronghost", "expired", "selfsigned"):
        result, heads = send_through_proxy(
            hostile.tls_urls[certificate] + "ok", ca_file=hostile.ca_file, guard=LOOPBACK_GUARD
        )
        assert (Fault.TLS, 1) == (result.fault, len(heads))
        assert "certificate" in (result.error or "")
    assert before == len(hostile.received_requests)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_can_use_tls(hostile: HostileTargets, scheme: str) -> None:
    """An https:// proxy forwards plain requests, and TLS tunnels inside its TLS connection."""
    good = hostile.tls_contexts["good"]
    if scheme == "http":
        result, heads = send_through_proxy(
            "http://known-to-proxy.invalid/", OK, hostile.ca_file, tls=good
        )
    else:
        url = hostile.tls_urls["good"] + "ok"
        result, heads = send_through_proxy(
            url, ca_file=hostile.ca_file, tls=good, guard=LOOPBACK_GUARD
        )
    assert (200, b"ok", 1) == (result.status, result.excerpt, len(heads))


def test_tunnels_are_reused(hostile: HostileTargets) -> None:
    """Requests share a tunnel, also through a proxy with TLS; close() closes the tunnel."""

    async def main(tls: ssl.SSLContext | None) -> tuple[list[DeliveryResult], int, int]:
        async with run_proxy(tls=tls) as (proxy, heads):
            delivery = HttpDeliveryClient(
                LOOPBACK_GUARD, proxy=proxy.url, ca_file=hostile.ca_file, max_connections=3
            )
            url = hostile.tls_urls["good"] + "ok"
            result = [await delivery.send(new_request(url, body=bytes(300_000))) for _ in range(3)]
            return result, len(heads), await close_and_wait(delivery)

    for tls in (None, hostile.tls_contexts["good"]):
        result, tunnels, free_slots = run(main(tls))
        assert ([200] * 3, 1, 3) == ([each.status for each in result], tunnels, free_slots)


def test_certificate_of_the_proxy_is_checked(hostile: HostileTargets) -> None:
    """A proxy with an invalid certificate gets no request, and the fault is INTERNAL."""
    tls = hostile.tls_contexts["wronghost"]
    result, heads = send_through_proxy(
        "https://target.invalid/", TUNNEL_OPEN, hostile.ca_file, tls=tls, user="u:p@"
    )
    assert (Fault.INTERNAL, []) == (result.fault, heads)
    assert "No connection to the egress proxy" in (result.error or "")


def test_failed_handshake_in_a_tunnel_is_a_tls_fault(hostile: HostileTargets) -> None:
    """An expired certificate of the target is a TLS fault, also inside TLS with the proxy."""
    url = hostile.tls_urls["expired"] + "ok"
    result, _ = send_through_proxy(
        url, ca_file=hostile.ca_file, tls=hostile.tls_contexts["good"], guard=LOOPBACK_GUARD
    )
    assert Fault.TLS is result.fault


def test_credentials_are_sent_to_the_proxy_only(hostile: HostileTargets) -> None:
    """The CONNECT or plain request has the credentials, and the target does not get them."""
    line = f"Proxy-Authorization: Basic {b64encode(b'us@er:pa:ss').decode()}\r\n"
    url = hostile.tls_urls["good"] + "ok"
    result, (head,) = send_through_proxy(
        url, ca_file=hostile.ca_file, guard=LOOPBACK_GUARD, user="us%40er:pa:ss@"
    )
    assert 200 == result.status
    assert line in head
    assert "proxy-authorization" not in hostile.received_requests[-1].head.lower()
    _, (head,) = send_through_proxy("http://known-to-proxy.invalid/", OK, user="us%40er:pa:ss@")
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
def test_status_of_the_proxy_determines_the_fault(status: int, fault: Fault) -> None:
    """The error for a refused tunnel contains the status of the proxy."""
    response = f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode()
    result, _ = send_through_proxy("https://target.invalid/", response)
    assert fault is result.fault
    assert str(status) in (result.error or "")


def test_proxy_that_requires_authentication_is_not_a_failure_of_the_target() -> None:
    """A 407 from the proxy for a plain request is INTERNAL, and only this target waits."""
    response = b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n"
    result, _ = send_through_proxy("http://target.invalid/", response)
    assert (Fault.INTERNAL, None) == (result.fault, result.status)
    assert result.pause_s
    assert "The egress proxy refused the request: status 407" == result.error


@pytest.mark.parametrize(
    "response",
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
def test_invalid_response_of_a_proxy_is_an_internal_fault(response: bytes) -> None:
    """A proxy that closes, uses another protocol or sends endless headers is INTERNAL."""
    result, _ = send_through_proxy("https://target.invalid/", response)
    assert Fault.INTERNAL is result.fault
    assert "egress proxy" in (result.error or "")


def test_tunnel_that_closes_before_the_handshake_is_a_tls_fault(hostile: HostileTargets) -> None:
    """The fault is TLS, not INTERNAL, because the proxy had opened the tunnel."""
    for response in (
        TUNNEL_OPEN,
        TUNNEL_OPEN + b"no TLS at all, but something else, and rather long",
    ):
        result, _ = send_through_proxy("https://target.invalid/", response, hostile.ca_file)
        assert Fault.TLS is result.fault


def test_unreachable_proxy_is_an_internal_fault() -> None:
    """A proxy with a closed port or an unknown name is an INTERNAL fault."""
    for proxy in ("http://127.0.0.1:1", "http://proxy.invalid:3128", "https://127.0.0.1:1"):
        for url in ("http://target.invalid/", "https://target.invalid/"):

            async def main(url: str = url, proxy: str = proxy) -> list[DeliveryResult]:
                return await send_all(HttpDeliveryClient(Guard(), proxy=proxy), new_request(url))

            assert Fault.INTERNAL is run(main())[0].fault


async def test_plaintext_from_a_tls_proxy_is_rejected(hostile: HostileTargets) -> None:
    """A CONNECT response before the TLS handshake, which an attacker can forge, is rejected."""

    async def forge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(TUNNEL_OPEN)
        await never_respond(reader, writer)

    async with run_server(forge) as server:
        proxy = server.url.replace("http:", "https:")
        delivery = HttpDeliveryClient(Guard(), proxy=proxy, ca_file=hostile.ca_file)
        result = (await send_all(delivery, new_request("https://target.invalid/")))[0]
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
    result, heads = send_through_proxy(url, OK)
    assert fault is result.fault
    assert [] == heads


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://proxy", "proxy", 80),
        ("https://proxy/", "proxy", 443),
        ("http://[::1]:3128", "::1", 3128),
        ("http://user@proxy:8080", "proxy", 8080),
    ],
)
def test_proxy_url_is_parsed(url: str, host: str, port: int) -> None:
    """The port defaults to that of the scheme."""
    proxy = parse_proxy(url)
    assert (host, port) == (proxy.host, proxy.port)


@pytest.mark.parametrize(
    "url", ["", "proxy", "socks5h://proxy", "http://", "http://proxy:0", "http://proxy:x"]
)
def test_invalid_proxy_url_is_rejected(url: str) -> None:
    """The message names the option."""
    with pytest.raises(ConfigurationError, match="proxy must be a URL like http://host:port"):
        parse_proxy(url)
