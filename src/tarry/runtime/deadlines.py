"""The deadline and the attempt number of the current context (contextvars).

The deadline applies to all calls that are made in the context. The attempt number is that of the
innermost retried call that is running: see `attempt_number`.

Code that is suspended inside a scope and resumed elsewhere, such as a generator, may leave scopes
in another order than it entered them, or in another context. The scopes therefore form an immutable
linked list of `DeadlineScope`. Leaving any of them sets a new list without its scope.
A block that records its calls is a scope of the list too: see `call_records`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import check_number, to_seconds
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tarry.core.checks import Seconds
    from tarry.core.verdict import CallRecord


class DeadlineHandle:
    """Identifies a scope: `enter` returns the handle, and `leave` takes it."""

    has_ended: bool = False
    """Set to True to end the deadline in all contexts, including those of tasks and threads that
    were started while it applied."""
    records: list[CallRecord] | None = None
    """The records of the calls that have ended in the scope; None if they are not recorded."""


class DeadlineScope(NamedTuple):
    """A deadline and an attempt number, with a link to the next outer scope."""

    handle: DeadlineHandle
    moment: float | None
    """When the deadline passes, on the monotonic clock; not after a deadline that applied on entry.
    None without a deadline."""
    outer: DeadlineScope | None
    """The next outer scope; None for the outermost."""
    attempt: int | None = None
    """The number of the attempt that runs in the scope; None if it is not known."""


current_scope: ContextVar[DeadlineScope | None] = ContextVar("tarry_deadline", default=None)
"""The innermost scope of the context; None if the context has no deadline and no retry runs."""

SECOND_ATTEMPT = DeadlineScope(DeadlineHandle(), None, None, 2)
"""The scope of a second attempt outside of all other scopes, created once because it is common."""


def enter(moment: float | None, attempt: int | None = None) -> DeadlineHandle:
    """Enter a scope; pass the returned handle to `leave`.

    `moment` is the deadline on the monotonic clock; None keeps the current deadline. `attempt` is
    the number of an attempt; None keeps the current number.
    """
    outer = current_scope.get()
    if outer is None and moment is None and attempt == SECOND_ATTEMPT.attempt:
        current_scope.set(SECOND_ATTEMPT)
        return SECOND_ATTEMPT.handle
    handle = DeadlineHandle()
    moment = current() if moment is None else cap_at_deadline(moment)
    if attempt is None and outer is not None:
        attempt = outer.attempt
    current_scope.set(DeadlineScope(handle, moment, outer, attempt))
    return handle


def leave(handle: object) -> None:
    """Remove a scope from this context."""
    current_scope.set(_without_scope(handle, current_scope.get()))


def current() -> float | None:
    """Return when the current deadline passes, on the monotonic clock; None without a deadline."""
    scope = current_scope.get()
    while scope is not None and scope.handle.has_ended:
        scope = scope.outer
    return None if scope is None else scope.moment


def recordings() -> Iterator[list[CallRecord]]:
    """Yield the list of each block around the current code that records its calls."""
    scope = current_scope.get()
    while scope is not None:
        records = scope.handle.records  # read once: another thread sets it to None
        if records is not None:
            yield records
        scope = scope.outer


def cap_at_deadline(moment: float) -> float:
    """Return `moment`, or the moment of the current deadline if that is earlier."""
    current_moment = current()
    return moment if current_moment is None else min(moment, current_moment)


@contextmanager
def deadline(seconds: Seconds) -> Generator[None]:
    """Set a deadline `seconds` (or a `timedelta`) from now for all calls in the block.

    If a deadline outside the block is earlier, it still applies.
    """
    handle = enter(effects.now() + check_number("seconds", to_seconds(seconds)))
    try:
        yield
    finally:
        leave(handle)


def remaining() -> float | None:
    """Return the seconds until the current deadline, at least 0; None without a deadline."""
    moment = current()
    return None if moment is None else max(0.0, moment - effects.now())


def _without_scope(handle: object, scope: DeadlineScope | None) -> DeadlineScope | None:
    """Return the list that starts at `scope`, without the scope of this handle."""
    if scope is None or scope.handle is handle:
        return None if scope is None else scope.outer
    return scope._replace(outer=_without_scope(handle, scope.outer))
