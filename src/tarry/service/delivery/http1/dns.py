"""A cache of DNS lookups, with one lookup per name at a time and entries valid for a minute.

The addresses in the cache are not checked. The guard checks an address each time it is used.
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
"""The addresses, or an error message."""

_TTL_S = 60.0
_MAX_CACHED_NAMES = 1024
_MAX_LOOKUPS = 64
"""Concurrent lookups. Each occupies a thread, for long if the DNS server does not answer."""
_MAX_ADDRESSES = 8


class DnsCache:
    """Caches the addresses of host names, in the order that the system's resolver returned."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[float, Addresses]] = {}
        """By name: the time at which the entry expires, and the addresses."""
        self._lookups: dict[str, asyncio.Future[_Answer]] = {}
        self._free_lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._is_closed = False

    async def resolve(self, host: str) -> Addresses:
        """Return the addresses of a name, or raise DeliveryError."""
        addresses = self._get_cached(host)
        if addresses is None and host not in self._lookups:
            await self._free_lookups.acquire()
            addresses = self._get_cached(host)
            if addresses is None and host not in self._lookups:
                self._start_lookup(host)
            else:  # another caller has started or finished the lookup meanwhile
                self._free_lookups.release()
        if addresses is not None:
            return addresses
        # Shielded: cancelling this caller must not cancel the lookup, for which other callers may
        # be waiting.
        answer = await asyncio.shield(self._lookups[host])
        if isinstance(answer, str):
            raise DeliveryError(Fault.INTERNAL if self._is_closed else Fault.DNS, answer)
        return answer

    async def close(self) -> None:
        """Fail the callers that wait for a lookup."""
        self._is_closed = True
        for lookup in self._lookups.values():
            if not lookup.done():
                lookup.set_result("the delivery is closed")

    def _get_cached(self, host: str) -> Addresses | None:
        expires_at, addresses = self._cached.get(host, (0.0, ()))
        return addresses if asyncio.get_running_loop().time() < expires_at else None

    def _start_lookup(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        # One thread per lookup instead of a thread pool: names that cannot be resolved would occupy
        # all threads of a pool, and the process would wait for those threads at exit.
        thread = Thread(target=_resolve, args=(host, loop, self._on_resolved), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._free_lookups.release()
            raise DeliveryError(
                Fault.INTERNAL, f"cannot start a thread for a DNS lookup: {error}"
            ) from None
        self._lookups[host] = loop.create_future()

    def _on_resolved(self, host: str, answer: _Answer) -> None:
        self._free_lookups.release()
        if not isinstance(answer, str):
            if len(self._cached) >= _MAX_CACHED_NAMES:
                self._cached.clear()
            self._cached[host] = asyncio.get_running_loop().time() + _TTL_S, answer
        lookup = self._lookups.pop(host)
        if not lookup.done():
            lookup.set_result(answer)


def _resolve(
    host: str, loop: asyncio.AbstractEventLoop, on_resolved: Callable[[str, _Answer], None]
) -> None:
    """Resolve a name in a thread of its own, and pass the answer to the event loop."""
    answer: _Answer
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answer = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))[:_MAX_ADDRESSES]
    except OSError as error:
        answer = f"Could not resolve {host}: {error.strerror or error}"
    except UnicodeError as error:
        answer = f"Could not resolve {host}: {error}"
    with suppress(RuntimeError):  # raised if the loop is closed; then no caller waits
        loop.call_soon_threadsafe(on_resolved, host, answer)
