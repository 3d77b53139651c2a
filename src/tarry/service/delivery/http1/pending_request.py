"""Requests that wait for their response, and one timer for the deadlines of all requests."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tarry.service.delivery.messages import DeliveryResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery.messages import DeliveryRequest, Fault

Deadline: TypeAlias = list[Any]
"""`[due, tie_breaker, callback]`; the callback is None once the deadline is cancelled.

A list and not an object with `__lt__`: the heap compares entries often, and lists compare in C.
"""
CALLBACK = 2
"""The index of the callback in a Deadline."""
_MIN_COMPACT_SIZE = 512


class DeadlineTimer:
    """Calls back when deadlines pass.

    All deadlines share one timer of the event loop, because most deadlines are cancelled early.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[Deadline] = []
        self._tie_breaker = count()
        self._compact_size = _MIN_COMPACT_SIZE
        """The size of the heap at which cancelled deadlines are removed from it."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def __len__(self) -> int:
        """Return the number of deadlines, including cancelled ones that were not removed yet."""
        return len(self._heap)

    def add(self, due: float, callback: Callable[[], None]) -> Deadline:
        """Call `callback` at the time `due`. To cancel, set `deadline[CALLBACK] = None`."""
        heap, deadline = self._heap, [due, next(self._tie_breaker), callback]
        if len(heap) >= self._compact_size:
            heap[:] = [each for each in heap if each[CALLBACK] is not None]
            heapify(heap)
            self._compact_size = max(_MIN_COMPACT_SIZE, 2 * len(heap))
        heappush(heap, deadline)
        if self._timer is None or due < self._timer_due:
            self._set_timer(due)
        return deadline

    def close(self) -> None:
        """Cancel all deadlines."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        delay = max(0.0, due - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        # A timer may fire early (uvloop's by up to 1.4 ms). The clock decides which deadlines have
        # passed, and the timer is set again for the others.
        self._timer = None
        heap, now = self._heap, self._clock()
        while heap and (heap[0][0] <= now or heap[0][CALLBACK] is None):
            callback = heappop(heap)[CALLBACK]
            if callback is not None:
                # Not called directly, so that an error in one callback does not affect the others.
                asyncio.get_running_loop().call_soon(callback)
        if heap:
            self._set_timer(heap[0][0])


class RequestOwner(Protocol):
    """The connection pool of a request. A protocol, because its module imports this one."""

    def abort(self, pending: PendingRequest) -> None:
        """Drop a request that was cancelled."""
        ...

    def time_out(self, pending: PendingRequest) -> None:
        """Fail a request whose deadline has passed."""
        ...


class RequestConnection(Protocol):
    """The connection of a request. A protocol, because its module imports this one."""

    def abort(self) -> None:
        """Close the connection at once."""
        ...

    def failure(self, fault: Fault, message: str) -> DeliveryResult:
        """Return the result of a request that got no response on this connection."""
        ...


class PendingRequest(asyncio.Future[DeliveryResult]):
    """A request without a response yet.

    A future that is completed by callbacks, not a task: the event loop would have to resume the
    coroutine of a task for each step of the exchange.
    """

    deadline: Deadline | None = None
    connecting: asyncio.Task[bool] | None = None
    """The task that opens a connection for this request."""
    connection: RequestConnection | None = None
    is_resent: bool = False
    """Whether the request was sent before, on an idle connection that the target had closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: RequestOwner,
        request: DeliveryRequest,
        head: bytes,
        started: float,
    ) -> None:
        super().__init__(loop=loop)
        self._owner = owner
        self.request: DeliveryRequest = request
        self.head: bytes = head
        """The request line and the header lines."""
        self.started: float = started

    def complete(self, result: DeliveryResult, now: float) -> None:
        """Set the result, unless the request was cancelled."""
        if self.deadline is not None:
            self.deadline[CALLBACK] = None
        if not self.done():
            result.duration_ms = (now - self.started) * 1000
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set an unexpected error, which is raised in the caller that awaits the request."""
        if self.deadline is not None:
            self.deadline[CALLBACK] = None
        if not self.done():
            self.set_exception(error)

    def on_deadline(self) -> None:
        """Called when the deadline has passed."""
        if not self.done():
            self._owner.time_out(self)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the request and free its connection."""
        if not super().cancel(msg):
            return False
        if self.deadline is not None:
            self.deadline[CALLBACK] = None
        self._owner.abort(self)
        return True
