"""Blocks instead of functions: `for attempt in tarry.attempts(on=OSError): with attempt: ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.runtime import deadlines, event_loops
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
    """One attempt of a call: run its body inside `with attempt:`."""

    __slots__ = ("_attempt", "_key", "_limit", "_run", "_until", "entered", "over")

    def __init__(self, run: RunningCall, attempt: Attempt, *, cut: bool) -> None:
        self._run = run
        self._attempt = attempt
        self._key: object = None
        self._until = None if attempt.timeout is None else system.now() + attempt.timeout
        self._limit: AbstractContextManager[event_loops.TimeoutStatus] | None = None
        if cut and attempt.timeout is not None:
            self._limit = event_loops.timeout(attempt.timeout)
        self.entered: bool = False
        self.over: bool | None = None
        """Whether the call is over; None while the block was not left."""

    @property
    def number(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt.number

    def __enter__(self) -> Self:
        """Begin the attempt."""
        if self.entered:
            msg = "an attempt is entered once: one `with attempt:` for the whole body"
            raise ConfigurationError(msg)
        self.entered = True
        try:
            if self._until is not None:
                self._key = deadlines.enter(self._until)
            if self._limit is not None:
                self._limit.__enter__()
        except BaseException:
            self._run.abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the attempt; swallow its error when another attempt follows."""
        try:
            return self._end(kind, error, traceback)
        except BaseException:
            self._run.abort()
            raise

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        run = self._run
        if self._leave(kind, error, traceback):
            timeout = run.timeout_error(self._attempt.timeout or 0.0)
            self.over = not run.should_retry(timeout)
            if self.over:
                raise timeout
            return True
        if error is None:
            self.over = run.accepts(None)
        elif isinstance(error, Exception):
            self.over = not run.should_retry(error)
            return not self.over
        else:
            run.abort()
        return False

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Undo what `__enter__` did; say whether the timeout cut the block off."""
        limit, self._limit = self._limit, None
        try:
            return limit is not None and bool(limit.__exit__(kind, error, traceback))
        finally:
            if self._key is not None:
                deadlines.leave(self._key)


class Attempts:
    """The attempts of one call, for `for` and for `async for`."""

    __slots__ = ("_config",)

    def __init__(self, config: RetryConfig) -> None:
        self._config = config

    def __iter__(self) -> AttemptIterator:
        """Begin a call in plain code."""
        if self._config.policy.attempt_timeout is not None:
            msg = (
                "timeout cannot cut off a plain block: use @tarry.retry or tarry.call, or give "
                "the client inside the block a timeout of its own"
            )
            raise ConfigurationError(msg)
        return AttemptIterator(self._config)

    def __aiter__(self) -> AsyncAttemptIterator:
        """Begin a call on an event loop."""
        if self._config.cancel is not None:
            raise ConfigurationError(CANCEL_IN_COROUTINE_MESSAGE)
        return AsyncAttemptIterator(self._config)


class _Iteration:
    __slots__ = ("_block", "_run")

    def __init__(self, config: RetryConfig) -> None:
        self._run: RunningBlock = RunningBlock.new(config)
        self._block: AttemptBlock | None = None

    def __del__(self) -> None:
        """Leave what an attempt holds that was begun and never entered."""
        block: AttemptBlock | None = getattr(self, "_block", None)
        if block is not None and not block.entered:
            self._run.release_permit_in_finalizer()

    def _is_over(self) -> bool:
        if self._block is None:
            return False
        if self._block.over is None:
            self._run.abort()
            msg = "the body of the loop must stand inside `with attempt:`"
            raise ConfigurationError(msg)
        return self._block.over


class AttemptIterator(_Iteration):
    """The attempts of one call in plain code."""

    __slots__ = ()

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> AttemptBlock:
        """Wait, and begin the next attempt."""
        if self._is_over():
            raise StopIteration
        run = self._run
        if self._block is not None:
            run.wait()
        try:
            attempt = run.begin_attempt()
            if attempt.delay:
                run.wait(attempt.delay)
            self._block = block = AttemptBlock(run, attempt, cut=False)
        except BaseException:
            run.abort()
            raise
        return block


class AsyncAttemptIterator(_Iteration):
    """The attempts of one call on an event loop."""

    __slots__ = ()

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> AttemptBlock:
        """Wait, and begin the next attempt."""
        if self._is_over():
            raise StopAsyncIteration
        run = self._run
        if self._block is not None:
            await run.async_wait()
        try:
            attempt = run.begin_attempt()
            if attempt.delay:
                await run.async_wait(attempt.delay)
            self._block = block = AttemptBlock(run, attempt, cut=True)
        except BaseException:
            run.abort()
            raise
        return block
