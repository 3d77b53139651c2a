"""Copies of a plain function, each in a thread, and how one of them ended."""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from tarry.errors import LimitReached
from tarry.runtime.clocks import world

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MOST_THREADS = 256
"""Attempts in threads at a time, those that were cut off and still run included."""

_places = [threading.BoundedSemaphore(MOST_THREADS)]


def _after_fork() -> None:
    """Count from nothing in a forked child, which has none of its parent's threads."""
    _places[0] = threading.BoundedSemaphore(MOST_THREADS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Ended(Generic[T]):
    """How one copy ended."""

    __slots__ = ("_error", "_result", "number")

    def __init__(self, number: int, result: T | None, error: BaseException | None) -> None:
        self.number: int = number
        self._result = result
        self._error = error

    @property
    def has_result(self) -> bool:
        """Whether there is a result, and not an error."""
        return self._error is None

    def result(self) -> T:
        """Return the result, or raise the error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: leave no cycle behind
        return self._result  # type: ignore[return-value]


class Threads(Generic[T]):
    """Copies of a plain function of the copy's number, each in a thread.

    A thread cannot be stopped from outside: one that is no longer waited for runs on, and what
    it comes to is thrown away. The number of those is bounded.
    """

    __slots__ = ("_discard", "_ended", "_fn", "_left", "_lock")

    def __init__(
        self, fn: Callable[[int], T], discard: Callable[[T], object] | None = None
    ) -> None:
        self._fn = fn
        self._discard = discard
        self._ended: SimpleQueue[Ended[T]] = SimpleQueue()
        self._lock = threading.Lock()
        self._left = False

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start one copy; it sees the caller's context variables."""
        places = _places[0]
        if not places.acquire(blocking=False):
            msg = (
                f"{MOST_THREADS} attempts run in threads already, most of them probably cut off "
                "by a timeout; give the client inside a timeout of its own (tarry.remaining())"
            )
            raise LimitReached(msg)
        run, args = copy_context().run, (self._run, places, number, delay)
        try:
            threading.Thread(target=run, args=args, name="tarry-attempt", daemon=True).start()
        except BaseException:
            places.release()
            raise

    def next(self, timeout: float | None) -> Ended[T] | None:
        """Return the next copy that ended, or None when the time is up first."""
        try:
            return self._ended.get(timeout=timeout and min(timeout, threading.TIMEOUT_MAX))
        except Empty:
            return None

    def _run(self, places: threading.Semaphore, number: int, delay: float) -> None:
        try:
            if delay:
                world.sleep(delay, None)
                if self._left:
                    return
            ended = Ended(number, self._fn(number), None)
        except BaseException as error:
            ended = Ended[T](number, None, error)
        finally:
            places.release()
        with self._lock:
            if not self._left:
                self._ended.put(ended)
                return
        self._throw_away(ended)

    def leave(self) -> None:
        """Wait for no more copies: from now on each discards its result when it has one."""
        with self._lock:
            self._left = True
        while (ended := self.next(0.0)) is not None:
            self._throw_away(ended)

    def _throw_away(self, ended: Ended[T]) -> None:
        if self._discard is not None and ended.has_result:
            self._discard(ended.result())
