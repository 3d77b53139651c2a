"""The response stream that a retried unary-stream call returns, on a plain channel."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tarry.adapters.grpc.call import CANCELLED_DURING_BACKOFF, RetriedCall
from tarry.adapters.grpc.library import grpc
from tarry.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tarry.adapters.grpc.call import GrpcCall

_END_OF_STREAM = object()


class _StreamCancelled(Cancelled, grpc.RpcError):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]
    """The user cancelled a stream that was waiting for its next attempt."""

    def code(self) -> Any:
        """Return the status code of a cancelled stream."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """Return the details of the status."""
        return CANCELLED_DURING_BACKOFF


class RetriedStream(RetriedCall):
    """A response stream that is retried until its first message has arrived.

    Methods delegate to the last attempt. Those for the status and the metadata first wait until no
    further attempt will be made.
    """

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first_attempt: Any) -> None:
        super().__init__(call, send, first_attempt)
        self._has_final_attempt = False
        """Whether no attempt will be made after the last one."""
        self._callbacks: list[tuple[str, Callable[..., None]]] = []
        self._lock = threading.RLock()  # one thread may read while another waits for the status
        self._first_message: list[Any] = []
        self._error: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._final_attempt()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: avoid a reference cycle
        return self._first_message.pop() if self._first_message else next(self._last_attempt)

    def _final_attempt(self) -> Any:
        """Make attempts until a first message arrives or the call is given up.

        Return the last attempt.
        """
        with self._lock:
            if self._has_final_attempt:
                return self._last_attempt
            try:
                message = self._drive(_first_message_of)
            except Cancelled as error:  # during a wait between two attempts
                self._error = _StreamCancelled(str(error))
                self._error.__cause__ = error.__cause__
            except Exception as error:
                self._error = error
            else:
                self._first_message = [] if message is _END_OF_STREAM else [message]
            finally:
                self._end_retries()
        return self._last_attempt

    def next(self) -> Any:
        """Return the next message."""
        return next(self)

    def cancel(self) -> bool:
        """Cancel the stream, or the wait for its next attempt."""
        if self._is_first_attempt:  # no message was requested yet, and none will be
            self._call.abort()
            self._end_retries()
        return super().cancel()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the stream ends; return False if it has ended already."""
        return self._add_callback("add_callback", callback) is not False

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` when the stream ends."""
        self._add_callback("add_done_callback", fn)

    def code(self) -> Any:
        """Wait for the status code of the stream."""
        return self._final_attempt().code()

    def details(self) -> Any:
        """Wait for the details of the status."""
        return self._final_attempt().details()

    def initial_metadata(self) -> Any:
        """Wait for the initial metadata."""
        return self._final_attempt().initial_metadata()

    def trailing_metadata(self) -> Any:
        """Wait for the trailing metadata."""
        return self._final_attempt().trailing_metadata()

    def debug_error_string(self) -> Any:
        """Wait for gRPC's debug information."""
        return self._final_attempt().debug_error_string()

    def _add_callback(self, method: str, callback: Callable[..., None]) -> Any:
        if self._has_final_attempt:
            return getattr(self._last_attempt, method)(callback)
        # Another attempt may follow the running one: keep the callback for the last attempt.
        self._callbacks.append((method, callback))
        return True

    def _end_retries(self) -> None:
        """Mark the last attempt as final, and add the user's callbacks to it."""
        self._has_final_attempt = True
        while self._callbacks:
            method, callback = self._callbacks.pop(0)
            if getattr(self._last_attempt, method)(callback) is False:  # the attempt has ended
                callback()


def _first_message_of(attempt: Any) -> Any:
    return next(attempt, _END_OF_STREAM)


grpc.Call.register(RetriedStream)
