"""A request on its way, until its answer."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tarry.service.delivery.messages import DeliveryResult

if TYPE_CHECKING:
    from collections.abc import Callable

if TYPE_CHECKING:
    from tarry.service.delivery.messages import DeliveryRequest, Fault


class Sender(Protocol):
    """Who has a request in hand."""

    def leave(self, sending: PendingRequest) -> None:
        """Let go of a request that nobody waits for any more."""
        ...

    def late(self, sending: PendingRequest) -> None:
        """End a request whose time is over."""
        ...


class Carrier(Protocol):
    """The connection that a request is on."""

    def drop(self) -> None:
        """Close it at once."""
        ...

    def failed(self, fault: Fault, words: str) -> DeliveryResult:
        """Return what a request came to that got no answer here."""
        ...


class PendingRequest(asyncio.Future[DeliveryResult]):
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
        request: DeliveryRequest,
        head: bytes,
        started: float,
    ) -> None:
        super().__init__(loop=loop)
        self._sender = sender
        self.request: DeliveryRequest = request
        self.head: bytes = head
        """What goes out before the body."""
        self.started: float = started

    def end(self, delivered: DeliveryResult, now: float) -> None:
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


Deadline: TypeAlias = list[Any]
"""A time, a number that no other has, and who is told at `WHO`; None: nobody is any more. A list
compares itself by its first items, which a heap does all the time."""
WHO = 2
_FEW = 512


class Late(Protocol):
    """What has to end in time."""

    def late(self) -> None:
        """Learn that the time is over."""
        ...


class DeadlineTimer:
    """Tells requests when their time is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[Deadline] = []
        self._order = count()
        self._most = _FEW
        """How many there may be before those are removed that nobody is told of any more."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        """Return how many there are, with some of which nobody is told any more."""
        return len(self._heap)

    def add(self, at: float, who: Late) -> Deadline:
        """Set a deadline."""
        heap, deadline = self._heap, [at, next(self._order), who]
        if len(heap) >= self._most:
            heap[:] = [each for each in heap if each[WHO] is not None]
            heapify(heap)
            self._most = max(_FEW, 2 * len(heap))
        heappush(heap, deadline)
        if self._timer is None or at < self._timer_at:
            self._arm(at)
        return deadline

    def close(self) -> None:
        """Tell nobody any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        delay = max(0.0, at - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_time)

    def _on_time(self) -> None:
        # A timer may fire early: the clock decides, and the timer is set anew.
        self._timer = None
        heap, now = self._heap, self._clock()
        while heap and (heap[0][0] <= now or heap[0][WHO] is None):
            who = heappop(heap)[WHO]
            if who is not None:
                asyncio.get_running_loop().call_soon(who.late)
        if heap:
            self._arm(heap[0][0])
