"""Looking names up: in threads, each name once at a time, and not again for a minute.

Whoever uses an address has the guard judge it, each time: what is remembered is what DNS said.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

from tarry.service.delivery.messages import DeliveryError, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

Addresses: TypeAlias = "tuple[str, ...]"
_Answer: TypeAlias = "Addresses | str"
"""The addresses, or in words why there are none."""

_FRESH_SECONDS = 60.0
_MOST_KNOWN = 1024
_MOST_AT_ONCE = 64
"""Names that are looked up at the same time: one that nobody answers for holds a thread."""
_MOST_ADDRESSES = 8


class DnsCache:
    """The addresses of names, as the system's resolver says and orders them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Addresses]] = {}
        self._asked: dict[str, asyncio.Future[_Answer]] = {}
        self._turn = asyncio.Semaphore(_MOST_AT_ONCE)
        self._is_closed = False

    async def look_up(self, host: str) -> Addresses:
        """Return the addresses of a name, or raise NoWay; cancelled, it leaves no one in line."""
        known = self._fresh(host)
        if known is None and host not in self._asked:
            await self._turn.acquire()
            known = self._fresh(host)
            if known is None and host not in self._asked:
                self._ask(host)
            else:  # another was faster
                self._turn.release()
        if known is not None:
            return known
        answer = await asyncio.shield(self._asked[host])
        if isinstance(answer, str):
            raise DeliveryError(Fault.INTERNAL if self._is_closed else Fault.DNS, answer)
        return answer

    async def close(self) -> None:
        """Wait for no answer any more."""
        self._is_closed = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result("the delivery is closed")

    def _fresh(self, host: str) -> Addresses | None:
        until, addresses = self._known.get(host, (0.0, ()))
        return addresses if asyncio.get_running_loop().time() < until else None

    def _ask(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        # No pool of threads: its few would wait for dead names, and the process for them.
        thread = Thread(target=_resolve, args=(host, loop, self._told), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._turn.release()
            raise DeliveryError(Fault.INTERNAL, f"no thread to look a name up: {error}") from None
        self._asked[host] = loop.create_future()

    def _told(self, host: str, answer: _Answer) -> None:
        self._turn.release()
        if not isinstance(answer, str):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[host] = asyncio.get_running_loop().time() + _FRESH_SECONDS, answer
        asked = self._asked.pop(host)
        if not asked.done():
            asked.set_result(answer)


def _resolve(
    host: str, loop: asyncio.AbstractEventLoop, tell: Callable[[str, _Answer], None]
) -> None:
    answer: _Answer
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answer = tuple(dict.fromkeys(str(each[4][0]) for each in found))[:_MOST_ADDRESSES]
    except OSError as error:
        answer = f"Could not resolve {host}: {error.strerror or error}"
    except UnicodeError as error:
        answer = f"Could not resolve {host}: {error}"
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(tell, host, answer)
