from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1 import connector
from tarry.service.delivery.http1.client import HttpDelivery
from tarry.service.delivery.http1.connector import connect_first, resolve_host, select_allowed
from tarry.service.delivery.http1.dns import DnsCache
from tarry.service.delivery.messages import DeliveryError, DeliveryResult, Fault
from tests.integration.hostile import OK, Hostile
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    request,
    run,
    send,
    send_all,
    wait_for,
)
from tests.service.delivery.scripted_server import never_respond, respond_with, run_server

pytestmark = pytest.mark.usefixtures("either_loop")


class Asked(Guard):
    """A guard that remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(dev=True)
        self.asked: list[tuple[str, str]] = []

    def refusal(self, address: str, host: str) -> str | None:
        """Judge."""
        self.asked.append((address, host))
        return super().refusal(address, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "2001:db8::1", "::ffff:127.0.0.1"])
def test_an_address_is_not_looked_up(host: str, dns: dict[str, list[str]]) -> None:
    """DNS has no say in it."""
    assert {} == dns
    assert (host,) == run(resolve_host(host, DnsCache()))


def test_names_below_localhost_are_this_machine(dns: dict[str, list[str]]) -> None:
    """DNS is not asked about them: it may know nothing, or something else."""
    dns["localhost"], dns["a.localhost"] = ["127.0.0.1"], ["192.0.2.1"]
    assert ("127.0.0.1",) == run(resolve_host("a.localhost", DnsCache()))


def test_every_connection_is_judged(dns: dict[str, list[str]]) -> None:
    """Also when the name was looked up before: what is remembered is not what is allowed."""
    guard = Asked()
    dns["target.example"] = ["169.254.169.254", "127.0.0.1"]

    async def main() -> list[DeliveryResult]:
        async with run_server(respond_with(OK)) as server:
            url = server.url.replace("127.0.0.1", "target.example")
            return await send_all(HttpDelivery(guard), request(url), request(url))

    first, second = run(main())
    assert [200, 200] == [first.status, second.status]
    pair = [("169.254.169.254", "target.example"), ("127.0.0.1", "target.example")]
    assert guard.asked[:2] == pair
    assert guard.asked == pair * (len(guard.asked) // 2)
    assert len(guard.asked) >= 2 * 2


def test_what_is_refused_is_left_out() -> None:
    """The first refusal is the reason when nothing is left."""
    allowed = select_allowed(
        ["10.0.0.1", "127.0.0.1", "::ffff:127.0.0.1"], "h.example", LOOPBACK_GUARD
    )
    assert ["127.0.0.1"] == allowed
    with pytest.raises(DeliveryError, match=r"10\.0\.0\.1, a private address") as no:
        select_allowed(["10.0.0.1", "127.0.0.1"], "h.example", Guard())
    assert Fault.BLOCKED is no.value.fault
    with pytest.raises(DeliveryError, match="has no address"):
        select_allowed([], "h.example", LOOPBACK_GUARD)


def test_an_address_that_refuses_is_followed_by_the_next(dns: dict[str, list[str]]) -> None:
    """What answered is what is told."""
    dns["two.example"] = ["::1", "127.0.0.1"]

    async def main() -> DeliveryResult:
        async with run_server(respond_with(OK)) as server:
            url = server.url.replace("127.0.0.1", "two.example")
            return (await send_all(HttpDelivery(LOOPBACK_GUARD), request(url)))[0]

    result = run(main())
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
def test_whose_fault_no_connection_is(
    number: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's, unless it was ours that ran out."""

    async def fail(*_: object) -> Any:
        raise OSError(number, "words")

    monkeypatch.setattr(connector, "connect_first", fail)
    result = send("http://127.0.0.1:1/")
    assert fault is result.fault
    assert "words" in (result.error or "")


def test_a_name_in_a_certificate_and_an_address_in_one(hostile: Hostile) -> None:
    """Both are compared with what the URL says."""
    url = hostile.tls["good"] + "ok"
    assert 200 == send(url, ca=hostile.ca).status
    assert 200 == send(url.replace("127.0.0.1", "localhost"), ca=hostile.ca).status
    result = send(url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), ca=hostile.ca)
    assert Fault.BLOCKED is result.fault


def test_a_name_that_is_not_in_the_certificate(hostile: Hostile, dns: dict[str, list[str]]) -> None:
    """The words say what is wrong with it."""
    dns["other.example"] = ["127.0.0.1"]
    url = hostile.tls["good"].replace("127.0.0.1", "other.example") + "ok"
    result = send(url, ca=hostile.ca)
    assert Fault.TLS is result.fault
    assert "The certificate is not valid: Hostname mismatch" in (result.error or "")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00"])
