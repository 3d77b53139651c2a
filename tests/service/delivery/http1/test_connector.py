from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tarry.service.delivery import DeliveryError, Fault
from tarry.service.delivery.dns import DnsCache
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1 import connector
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connector import (
    connect_to_any,
    select_allowed,
)
from tests.integration.hostile import OK, HostileTargets
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    new_request,
    run,
    send,
    send_all,
    wait_for,
)
from tests.service.delivery.scripted_server import never_respond, respond_with, run_server

pytestmark = pytest.mark.usefixtures("each_loop")


class RecordingGuard(Guard):
    """A guard that records the addresses it checks."""

    def __init__(self) -> None:
        super().__init__(dev=True)
        self.checked: list[tuple[str, str]] = []

    def block_reason(self, address: str, host: str) -> str | None:
        """Record the address and the host."""
        self.checked.append((address, host))
        return super().block_reason(address, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "2001:db8::1", "::ffff:127.0.0.1"])
def test_ip_address_is_not_resolved(host: str, dns: dict[str, list[str]]) -> None:
    """An IP address is returned without a DNS lookup."""
    assert {} == dns
    assert (host,) == run(DnsCache().resolve(host, "default"))


def test_localhost_subdomains_are_loopback(dns: dict[str, list[str]]) -> None:
    """Names below .localhost resolve to the addresses of localhost, whatever DNS returns."""
    dns["localhost"], dns["a.localhost"] = ["127.0.0.1"], ["192.0.2.1"]
    assert ("127.0.0.1",) == run(DnsCache().resolve("a.localhost", "default"))


async def test_guard_checks_every_connection(dns: dict[str, list[str]]) -> None:
    """The guard checks the addresses for each connection, including cached addresses."""
    guard = RecordingGuard()
    dns["target.example"] = ["169.254.169.254", "127.0.0.1"]

    async with run_server(respond_with(OK)) as server:
        url = server.url.replace("127.0.0.1", "target.example")
        first, second = await send_all(
            HttpDeliveryClient(guard), new_request(url), new_request(url)
        )
    assert [200, 200] == [first.status, second.status]
    pair = [("169.254.169.254", "target.example"), ("127.0.0.1", "target.example")]
    assert guard.checked[:2] == pair
    assert guard.checked == pair * (len(guard.checked) // 2)
    assert len(guard.checked) >= 2 * 2


def test_blocked_addresses_are_skipped() -> None:
    """If the guard blocks all addresses, the attempt is BLOCKED."""
    allowed = select_allowed(
        ["10.0.0.1", "127.0.0.1", "::ffff:127.0.0.1"], "h.example", LOOPBACK_GUARD
    )
    assert ["127.0.0.1"] == allowed
    with pytest.raises(DeliveryError, match="has no address that is allowed") as raised:
        select_allowed(["10.0.0.1", "127.0.0.1"], "h.example", Guard())
    assert Fault.BLOCKED is raised.value.fault
    with pytest.raises(DeliveryError, match="has no address"):
        select_allowed([], "h.example", LOOPBACK_GUARD)


async def test_next_address_is_tried_after_a_refused_connection(dns: dict[str, list[str]]) -> None:
    """The next address is used, and the result contains it."""
    dns["two.example"] = ["::1", "127.0.0.1"]

    async with run_server(respond_with(OK)) as server:
        url = server.url.replace("127.0.0.1", "two.example")
        result = (await send_all(HttpDeliveryClient(LOOPBACK_GUARD), new_request(url)))[0]
    assert (200, "127.0.0.1") == (result.status, result.remote)
    assert result.dns_ms is not None


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ECONNREFUSED, Fault.REFUSED),
        (errno.ENETUNREACH, Fault.REFUSED),
        (errno.EMFILE, Fault.INTERNAL),
        (errno.ENOBUFS, Fault.INTERNAL),
    ],
)
def test_fault_of_a_failed_connection(
    number: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed connection is a REFUSED fault, or INTERNAL if this process lacks resources."""

    async def fail(*_: object) -> Any:
        raise OSError(number, "message")

    monkeypatch.setattr(connector, "connect_to_any", fail)
    result = send("http://127.0.0.1:1/")
    assert fault is result.fault
    assert os.strerror(number) in (result.error or "")


def test_certificate_is_valid_for_a_name_and_an_address(hostile: HostileTargets) -> None:
    url = hostile.tls_urls["good"] + "ok"
    assert 200 == send(url, ca_file=hostile.ca_file).status
    assert 200 == send(url.replace("127.0.0.1", "localhost"), ca_file=hostile.ca_file).status
    result = send(url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), ca_file=hostile.ca_file)
    assert Fault.BLOCKED is result.fault


def test_common_name_of_a_certificate_is_not_a_host_name(hostile: HostileTargets) -> None:
    """A certificate needs subject alternative names (RFC 9525, 2)."""
    url = hostile.tls_urls["localhost"].replace("127.0.0.1", "localhost") + "ok"
    result = send(url, ca_file=hostile.ca_file)
    assert Fault.TLS is result.fault
    assert "certificate is not valid" in (result.error or "")


def test_certificate_for_another_name_is_a_tls_fault(
    hostile: HostileTargets, dns: dict[str, list[str]]
) -> None:
    """A certificate for another host is a TLS fault, and the error describes the mismatch."""
    dns["other.example"] = ["127.0.0.1"]
    url = hostile.tls_urls["good"].replace("127.0.0.1", "other.example") + "ok"
    result = send(url, ca_file=hostile.ca_file)
    assert Fault.TLS is result.fault
    assert "The certificate is not valid: Hostname mismatch" in (result.error or "")


@pytest.mark.parametrize(
    "response", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00"]
)
async def test_failed_handshake_frees_the_connection(
    hostile: HostileTargets, response: bytes
) -> None:
    """The slot is freed if the server closes, uses another protocol, or stops midway."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(response)

    async with run_server(handler) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file, max_connections=3)
        result = await delivery.send(new_request(server.url.replace("http:", "https:")))
        free_slots = await close_and_wait(delivery)
    assert (Fault.TLS, 3) == (result.fault, free_slots)
    assert "TLS" in (result.error or "")


