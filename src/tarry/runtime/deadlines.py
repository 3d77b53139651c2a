"""The ambient deadline: a moment that every call below shares.

Generators and pools enter a block in one place and leave it in another, out of order or in
another context. So the scopes form a list that is never changed: whoever leaves puts one without
its own scope in its place, wherever it stands by then.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import check_number
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from collections.abc import Generator


class DeadlineKey:
    """Whose deadline it is."""

    over: bool = False
    """Whether it holds nobody any more, wherever its scope was copied to."""


class DeadlineScope(NamedTuple):
    """One deadline, and those around it."""

    key: DeadlineKey
    moment: float
    outer: DeadlineScope | None


scope: ContextVar[DeadlineScope | None] = ContextVar("tarry_deadline", default=None)


def enter(moment: float) -> DeadlineKey:
    """Let everything below share a deadline, until `leave` is called with the answer."""
    key = DeadlineKey()
    scope.set(DeadlineScope(key, earliest(moment), scope.get()))
    return key


def leave(key: object) -> None:
    """Take a deadline away again."""
    scope.set(_without(key, scope.get()))


def end(key: DeadlineKey) -> None:
    """Let go of all who share a deadline, also in the tasks and threads that began under it."""
    key.over = True


def current() -> float | None:
    """Return the moment of the ambient deadline."""
    inner = scope.get()
    while inner is not None and inner.key.over:
        inner = inner.outer
    return None if inner is None else inner.moment


def earliest(moment: float) -> float:
    """Return the given moment or the ambient deadline, whichever comes first."""
    outer = current()
    return moment if outer is None else min(moment, outer)


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Give everything in the block so many seconds in all; an earlier deadline around it stands."""
    key = enter(system.now() + check_number("seconds", seconds))
    try:
        yield
    finally:
        leave(key)


def remaining() -> float | None:
    """Return the seconds left for the current call, for a client's own timeout; None: no limit."""
    moment = current()
    return None if moment is None else max(0.0, moment - system.now())


def _without(key: object, inner: DeadlineScope | None) -> DeadlineScope | None:
    if inner is None or inner.key is key:
        return None if inner is None else inner.outer
    return inner._replace(outer=_without(key, inner.outer))
