"""The sockets that libcurl waits for."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

import pytest

from tarry.service.delivery.driver import Driver
from tarry.service.delivery.http import HttpDelivery
from tarry.service.delivery.library import pycurl
from tarry.service.delivery.sockets import EpollSockets, PortableSockets, Sockets, make_sockets
from tests.integration.hostile import Hostile
from tests.service.delivery.sending import HERE, request, send_all

KINDS = [PortableSockets, *([EpollSockets] if hasattr(select, "epoll") else [])]


@pytest.mark.parametrize("make", KINDS)
def test_what_is_ready_is_told(make: Callable[[], Sockets]) -> None:
    """For what it was watched for last, and not after it was forgotten."""
    sockets = make()
    here, there = socket.socketpair()
    try:
        sockets.watch(here.fileno(), pycurl.POLL_IN)
        quiet = list(sockets.ready())
        sockets.watch(here.fileno(), pycurl.POLL_OUT)
        writable = list(sockets.ready())
        there.send(b"x")
        sockets.watch(here.fileno(), pycurl.POLL_INOUT)
        both = list(sockets.ready())
        sockets.forget(here.fileno())
        sockets.forget(here.fileno())
        forgotten = list(sockets.ready())
    finally:
        sockets.close()
        here.close()
        there.close()
    fd, reads, writes = both[0][0], pycurl.CSELECT_IN, pycurl.CSELECT_OUT
    assert ([], [(fd, writes)], [(fd, reads | writes)], []) == (quiet, writable, both, forgotten)


@pytest.mark.parametrize("make", KINDS)
def test_a_closed_connection_can_be_read(make: Callable[[], Sockets]) -> None:
    """So that libcurl finds its end."""
    sockets = make()
    here, there = socket.socketpair()
    try:
        sockets.watch(here.fileno(), pycurl.POLL_IN)
        there.close()
        ready = [events & pycurl.CSELECT_IN for _, events in sockets.ready()]
    finally:
        sockets.close()
        here.close()
    assert [pycurl.CSELECT_IN] == ready


@pytest.mark.parametrize("make", KINDS)
def test_attempts_are_made_on_either(make: Callable[[], Sockets], hostile: Hostile) -> None:
    """One after the other over a connection that stays."""

    async def run() -> list[object]:
        delivery = HttpDelivery(HERE)
        delivery._driver = Driver(sockets=make())
        sent = [request(hostile.url + "ok")] * 3
        return [each.status for each in await send_all(delivery, *sent)]

    assert [200, 200, 200] == asyncio.run(run())


def test_the_best_is_taken() -> None:
    """On Linux that is epoll."""
    assert KINDS[-1] is type(make_sockets())