def test_a_handshake_that_fails_leaves_nothing(hostile: Hostile, said: bytes) -> None:
    """The server hangs up, speaks something else, or stops in the middle."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)

    async def main() -> tuple[DeliveryResult, int]:
        async with run_server(handler) as server:
            delivery = HttpDelivery(LOOPBACK_GUARD, ca=hostile.ca, max_connections=3)
            result = await delivery.send(request(server.url.replace("http:", "https:")))
            return result, await close_and_wait(delivery)

    result, left = run(main())
    assert (Fault.TLS, 3) == (result.fault, left)
    assert "TLS" in (result.error or "")


def test_a_server_that_speaks_before_tls(hostile: Hostile) -> None:
    """What it says is not taken for a part of the handshake, nor for an answer."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await never_respond(reader, writer)

    async def main() -> DeliveryResult:
        async with run_server(greet) as server:
            url = server.url.replace("http:", "https:")
            return (await send_all(HttpDelivery(LOOPBACK_GUARD, ca=hostile.ca), request(url)))[0]

    assert Fault.TLS is run(main()).fault


ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="127.0.0.2 is a loopback address on Linux alone"
)

FIRST, SECOND, NOBODY = "127.0.0.2", "127.0.0.1", "127.0.0.3"


@pytest.fixture
def port() -> Iterator[int]:
    """Open on SECOND, refused on NOBODY, and on FIRST nobody answers: the queue there is full."""
    with socket.socket() as answers, socket.socket() as is_full:
        answers.bind((SECOND, 0))
        answers.listen()
        number: int = answers.getsockname()[1]
        is_full.bind((FIRST, number))
        is_full.listen(0)
        queued = [socket.socket() for _ in range(4)]
        for each in queued:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect((FIRST, number))
        yield number
        for each in queued:
            each.close()


@pytest.mark.parametrize(
    "addresses",
    [[SECOND], [SECOND, FIRST], [NOBODY, SECOND], [NOBODY, "::1", SECOND], [SECOND, SECOND]],
)
@ON_LINUX
def test_the_first_that_answers_is_taken(port: int, addresses: list[str]) -> None:
    """One that refuses does not hold up the next."""

    async def main() -> tuple[str, str]:
        made, address = await connect_first(addresses, port)
        with made:
            return address, made.getpeername()[0]

    assert (SECOND, SECOND) == run(main())


@pytest.mark.parametrize("addresses", [[FIRST, SECOND], [FIRST, NOBODY, SECOND]])
@ON_LINUX
def test_one_that_does_not_answer_holds_up_for_a_moment(
    port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the next is tried beside it, and the loser is let go."""
    monkeypatch.setattr(connector, "_HEAD_START_S", 0.01)

    async def main() -> tuple[str, int]:
        made, address = await connect_first(addresses, port)
        made.close()
        await asyncio.sleep(0)
        return address, len(asyncio.all_tasks())

    assert (SECOND, 1) == run(main())


@ON_LINUX
def test_when_all_refuse_the_last_says_why(port: int) -> None:
    """One address, or several, or none."""

    async def main(addresses: list[str]) -> None:
        await connect_first(addresses, port)

    for addresses in ([NOBODY], [NOBODY, "127.0.0.4"]):
        with pytest.raises(ConnectionRefusedError):
            run(main(addresses))
    with pytest.raises(OSError, match="no address"):
        run(main([]))


@ON_LINUX
def test_two_that_answer_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is taken, the other closed: an open socket would be a warning here."""
    monkeypatch.setattr(connector, "_HEAD_START_S", 0.0)

    async def main() -> None:
        for _ in range(20):
            made, _ = await connect_first([SECOND] * 4, port)
            made.close()

    run(main())


@pytest.mark.parametrize("addresses", [[FIRST], [FIRST, FIRST]])
@ON_LINUX
def test_a_cancelled_one_leaves_no_socket(
    port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a task."""
    monkeypatch.setattr(connector, "_HEAD_START_S", 0.0)
    made: list[socket.socket] = []

    class Kept(socket.socket):
        def __init__(self, *kind: int) -> None:
            super().__init__(*kind)
            made.append(self)

    monkeypatch.setattr(connector, "socket", Kept)

    async def main() -> int:
        task = asyncio.create_task(connect_first(addresses, port))
        await wait_for(lambda: len(made) == len(addresses))
        task.cancel()
        await asyncio.wait([task])
        await wait_for(lambda: len(asyncio.all_tasks()) == 1)
        return sum(each.fileno() >= 0 for each in made)

    assert 0 == run(main())
    assert len(addresses) == len(made)


@ON_LINUX
def test_small_pieces_are_not_held_back(port: int) -> None:
    """A head and the body after it go out at once; a peer that is gone is noticed."""

    async def main() -> tuple[int, int]:
        made, _ = await connect_first([SECOND], port)
        with made:
            return (
                made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            )

    assert (1, 1) == run(main())
