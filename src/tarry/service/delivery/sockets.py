"""The sockets that libcurl waits for, behind one file descriptor that an event loop can watch.

A watcher of the loop for each socket costs more than the system call it makes, and sockets come and
go with every request.
"""

from __future__ import annotations

import select
import selectors
from typing import TYPE_CHECKING, Protocol

from tarry.service.delivery.library import pycurl

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_AT_ONCE = 256
_CURL = ((pycurl.CSELECT_IN, 0b11001), (pycurl.CSELECT_OUT, 0b01100))
"""What libcurl has to know, and the events of epoll (IN 1, OUT 4, ERR 8, HUP 16) that mean it."""
_READY = tuple(sum(bit for bit, mask in _CURL if events & mask) for events in range(32))
_EVENTS = {pycurl.POLL_NONE: 0, pycurl.POLL_IN: 1, pycurl.POLL_OUT: 4, pycurl.POLL_INOUT: 5}


class Sockets(Protocol):
    """Sockets to wait for, and what for, in libcurl's words."""

    def fileno(self) -> int:
        """Return what is readable while any of them is ready."""
        ...

    def watch(self, fd: int, interest: int) -> None:
        """Wait for a socket, or for something else of it than before."""
        ...

    def forget(self, fd: int) -> None:
        """Wait for a socket no longer."""
        ...

    def ready(self) -> Iterable[tuple[int, int]]:
        """Return those that are ready, and for what."""
        ...

    def close(self) -> None:
        """Wait for nothing more."""
        ...


class EpollSockets:
    """Sockets as Linux watches them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._known: set[int] = set()

    def fileno(self) -> int:
        """Return what is readable while any of them is ready."""
        return self._epoll.fileno()

    def watch(self, fd: int, interest: int) -> None:
        """Wait for a socket, or for something else of it than before."""
        if fd in self._known:
            self._epoll.modify(fd, _EVENTS[interest])
        else:
            self._epoll.register(fd, _EVENTS[interest])
            self._known.add(fd)

    def forget(self, fd: int) -> None:
        """Wait for a socket no longer."""
        if fd in self._known:
            self._known.remove(fd)
            self._epoll.unregister(fd)

    def ready(self) -> Iterable[tuple[int, int]]:
        """Return those that are ready, and for what."""
        return [(fd, _READY[events & 31]) for fd, events in self._epoll.poll(0, _MOST_AT_ONCE)]

    def close(self) -> None:
        """Wait for nothing more."""
        self._epoll.close()


class PortableSockets:
    """Sockets as Python watches them on other systems; its events are libcurl's."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Return what is readable while any of them is ready."""
        fd: int = getattr(self._selector, "fileno")()  # noqa: B009 - kqueue's and epoll's have it
        return fd

    def watch(self, fd: int, interest: int) -> None:
        """Wait for a socket, or for something else of it than before."""
        self.forget(fd)
        if interest:
            self._selector.register(fd, interest)

    def forget(self, fd: int) -> None:
        """Wait for a socket no longer."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def ready(self) -> Iterable[tuple[int, int]]:
        """Return those that are ready, and for what."""
        return [(key.fd, events) for key, events in self._selector.select(0)]

    def close(self) -> None:
        """Wait for nothing more."""
        self._selector.close()


def make_sockets() -> Sockets:
    """Return the best that this system has."""
    return EpollSockets() if hasattr(select, "epoll") else PortableSockets()
