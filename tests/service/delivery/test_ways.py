from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from tarry.service.delivery import ways
from tarry.service.delivery.exchange import Delivered, Fault, NoWay
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http import HttpDelivery
from tarry.service.delivery.names import Names
from tarry.service.delivery.ways import addresses_of, allowed_of
from tests.integration.hostile import OK, Hostile
from tests.service.delivery.sending import HERE, closed, request, run, send, send_all
from tests.service.delivery.serving import saying, serving, silent

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
    assert (host,) == run(addresses_of(host, Names()))


def test_names_below_localhost_are_this_machine(dns: dict[str, list[str]]) -> None:
    """DNS is not asked about them: it may know nothing, or something else."""
    dns["localhost"], dns["a.localhost"] = ["127.0.0.1"], ["192.0.2.1"]
    assert ("127.0.0.1",) == run(addresses_of("a.localhost", Names()))


def test_every_connection_is_judged(dns: dict[str, list[str]]) -> None:
    """Also when the name was looked up before: what is remembered is not what is allowed."""
    guard = Asked()
    dns["target.example"] = ["169.254.169.254", "127.0.0.1"]

    async def main() -> list[Delivered]:
        async with serving(saying(OK)) as served:
            url = served.url.replace("127.0.0.1", "target.example")
            return await send_all(HttpDelivery(guard), request(url), request(url))

    first, second = run(main())
    assert [200, 200] == [first.status, second.status]
    pair = [("169.254.169.254", "target.example"), ("127.0.0.1", "target.example")]
    assert guard.asked[:2] == pair
    assert guard.asked == pair * (len(guard.asked) // 2)
    assert len(guard.asked) >= 2 * 2


def test_what_is_refused_is_left_out() -> None:
    """The first refusal is the reason when nothing is left."""
    allowed = allowed_of(["10.0.0.1", "127.0.0.1", "::ffff:127.0.0.1"], "h.example", HERE)
    assert ["127.0.0.1"] == allowed
    with pytest.raises(NoWay, match=r"10\.0\.0\.1, a private address") as no:
        allowed_of(["10.0.0.1", "127.0.0.1"], "h.example", Guard())
    assert Fault.BLOCKED is no.value.fault
    with pytest.raises(NoWay, match="has no address"):
        allowed_of([], "h.example", HERE)


def test_an_address_that_refuses_is_followed_by_the_next(dns: dict[str, list[str]]) -> None:
    """What answered is what is told."""
    dns["two.example"] = ["::1", "127.0.0.1"]

    async def main() -> Delivered:
        async with serving(saying(OK)) as served:
            url = served.url.replace("127.0.0.1", "two.example")
            return (await send_all(HttpDelivery(HERE), request(url)))[0]

    delivered = run(main())
    assert (200, "127.0.0.1") == (delivered.status, delivered.remote)
    assert delivered.dns_ms is not None


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ECONNREFUSED, Fault.REFUSED),
        (errno.ENETUNREACH, Fault.REFUSED),
        (errno.EMFILE, Fault.OURS),
        (errno.ENOBUFS, Fault.OURS),
    ],
)
def test_whose_fault_no_connection_is(
    number: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's, unless it was ours that ran out."""

    async def fail(*_: object) -> Any:
        raise OSError(number, "words")

    monkeypatch.setattr(ways, "dial", fail)
    delivered = send("http://127.0.0.1:1/")
    assert fault is delivered.fault
    assert "words" in (delivered.error or "")


def test_a_name_in_a_certificate_and_an_address_in_one(hostile: Hostile) -> None:
    """Both are compared with what the URL says."""
    url = hostile.tls["good"] + "ok"
    assert 200 == send(url, ca=hostile.ca).status
    assert 200 == send(url.replace("127.0.0.1", "localhost"), ca=hostile.ca).status
    delivered = send(url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), ca=hostile.ca)
    assert Fault.BLOCKED is delivered.fault


def test_a_name_that_is_not_in_the_certificate(hostile: Hostile, dns: dict[str, list[str]]) -> None:
    """The words say what is wrong with it."""
    dns["other.example"] = ["127.0.0.1"]
    url = hostile.tls["good"].replace("127.0.0.1", "other.example") + "ok"
    delivered = send(url, ca=hostile.ca)
    assert Fault.TLS is delivered.fault
    assert "The certificate is not in order: Hostname mismatch" in (delivered.error or "")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00"])
def test_a_handshake_that_fails_leaves_nothing(hostile: Hostile, said: bytes) -> None:
    """The server hangs up, speaks something else, or stops in the middle."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)

    async def main() -> tuple[Delivered, int]:
        async with serving(behave) as served:
            delivery = HttpDelivery(HERE, ca=hostile.ca, max_connections=3)
            delivered = await delivery.send(request(served.url.replace("http:", "https:")))
            return delivered, await closed(delivery)

    delivered, left = run(main())
    assert (Fault.TLS, 3) == (delivered.fault, left)
    assert "TLS" in (delivered.error or "")


def test_a_server_that_speaks_before_tls(hostile: Hostile) -> None:
    """What it says is not taken for a part of the handshake, nor for an answer."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await silent(reader, writer)

    async def main() -> Delivered:
        async with serving(greet) as served:
            url = served.url.replace("http:", "https:")
            return (await send_all(HttpDelivery(HERE, ca=hostile.ca), request(url)))[0]

    assert Fault.TLS is run(main()).fault
