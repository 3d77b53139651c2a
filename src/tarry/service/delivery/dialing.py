"""Connecting to one of several addresses: the first that answers, in the order they come in."""

from __future__ import annotations

import asyncio
from collections import deque
from socket import (
    AF_INET,
    AF_INET6,
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SOCK_STREAM,
    SOL_SOCKET,
    TCP_NODELAY,
    socket,
)
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD_START = 0.25
"""Seconds that an address has to itself before the next one is tried too (RFC 8305, section 5)."""


async def dial(addresses: Sequence[str], port: int) -> tuple[socket, str]:
    """Return a connected socket and its address, or raise the OSError of the last that failed."""
    if len(addresses) == 1:
        return await _dial(addresses[0], port)
    loop, left = asyncio.get_running_loop(), deque(addresses)
    racing: set[asyncio.Task[tuple[socket, str]]] = set()
    failure: BaseException = OSError("there is no address")
    try:
        while left or racing:
            if left:
                racing.add(loop.create_task(_dial(left.popleft(), port)))
            head_start = _HEAD_START if left else None
            ended, _ = await asyncio.wait(
                racing, timeout=head_start, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                racing.remove(task)
                error = task.exception()
                if error is None:
                    return task.result()
                failure = error
        raise failure
    finally:
        del failure  # it knows this frame
        for task in racing:
            task.add_done_callback(_close)
            task.cancel()


def _close(task: asyncio.Task[tuple[socket, str]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].close()


async def _dial(address: str, port: int) -> tuple[socket, str]:
    made = socket(AF_INET6 if ":" in address else AF_INET, SOCK_STREAM)
    try:
        made.setblocking(False)  # noqa: FBT003 - there is no other way to say it
        made.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
        made.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made, address
