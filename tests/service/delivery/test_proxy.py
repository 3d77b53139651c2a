from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tarry.service.delivery.exchange import Delivered, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http import HttpDelivery
from tests.integration.hostile import OK, Hostile
from tests.service.delivery.sending import request, send_all


class Proxy:
    """An egress proxy: opens a way to one port of this machine, or answers as it was told."""

    def __init__(self, says: bytes | None, port: int) -> None:
        self.says = says
        self.port = port
        self.asked: list[str] = []
        self.url = ""
        self.tasks: list[asyncio.Task[None] | None] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until it ends or the proxy does."""
        self.tasks.append(asyncio.current_task())
        try:
            await self._answer(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.partition("\r\n")[0])
        if self.says is not None:
            writer.write(self.says)
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"HTTP/1.1 200 Open\r\nX-Proxy: 1\r\n\r\n")
        await asyncio.gather(pump(reader, back), pump(there, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes until there are no more."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def running(says: bytes | None = None, port: int = 0) -> AsyncIterator[Proxy]:
    """Run a proxy."""
    proxy = Proxy(says, port)
    server = await asyncio.start_server(proxy.answer, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in proxy.tasks:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await asyncio.sleep(0)  # transports close in the next round


def through(
    url: str, says: bytes | None = None, port: int = 0, ca: str | None = None
) -> tuple[Delivered, list[str]]:
    """Send a request through a proxy; return what came of it and what the proxy was asked."""

    async def run() -> tuple[Delivered, list[str]]:
        async with running(says, port) as proxy:
            delivery = HttpDelivery(Guard(), proxy=proxy.url, ca=ca)
            return (await send_all(delivery, request(url)))[0], proxy.asked

    return asyncio.run(run())


def test_plain_http_goes_to_the_proxy() -> None:
    """Which looks the name up: here nobody knows it."""
    delivered, asked = through("http://only-there.invalid/x", OK)
    assert 200 == delivered.status
    assert ["POST http://only-there.invalid/x HTTP/1.1"] == asked


def test_https_goes_through_a_tunnel(hostile: Hostile) -> None:
    """TLS is with the target, and the proxy's headers are not the answer's."""
    port = int(hostile.tls["good"].rpartition(":")[2].strip("/"))
    delivered, asked = through("https://wrong-name.invalid/ok", port=port, ca=hostile.ca)
    assert Fault.TLS is delivered.fault
    assert ["CONNECT wrong-name.invalid:443 HTTP/1.1"] == asked


@pytest.mark.parametrize(
    ("status", "fault"),
    [(403, Fault.BLOCKED), (407, Fault.OURS), (500, Fault.OURS), (502, Fault.REFUSED)],
)
def test_a_proxy_that_does_not_open_the_way(status: int, fault: Fault) -> None:
    """It refuses the target, or fails itself, or finds nobody there."""
    says = f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode()
    assert fault is through("https://target.invalid/", says)[0].fault


def test_a_proxy_that_breaks_is_our_fault() -> None:
    """It hangs up, it is not there, its name is unknown."""
    assert Fault.OURS is through("https://target.invalid/", b"")[0].fault
    for proxy in ("http://127.0.0.1:1", "http://proxy.invalid:3128"):
        for url in ("http://target.invalid/", "https://target.invalid/"):

            async def run(url: str = url, proxy: str = proxy) -> list[Delivered]:
                return await send_all(HttpDelivery(Guard(), proxy=proxy), request(url))

            assert Fault.OURS is asyncio.run(run())[0].fault


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://127.0.0.1/", Fault.BLOCKED),
        ("http://localhost/", Fault.BLOCKED),
        ("http://[fd00:ec2::254]/", Fault.BLOCKED),
        ("http://0x7f.1/", Fault.INVALID),
    ],
)
def test_what_the_url_shows_is_judged_before(url: str, fault: Fault) -> None:
    """The proxy is not even asked."""
    delivered, asked = through(url, OK)
    assert fault is delivered.fault
    assert [] == asked
