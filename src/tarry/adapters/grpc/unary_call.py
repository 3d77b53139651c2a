"""The future that `future()` of a plain channel returns, and the event loop that retries its call.

One event loop in one background thread serves all futures that wait for their next attempt. A small
thread pool runs code that may block: other interceptors that send an attempt, and the user's
callbacks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tarry.adapters.grpc.call import CANCELLED_DURING_BACKOFF, CancelledAttempt, RetriedCall
from tarry.adapters.grpc.library import grpc
from tarry.runtime import drivers

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tarry.adapters.grpc.call import GrpcCall

MAX_BLOCKING_THREADS = 32

_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []
"""Empty, or the one background loop after it has been started."""


def _background_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop; start it if it is not running."""
    with _lock:
        if not _loops:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(ThreadPoolExecutor(MAX_BLOCKING_THREADS, "tarry-future"))
            threading.Thread(target=loop.run_forever, name="tarry-futures", daemon=True).start()
            _loops.append(loop)
        return _loops[0]


def _reset_after_fork() -> None:
    """Drop the loop in a forked child, because its thread exists only in the parent."""
    global _lock  # noqa: PLW0603 - the thread that held it does not exist in the child
    _lock = threading.Lock()
    _loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class RetriedFuture(RetriedCall):
    """A unary call that is retried in the background once its first attempt has failed.

    Neither the caller nor the thread that serves the channel waits for the retries.
    """

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first_attempt: Any) -> None:
        super().__init__(call, send, first_attempt)
        self._future: Future[Any] = Future()
        self._task: asyncio.Task[None] | None = None
        first_attempt.add_done_callback(self._on_first_attempt_done)

    def _on_first_attempt_done(self, first_attempt: Any) -> None:
        if first_attempt.code() is not grpc.StatusCode.OK:
            loop = _background_loop()
            loop.call_soon_threadsafe(self._start, loop, context=self._context)
            return
        try:
            result = self._drive(_result_of)
        except BaseException as error:  # raised by the user's budget or limiter
            self._finish(None, error)
        else:
            self._finish(result, None)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._retry())

    async def _retry(self) -> None:
        result, error = None, None
        try:
            result = await drivers.drive_async(self._call, self._make_attempt, (), {})
        except CancelledAttempt as cancelled:
            error = cancelled.error
        except asyncio.CancelledError:  # by `cancel`, which alone can cancel the task
            error = grpc.FutureCancelledError()
        except Exception as raised:
            error = raised
        try:
            await asyncio.to_thread(self._finish, result, error)  # callbacks may block
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._finish(result, error)

    async def _make_attempt(self) -> Any:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        if self._is_first_attempt:
            attempt = self._next_attempt()
        else:  # interceptors behind this one may block
            attempt = await asyncio.to_thread(self._next_attempt)

        def on_done(_attempt: Any) -> None:
            loop.call_soon_threadsafe(done.set)

        attempt.add_done_callback(on_done)
        await done.wait()
        return self._attempt_result(_result_of, attempt)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)

    def cancel(self) -> bool:
        """Cancel the call; return False if it is done."""
        if self.done():
            return False
        super().cancel()
        task = self._task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        return True

    def cancelled(self) -> bool:
        """Return whether the user has cancelled the call."""
        return self._cancel_token.cancelled and (not self.done() or self._was_cancelled())

    def done(self) -> bool:
        """Return whether the call is done: no further attempt will be made."""
        return self._future.done()

    def running(self) -> bool:
        """Return whether the call is not done yet."""
        return not self.done()

    is_active = running

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the response and return it, or raise the call's error."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return its error, or None after a success."""
        try:
            error = self._future.exception(timeout)
        except TimeoutError:
            raise grpc.FutureTimeoutError from None
        if error is not None and isinstance(error, grpc.FutureCancelledError):
            raise error
        return error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """Wait for the call and return the traceback of its error."""
        error = self.exception(timeout)
        return None if error is None else error.__traceback__

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` with this future when the call is done."""
        self._future.add_done_callback(lambda _: fn(self))

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the call is done; return False if it is done already."""
        if self.done():
            return False
        self._future.add_done_callback(lambda _: callback())
        return True

    def code(self) -> Any:
        """Wait for the call and return its status code."""
        return grpc.StatusCode.CANCELLED if self._was_cancelled() else self._last_attempt.code()

    def details(self) -> Any:
        """Wait for the call and return the details of its status."""
        return CANCELLED_DURING_BACKOFF if self._was_cancelled() else self._last_attempt.details()

    def initial_metadata(self) -> Any:
        """Wait for the call and return the initial metadata of its last attempt."""
        self._future.exception()
        return self._last_attempt.initial_metadata()

    def trailing_metadata(self) -> Any:
        """Wait for the call and return the trailing metadata of its last attempt."""
        self._future.exception()
        return self._last_attempt.trailing_metadata()

    def debug_error_string(self) -> Any:
        """Wait for the call and return gRPC's debug information about its last attempt."""
        self._future.exception()
        return self._last_attempt.debug_error_string()

    def time_remaining(self) -> Any:
        """Return the seconds that remain for the running attempt."""
        return self._last_attempt.time_remaining()

    def _was_cancelled(self) -> bool:
        return isinstance(self._future.exception(), grpc.FutureCancelledError)


def _result_of(attempt: Any) -> Any:
    return attempt.result()


grpc.Call.register(RetriedFuture)
grpc.Future.register(RetriedFuture)
