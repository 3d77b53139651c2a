"""Retries of a block: `for attempt in tarry.attempts(on=OSError): with attempt: ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.runtime import clocks, deadlines
from tarry.runtime.call import RunningBlock
from tarry.runtime.clocks import system
from tarry.runtime.config import CANCEL_IN_COROUTINE_MESSAGE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self

    from tarry.core.verdict import Attempt
    from tarry.runtime.call import RunningCall
    from tarry.runtime.config import RetryConfig


class AttemptBlock:
    """One attempt of a call. The code to retry runs inside `with attempt:`."""

    __slots__ = (
        "_attempt",
        "_call",
        "_deadline_key",
        "_ends_at",
        "_timeout_scope",
        "entered",
        "is_last",
    )

    def __init__(self, running: RunningCall, attempt: Attempt, *, can_cancel: bool) -> None:
        self._call = running
        self._attempt = attempt
        self._deadline_key: object = None
        self._ends_at = None if attempt.timeout is None else system.now() + attempt.timeout
        self._timeout_scope: AbstractContextManager[clocks.TimeoutStatus] | None = None
        if can_cancel and attempt.timeout is not None:
            self._timeout_scope = clocks.timeout(attempt.timeout)
        self.entered: bool = False
        self.is_last: bool | None = None
        """Whether no attempt follows; None until the block is left."""

    @property
    def number(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt.number

    def __enter__(self) -> Self:
        """Begin the attempt."""
        if self.entered:
            msg = "an attempt can be entered only once: use one `with attempt:` for the whole body"
            raise ConfigurationError(msg)
        self.entered = True
        try:
            if self._ends_at is not None:
                self._deadline_key = deadlines.enter(self._ends_at)
            if self._timeout_scope is not None:
                self._timeout_scope.__enter__()
        except BaseException:
            self._call.abort()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the attempt; suppress its error when another attempt follows."""
        try:
            return self._exit(error_type, error, traceback)
        except BaseException:
            self._call.abort()
            raise

    def _exit(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        running = self._call
        if self._leave_scopes(error_type, error, traceback):
            timeout = running.timeout_error(self._attempt.timeout or 0.0)
            self.is_last = not running.should_retry(timeout)
            if self.is_last:
                raise timeout
            return True
        if error is None:
            self.is_last = running.accepts(None)
        elif isinstance(error, Exception):
            self.is_last = not running.should_retry(error)
            return not self.is_last
        else:
            running.abort()
        return False

    def _leave_scopes(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Exit the timeout scope and the deadline; return whether the timeout ended the block."""
        scope, self._timeout_scope = self._timeout_scope, None
        try:
            return scope is not None and bool(scope.__exit__(error_type, error, traceback))
        finally:
            if self._deadline_key is not None:
                deadlines.leave(self._deadline_key)


class Attempts:
    """The attempts of a call, for `for` and `async for` loops."""

    __slots__ = ("_config",)

    def __init__(self, config: RetryConfig) -> None:
        self._config = config

    def __iter__(self) -> AttemptIterator:
        """Begin a call for a `for` loop."""
        if self._config.policy.attempt_timeout is not None:
            msg = (
                "timeout cannot interrupt a plain block: use @tarry.retry or tarry.call, or set a "
                "timeout on the client that the block uses"
            )
            raise ConfigurationError(msg)
        return AttemptIterator(self._config)

    def __aiter__(self) -> AsyncAttemptIterator:
        """Begin a call for an `async for` loop."""
        if self._config.cancel is not None:
            raise ConfigurationError(CANCEL_IN_COROUTINE_MESSAGE)
        return AsyncAttemptIterator(self._config)


class _AttemptIteration:
    """Base class of the two iterators."""

    __slots__ = ("_block", "_call")

    def __init__(self, config: RetryConfig) -> None:
        self._call: RunningBlock = RunningBlock.new(config)
        self._block: AttemptBlock | None = None

    def __del__(self) -> None:
        """Release the permit of an attempt whose `with` block was never entered."""
        block: AttemptBlock | None = getattr(self, "_block", None)
        if block is not None and not block.entered:
            self._call.release_permit_in_finalizer()

    def _is_finished(self) -> bool:
        if self._block is None:
            return False
        if self._block.is_last is None:
            self._call.abort()
            msg = "the body of the loop must be inside `with attempt:`"
            raise ConfigurationError(msg)
        return self._block.is_last


class AttemptIterator(_AttemptIteration):
    """The attempts of one call in a `for` loop."""

    __slots__ = ()

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> AttemptBlock:
        """Wait until the next attempt is due, and begin it."""
        if self._is_finished():
            raise StopIteration
        running = self._call
        if self._block is not None:
            running.wait()
        try:
            attempt = running.begin_attempt()
            if attempt.delay:
                running.wait(attempt.delay)
            self._block = block = AttemptBlock(running, attempt, can_cancel=False)
        except BaseException:
            running.abort()
            raise
        return block


class AsyncAttemptIterator(_AttemptIteration):
    """The attempts of one call in an `async for` loop."""

    __slots__ = ()

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> AttemptBlock:
        """Wait until the next attempt is due, and begin it."""
        if self._is_finished():
            raise StopAsyncIteration
        running = self._call
        if self._block is not None:
            await running.async_wait()
        try:
            attempt = running.begin_attempt()
            if attempt.delay:
                await running.async_wait(attempt.delay)
            self._block = block = AttemptBlock(running, attempt, can_cancel=True)
        except BaseException:
            running.abort()
            raise
        return block
