"""The deadline of the current context (contextvars), shared by all calls made in the context.

Code that is suspended inside a deadline and resumed elsewhere, such as a generator, may leave
deadlines in another order than it entered them, or in another context. The deadlines therefore form
an immutable linked list of `DeadlineScope`. Leaving any of them sets a new list without its scope.
A block that records its calls is a scope of the list too: see `call_records`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import check_number, to_seconds
from tarry.runtime.clocks import environment  # clock, sleep and random numbers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tarry.core.checks import Seconds
    from tarry.core.verdict import CallRecord


class DeadlineHandle:
    """Identifies a deadline: `enter` returns the handle, and `leave` takes it."""

    has_ended: bool = False
    """Set to True to end the deadline in all contexts, including those of tasks and threads that
    were started while it applied."""
    records: list[CallRecord] | None = None
    """The records of the calls that have ended in the scope; None if they are not recorded."""


class DeadlineScope(NamedTuple):
    """A deadline, with a link to the next outer scope."""

    handle: DeadlineHandle
    moment: float
    """When it passes, on the monotonic clock; not after a deadline that applied on entry."""
    outer: DeadlineScope | None
    """The next outer scope; None for the outermost."""


current_scope: ContextVar[DeadlineScope | None] = ContextVar("tarry_deadline", default=None)
"""The innermost scope of the context; None if the context has no deadline."""


def enter(moment: float) -> DeadlineHandle:
    """Set a deadline at `moment`, on the monotonic clock; pass the returned handle to `leave`."""
    handle = DeadlineHandle()
    current_scope.set(DeadlineScope(handle, cap_at_deadline(moment), current_scope.get()))
    return handle


def leave(handle: object) -> None:
    """Remove a deadline from this context."""
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
        if scope.handle.records is not None:
            yield scope.handle.records
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
    handle = enter(environment.now() + check_number("seconds", to_seconds(seconds)))
    try:
        yield
    finally:
        leave(handle)


def remaining() -> float | None:
    """Return the seconds until the current deadline, at least 0; None without a deadline."""
    moment = current()
    return None if moment is None else max(0.0, moment - environment.now())


def _without_scope(handle: object, scope: DeadlineScope | None) -> DeadlineScope | None:
    """Return the list that starts at `scope`, without the scope of this handle."""
    if scope is None or scope.handle is handle:
        return None if scope is None else scope.outer
    return scope._replace(outer=_without_scope(handle, scope.outer))
