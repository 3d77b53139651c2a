"""The deadline of the current context (contextvars), shared by all calls made in the context.

Generators and pools may leave deadlines in another order than they entered them, or in another
context. The deadlines therefore form an immutable linked list of `DeadlineScope`. Leaving a
deadline, which need not be the innermost one, sets a new list without its scope.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import check_number
from tarry.runtime.clocks import environment

if TYPE_CHECKING:
    from collections.abc import Generator


class DeadlineHandle:
    """Identifies a deadline: `enter` returns the handle, and `leave` takes it."""

    has_ended: bool = False
    """Set to True to end the deadline in all contexts, including those of tasks and threads that
    were started while it applied."""


class DeadlineScope(NamedTuple):
    """A deadline and the scope around it."""

    handle: DeadlineHandle
    moment: float
    """The time of the monotonic clock at which the deadline passes, or the outer one if earlier."""
    outer: DeadlineScope | None


current_scope: ContextVar[DeadlineScope | None] = ContextVar("tarry_deadline", default=None)
"""The innermost scope of the context; None without a deadline."""


def enter(moment: float) -> DeadlineHandle:
    """Set a deadline at `moment` for this context, until `leave` is called with the handle."""
    handle = DeadlineHandle()
    current_scope.set(DeadlineScope(handle, cap_at_deadline(moment), current_scope.get()))
    return handle


def leave(handle: object) -> None:
    """Remove a deadline from this context."""
    current_scope.set(_without_scope(handle, current_scope.get()))


def current() -> float | None:
    """Return the moment at which the current deadline passes; None without a deadline."""
    inner = current_scope.get()
    while inner is not None and inner.handle.has_ended:
        inner = inner.outer
    return None if inner is None else inner.moment


def cap_at_deadline(moment: float) -> float:
    """Return `moment`, or the current deadline if that is earlier."""
    outer = current()
    return moment if outer is None else min(moment, outer)


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Set a deadline `seconds` from now for all calls in the block.

    If a deadline outside the block is earlier, it still applies.
    """
    handle = enter(environment.now() + check_number("seconds", seconds))
    try:
        yield
    finally:
        leave(handle)


def remaining() -> float | None:
    """Return the seconds until the current deadline, as a timeout; None without a deadline."""
    moment = current()
    return None if moment is None else max(0.0, moment - environment.now())


def _without_scope(handle: object, inner: DeadlineScope | None) -> DeadlineScope | None:
    if inner is None or inner.handle is handle:
        return None if inner is None else inner.outer
    return inner._replace(outer=_without_scope(handle, inner.outer))
