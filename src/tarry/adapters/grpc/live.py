"""Calls in the hands of their user while they are retried: the attempts, and what cancels them."""

from __future__ import annotations

from contextvars import copy_context
from copy import copy
from typing import TYPE_CHECKING, Any

from tarry.runtime import sync_driver
from tarry.runtime.clocks import CancelToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.adapters.grpc.calls import GrpcCall

CANCELLED_WAIT = "cancelled while waiting for the next attempt"


class Live:
    """A call that stands for its last attempt. The first is under way when the user gets it."""

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first: Any) -> None:
        self._token = CancelToken()
        call.spec = copy(call.spec)  # all calls of the method share it
        call.spec.cancel = self._token
        self._call = call
        self._send = send
        self._last = first
        self._is_new = True
        self._context = copy_context()  # in which the first attempt was told

    def cancel(self) -> bool:
        """End the attempt that runs, or the wait for the next one."""
        self._token.cancel()
        return bool(self._last.cancel())

    def _drive(self, result_of: Callable[[Any], Any]) -> Any:
        """Make attempts until the call is over."""

        def attempt() -> Any:
            return self._judged(result_of, self._attempt())

        try:
            return self._context.run(sync_driver.drive, self._call, attempt, (), {})
        except Left as left:
            raise left.error from None

    def _judged(self, result_of: Callable[[Any], Any], attempt: Any) -> Any:
        """Return the result of an attempt, or raise how it ended."""
        try:
            return result_of(attempt)
        except Exception as error:
            if self._token.cancelled:  # by the user: neither a failure nor retried
                raise Left(error) from None
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._last, name)

    def _attempt(self) -> Any:
        """Return the attempt that has begun: the first, or a new one."""
        if self._is_new:
            self._is_new = False
        else:
            self._last = self._send()
            if self._token.cancelled:  # since the wait has ended
                self._last.cancel()
        return self._last


class Left(BaseException):
    """Takes an error out of the loop, past its judgement."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