async def test_data_before_tls_is_rejected(hostile: HostileTargets) -> None:
    """Plaintext data that the server sends before the handshake is a TLS fault."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await never_respond(reader, writer)

    async with run_server(greet) as server:
        url = server.url.replace("http:", "https:")
        result = (
            await send_all(
                HttpDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file), new_request(url)
            )
        )[0]
    assert Fault.TLS is result.fault


LINUX_ONLY = pytest.mark.skipif(
    sys.platform != "linux", reason="127.0.0.2 is a loopback address only on Linux"
)

UNRESPONSIVE_ADDRESS, OPEN_ADDRESS, REFUSING_ADDRESS = "127.0.0.2", "127.0.0.1", "127.0.0.3"


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port on which each address behaves as its constant is named."""
    with socket.socket() as listening, socket.socket() as full:
        listening.bind((OPEN_ADDRESS, 0))
        listening.listen()
        number: int = listening.getsockname()[1]
        full.bind((UNRESPONSIVE_ADDRESS, number))
        full.listen(0)
        queued = [socket.socket() for _ in range(4)]
        for each in queued:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect((UNRESPONSIVE_ADDRESS, number))
        yield number
        for each in queued:
            each.close()


@pytest.mark.parametrize(
    "addresses",
    [
        [OPEN_ADDRESS],
        [OPEN_ADDRESS, UNRESPONSIVE_ADDRESS],
        [REFUSING_ADDRESS, OPEN_ADDRESS],
        [REFUSING_ADDRESS, "::1", OPEN_ADDRESS],
        [OPEN_ADDRESS, OPEN_ADDRESS],
    ],
)
@LINUX_ONLY
async def test_first_address_that_connects_is_used(port: int, addresses: list[str]) -> None:
    """An address that refuses the connection is skipped."""
    transport, address = await connect_to_any(addresses, port)
    peer = transport.get_extra_info("peername")[0]
    transport.abort()
    assert (OPEN_ADDRESS, OPEN_ADDRESS) == (address, peer)


@pytest.mark.parametrize(
    "addresses",
    [[UNRESPONSIVE_ADDRESS, OPEN_ADDRESS], [UNRESPONSIVE_ADDRESS, REFUSING_ADDRESS, OPEN_ADDRESS]],
)
@LINUX_ONLY
async def test_next_address_is_tried_after_a_delay(
    port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an address does not respond, the next one is tried, and the other attempt is cancelled."""
    monkeypatch.setattr(connector, "_CONNECTION_ATTEMPT_DELAY_S", 0.01)

    transport, address = await connect_to_any(addresses, port)
    transport.abort()
    await asyncio.sleep(0)
    assert (OPEN_ADDRESS, 1) == (address, len(asyncio.all_tasks()))


@LINUX_ONLY
def test_last_error_is_raised_when_all_addresses_fail(port: int) -> None:
    """`connect_to_any` raises the last error, or "no address" for an empty list."""

    async def main(addresses: list[str]) -> None:
        await connect_to_any(addresses, port)

    for addresses in ([REFUSING_ADDRESS], [REFUSING_ADDRESS, "127.0.0.4"]):
        with pytest.raises(ConnectionRefusedError):
            run(main(addresses))
    with pytest.raises(OSError, match="no address"):
        run(main([]))


@LINUX_ONLY
async def test_second_connection_of_a_race_is_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one connection stays open: an unclosed socket is a warning, which fails the test."""
    monkeypatch.setattr(connector, "_CONNECTION_ATTEMPT_DELAY_S", 0.0)

    for _ in range(20):
        transport, _ = await connect_to_any([OPEN_ADDRESS] * 4, port)
        transport.abort()


@pytest.mark.parametrize(
    "addresses", [[UNRESPONSIVE_ADDRESS], [UNRESPONSIVE_ADDRESS, UNRESPONSIVE_ADDRESS]]
)
@LINUX_ONLY
async def test_cancelled_connect_leaves_no_socket(
    port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling closes all sockets and ends all tasks."""
    monkeypatch.setattr(connector, "_CONNECTION_ATTEMPT_DELAY_S", 0.0)
    peer = f" {socket.inet_aton(UNRESPONSIVE_ADDRESS)[::-1].hex().upper()}:{port:04X} "

    def count_sockets() -> int:
        return Path("/proc/net/tcp").read_text("ascii").count(peer)

    before = count_sockets()
    task = asyncio.create_task(connect_to_any(addresses, port))
    await wait_for(lambda: count_sockets() == before + len(addresses))
    task.cancel()
    await asyncio.wait([task])
    await wait_for(lambda: len(asyncio.all_tasks()) == 1)
    await wait_for(lambda: count_sockets() == before)


@LINUX_ONLY
async def test_socket_options_are_set(port: int) -> None:
    """Nagle's algorithm is off and keep-alive is on."""
    transport, _ = await connect_to_any([OPEN_ADDRESS], port)
    sock = transport.get_extra_info("socket")
    options = (
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    )
    transport.abort()
    assert (1, 1) == options
