"""A request on its way, until its answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from tarry.service.delivery.deadlines import WHO
from tarry.service.delivery.exchange import Delivered

if TYPE_CHECKING:
    from tarry.service.delivery.deadlines import Deadline
    from tarry.service.delivery.exchange import Fault, Request


class Sender(Protocol):
    """Who has a request in hand."""

    def leave(self, sending: Sending) -> None:
        """Let go of a request that nobody waits for any more."""
        ...

    def late(self, sending: Sending) -> None:
        """End a request whose time is over."""
        ...


class Carrier(Protocol):
    """The connection that a request is on."""

    def drop(self) -> None:
        """Close it at once."""
        ...

    def failed(self, fault: Fault, words: str) -> Delivered:
        """Return what a request came to that got no answer here."""
        ...


class Sending(asyncio.Future[Delivered]):
    """A request on its way. It is no coroutine: nothing has to be woken but who waits for it."""

    deadline: Deadline | None = None
    connecting: asyncio.Task[bool] | None = None
    connection: Carrier | None = None
    was_sent: bool = False
    """Whether it was sent before, on a connection that had been closed in silence."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sender: Sender,
        request: Request,
        head: bytes,
        started: float,
    ) -> None:
        super().__init__(loop=loop)
        self._sender = sender
        self.request: Request = request
        self.head: bytes = head
        """What goes out before the body."""
        self.started: float = started

    def end(self, delivered: Delivered, now: float) -> None:
        """Say what came of it."""
        if self.deadline is not None:
            self.deadline[WHO] = None
        if not self.done():
            delivered.duration_ms = (now - self.started) * 1000
            self.set_result(delivered)

    def late(self) -> None:
        """Learn that the time is over."""
        if not self.done():
            self._sender.late(self)

    def fail(self, error: BaseException) -> None:
        """Say that we have a bug: whoever waits for it is told."""
        if self.deadline is not None:
            self.deadline[WHO] = None
        if not self.done():
            self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Break it off, and leave nothing behind."""
        if not super().cancel(msg):
            return False
        if self.deadline is not None:
            self.deadline[WHO] = None
        self._sender.leave(self)
        return True
