"""What a call with a stream of answers gives, on a plain channel."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tarry.adapters.grpc.library import grpc
from tarry.adapters.grpc.live import CANCELLED_WAIT, Live
from tarry.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tarry.adapters.grpc.calls import GrpcCall

_END = object()


class _StreamCancelled(Cancelled, grpc.RpcError):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]
    """The user cancelled a stream that waited for its next attempt."""

    def code(self) -> Any:
        """Return the status of a cancelled stream."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """Say when it was cancelled."""
        return CANCELLED_WAIT


class RetriedStream(Live):
    """A stream that is retried while its first message is waited for.

    Whatever else is asked of it, the last attempt answers. What gRPC lets wait for the server
    waits for that attempt.
    """

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first: Any) -> None:
        super().__init__(call, send, first)
        self._is_settled = False
        self._callbacks: list[tuple[str, Callable[..., None]]] = []
        self._lock = threading.RLock()  # one thread may read, while another waits for the code
        self._first: list[Any] = []
        self._error: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._last_attempt()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: leave no cycle behind
        return self._first.pop() if self._first else next(self._last)

    def _last_attempt(self) -> Any:
        """Make attempts until one has its first message, or no more are made."""
        with self._lock:
            if self._is_settled:
                return self._last
            try:
                message = self._drive(_first_of)
            except Cancelled as error:  # in a wait
                self._error = _StreamCancelled(str(error))
                self._error.__cause__ = error.__cause__
            except Exception as error:
                self._error = error
            else:
                self._first = [] if message is _END else [message]
            finally:
                self._settle()
        return self._last

    def next(self) -> Any:
        """Return the next message."""
        return next(self)

    def cancel(self) -> bool:
        """End the stream, or the wait for its next attempt."""
        if self._is_new:  # nobody has asked for a message, and nobody will
            self._call.drop()
            self._settle()
        return super().cancel()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when the stream is over; False: it is."""
        return self._at_the_end("add_callback", callback) is not False

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call `fn` when the stream is over."""
        self._at_the_end("add_done_callback", fn)

    def code(self) -> Any:
        """Wait for the status of the stream."""
        return self._last_attempt().code()

    def details(self) -> Any:
        """Wait for what the server said of the status."""
        return self._last_attempt().details()

    def initial_metadata(self) -> Any:
        """Wait for the headers."""
        return self._last_attempt().initial_metadata()

    def trailing_metadata(self) -> Any:
        """Wait for the trailers."""
        return self._last_attempt().trailing_metadata()

    def debug_error_string(self) -> Any:
        """Wait for what gRPC tells to those who look for a fault."""
        return self._last_attempt().debug_error_string()

    def _at_the_end(self, method: str, callback: Callable[..., None]) -> Any:
        if self._is_settled:
            return getattr(self._last, method)(callback)
        # The end of this attempt need not be the end of the stream.
        self._callbacks.append((method, callback))
        return True

    def _settle(self) -> None:
        """Stay with this attempt, and with its end."""
        self._is_settled = True
        while self._callbacks:
            method, callback = self._callbacks.pop(0)
            if getattr(self._last, method)(callback) is False:  # it is over
                callback()


def _first_of(attempt: Any) -> Any:
    return next(attempt, _END)


grpc.Call.register(RetriedStream)
