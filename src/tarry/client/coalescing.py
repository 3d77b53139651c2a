"""Coalesces `enqueue` calls: calls that wait at the same time share one request, a batch.

At most `MAX_REQUESTS` requests are under way. A call that finds fewer is sent at once, so a program
that makes one call at a time waits no longer. Otherwise the call waits, and when a request ends,
one of the waiting calls sends all of them as a batch. No timer, thread or task is needed.

If the call that sends a batch is cancelled, the other calls of the batch wait again, and one of
them sends the batch again. The idempotency keys of the tasks prevent that a task is added twice.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tarry.client.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.client.api import ClientRequest
    from tarry.wire.tasks import RetryTask

MAX_REQUESTS = 2
"""With a second request, the service parses a batch while it stores the one before."""
MAX_COALESCED_TASKS = 500
MAX_COALESCED_BYTES = 1 << 20
"""Size of the tasks of a batch. A larger task is sent alone."""


class Event(Protocol):
    """What threading, asyncio and trio events have in common."""

    def set(self) -> object:
        """Wake the call that waits for the event."""
        ...


EventT = TypeVar("EventT", bound=Event)


class EnqueueCall(Generic[EventT]):
    """One call of `enqueue`, with its result or error once it is done."""

    def __init__(self, request: ClientRequest[RetryTask]) -> None:
        self.request = request
        """The request that sends this task alone."""
        self.size: int = len(request.content or b"")
        self.is_waiting: bool = True
        """Whether the call is in the queue, and not in a request that is under way."""
        self.is_done: bool = False
        self.is_sent_alone: bool = False
        """Whether the service has rejected the batch: then the call sends its own request."""
        self.task: RetryTask | None = None
        self.error: Exception | None = None
        self.event: EventT | None = None
        """The event for which the call waits; None until it waits for the first time."""

    def result(self) -> RetryTask:
        """Return the task, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.task is not None  # noqa: S101 - the call is done, and was not sent alone
        return self.task


class Coalescer(Generic[EventT]):
    """The `enqueue` calls of a client that wait, and the number of requests under way.

    `new_event` returns an event for which a call can wait. The methods may be called by any thread.
    """

    def __init__(self, new_event: Callable[[], EventT]) -> None:
        self._new_event = new_event
        self._waiting: deque[EnqueueCall[EventT]] = deque()
        self._request_count = 0
        self._lock = Lock()

    def add(self, request: ClientRequest[RetryTask]) -> EnqueueCall[EventT]:
        """Add a call."""
        call: EnqueueCall[EventT] = EnqueueCall(request)
        with self._lock:
            self._waiting.append(call)
        return call

    def take_batch(self, call: EnqueueCall[EventT]) -> list[EnqueueCall[EventT]]:
        """Return the calls that `call` has to send now; if there are none, it waits for its event.

        The caller reports the end of the request with `complete` or `fail`.
        """
        with self._lock:
            if call.is_done:
                return []
            if self._request_count == MAX_REQUESTS or not call.is_waiting:
                call.event = self._new_event()
                return []
            batch: list[EnqueueCall[EventT]] = []
            size = 0
            while self._waiting and len(batch) < MAX_COALESCED_TASKS:
                size += self._waiting[0].size
                if batch and size > MAX_COALESCED_BYTES:
                    break
                taken_call = self._waiting.popleft()
                taken_call.is_waiting = False
                batch.append(taken_call)
            self._request_count += 1
            self._wake_sender()
            return batch

    def complete(
        self,
        batch: Sequence[EnqueueCall[EventT]],
        results: Sequence[RetryTask | Exception | None],
    ) -> None:
        """Set the task or the error of each call; None: the call sends its own request."""
        with self._lock:
            for call, result in zip(batch, results, strict=True):
                if result is None:
                    call.is_sent_alone = True
                elif isinstance(result, Exception):
                    call.error = result
                else:
                    call.task = result
                _finish(call)
            self._end_request()

    def fail(self, batch: Sequence[EnqueueCall[EventT]], error: BaseException) -> None:
        """Handle the error of a request.

        If the service has rejected a batch as invalid, each of its calls is sent alone. If the
        sender was cancelled, the calls wait again.
        """
        with self._lock:
            if not isinstance(error, Exception):
                for call in reversed(batch):
                    call.is_waiting = True
                    self._waiting.appendleft(call)
            elif len(batch) > 1 and isinstance(error, InvalidRequest):
                for call in batch:
                    call.is_sent_alone = True
                    _finish(call)
            else:
                for call in batch:
                    # Each caller gets its own error, because `raise` changes the traceback.
                    call.error = error if call is batch[0] else _copy_error(error)
                    _finish(call)
            self._end_request()

    def withdraw(self, call: EnqueueCall[EventT]) -> None:
        """Remove a call whose caller was cancelled, unless its request is under way."""
        with self._lock:
            if call.is_waiting:
                call.is_waiting = False
                self._waiting.remove(call)
            self._wake_sender()  # the call may have been woken to send the others

    def _end_request(self) -> None:
        self._request_count -= 1
        self._wake_sender()

    def _wake_sender(self) -> None:
        if self._waiting and self._request_count < MAX_REQUESTS:
            event = self._waiting[0].event
            if event is not None:  # else the call has just been added, and takes a batch itself
                event.set()


def _finish(call: EnqueueCall[EventT]) -> None:
    call.is_done = True
    if call.event is not None:
        call.event.set()


def _copy_error(error: Exception) -> Exception:
    copied = copy(error)
    copied.__cause__ = error.__cause__
    notes: list[str] | None = getattr(error, "__notes__", None)
    if notes is not None:
        copied.__notes__ = [*notes]
    return copied
