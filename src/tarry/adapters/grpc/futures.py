"""What `future()` of a plain channel gives."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tarry.adapters.grpc import background
from tarry.adapters.grpc.library import grpc
from tarry.adapters.grpc.live import CANCELLED_WAIT, Left, Live
from tarry.runtime import async_driver

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tarry.adapters.grpc.calls import GrpcCall


class RetriedFuture(Live):
    """A call that is retried in the background, once the first attempt has failed.

    The caller shall not wait, and the thread that serves the channel must not.
    """

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first: Any) -> None:
        super().__init__(call, send, first)
        self._end: Future[Any] = Future()
        self._task: asyncio.Task[None] | None = None
        first.add_done_callback(self._first_is_over)

    def _first_is_over(self, first: Any) -> None:
        if first.code() is not grpc.StatusCode.OK:
            loop = background.loop()
            loop.call_soon_threadsafe(self._start, loop, context=self._context)
            return
        try:
            result = self._drive(_result_of)
        except BaseException as error:  # of the user's budget or limiter
            self._finish(None, error)
        else:
            self._finish(result, None)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._retry())

    async def _retry(self) -> None:
        result, error = None, None
        try:
            result = await async_driver.drive(self._call, self._next, (), {})
        except Left as left:
            error = left.error
        except asyncio.CancelledError:  # by `cancel`: nobody else knows the task
            error = grpc.FutureCancelledError()
        except Exception as raised:
            error = raised
        try:
            await asyncio.to_thread(self._finish, result, error)  # callbacks may block
        except RuntimeError:  # the interpreter ends, and starts no threads
            self._finish(result, error)

    async def _next(self) -> Any:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        # Interceptors behind ours may block.
        attempt = self._attempt() if self._is_new else await asyncio.to_thread(self._attempt)

        def tell(_attempt: Any) -> None:
            loop.call_soon_threadsafe(over.set)

        attempt.add_done_callback(tell)
        await over.wait()
        return self._judged(_result_of, attempt)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if error is None:
            self._end.set_result(result)
        else:
            self._end.set_exception(error)

    def cancel(self) -> bool:
        """End the call unless it is over."""
        if self.done():
            return False
        super().cancel()
        task = self._task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        return True

    def cancelled(self) -> bool:
        """Say whether the user has ended the call."""
        return self._token.cancelled and (not self.done() or self._was_cancelled())

    def done(self) -> bool:
        """Say whether the call is over: no further attempt will be made."""
        return self._end.done()

    def running(self) -> bool:
        """Say whether the call is not over."""
        return not self.done()

    is_active = running

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, or raise what the call ended with."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._end.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error that the call ended with; None after a success."""
        try:
            error = self._end.exception(timeout)
        except TimeoutError:
            raise grpc.FutureTimeoutError from None
        if error is not None and isinstance(error, grpc.FutureCancelledError):
            raise error
        return error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """Wait for the error, and return where it came from."""
        error = self.exception(timeout)
        return None if error is None else error.__traceback__

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` with this future when the call is over."""
        self._end.add_done_callback(lambda _: fn(self))

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the call is over; False: it is."""
        if self.done():
            return False
        self._end.add_done_callback(lambda _: callback())
        return True

    def code(self) -> Any:
        """Wait for the status that the call ended with."""
        return grpc.StatusCode.CANCELLED if self._was_cancelled() else self._last.code()

    def details(self) -> Any:
        """Wait for what the server said of the status."""
        return CANCELLED_WAIT if self._was_cancelled() else self._last.details()

    def initial_metadata(self) -> Any:
        """Wait for the headers of the last attempt."""
        self._end.exception()
        return self._last.initial_metadata()

    def trailing_metadata(self) -> Any:
        """Wait for the trailers of the last attempt."""
        self._end.exception()
        return self._last.trailing_metadata()

    def debug_error_string(self) -> Any:
        """Wait for what gRPC tells of the last attempt to those who look for a fault."""
        self._end.exception()
        return self._last.debug_error_string()

    def time_remaining(self) -> Any:
        """Return the seconds that the running attempt has."""
        return self._last.time_remaining()

    def _was_cancelled(self) -> bool:
        return isinstance(self._end.exception(), grpc.FutureCancelledError)


def _result_of(attempt: Any) -> Any:
    return attempt.result()


grpc.Call.register(RetriedFuture)
grpc.Future.register(RetriedFuture)
