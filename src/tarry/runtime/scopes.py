"""The scopes of the current context (contextvars): deadlines, attempt numbers and call records.

A scope is a part of a program's run, such as a block or an attempt. Its deadline applies to all
calls that are made in it. Its attempt number is that of the retried call that is running: see
`attempt_number`. It may record its calls: see `call_records`.

Code that is suspended inside a scope and resumed elsewhere, such as a generator, may leave scopes
in another order than it entered them, or in another context. The scopes therefore form an immutable
linked list. Leaving any of them sets a new list without its scope.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.core.verdict import CallRecord


class ScopeHandle:
    """Identifies a scope: `enter` returns the handle, and `leave` takes it."""

    has_ended: bool = False
    """Set to True to end the deadline in all contexts, including those of tasks and threads that
    were started while it applied."""
    records: list[CallRecord] | None = None
    """The records of the calls that have ended in the scope; None if they are not recorded."""


class Scope(NamedTuple):
    """A deadline and an attempt number, with a link to the next outer scope."""

    handle: ScopeHandle
    deadline: float | None
    """On the monotonic clock; not after a deadline that applied on entry.
    None without a deadline."""
    outer: Scope | None
    """The next outer scope; None for the outermost."""
    attempt: int | None = None
    """The number of the attempt that runs in the scope; None if it is not known."""


current_scope: ContextVar[Scope | None] = ContextVar("tarry_scope", default=None)
"""The innermost scope of the context; None if the context has no deadline and no retry runs."""

SECOND_ATTEMPT = Scope(ScopeHandle(), None, None, 2)
"""The scope of a second attempt outside of all other scopes, created once because it is common."""


def enter(deadline: float | None, attempt: int | None = None) -> ScopeHandle:
    """Enter a scope; pass the returned handle to `leave`.

    `deadline` is on the monotonic clock; None keeps the current deadline. `attempt` is the number
    of an attempt; None keeps the current number.
    """
    outer = current_scope.get()
    if outer is None and deadline is None and attempt == SECOND_ATTEMPT.attempt:
        current_scope.set(SECOND_ATTEMPT)
        return SECOND_ATTEMPT.handle
    handle = ScopeHandle()
    deadline = current_deadline() if deadline is None else cap_at_deadline(deadline)
    if attempt is None and outer is not None:
        attempt = outer.attempt
    current_scope.set(Scope(handle, deadline, outer, attempt))
    return handle


def leave(handle: object) -> None:
    """Remove a scope from this context."""
    current_scope.set(_without_scope(handle, current_scope.get()))


def current_deadline() -> float | None:
    """Return when the current deadline passes, on the monotonic clock; None without a deadline."""
    scope = current_scope.get()
    while scope is not None and scope.handle.has_ended:
        scope = scope.outer
    return None if scope is None else scope.deadline


def recordings() -> Iterator[list[CallRecord]]:
    """Yield the list of each block around the current code that records its calls."""
    scope = current_scope.get()
    while scope is not None:
        records = scope.handle.records  # read once: another thread sets it to None
        if records is not None:
            yield records
        scope = scope.outer


def cap_at_deadline(moment: float) -> float:
    """Return `moment`, or the current deadline if that is earlier."""
    deadline = current_deadline()
    return moment if deadline is None else min(moment, deadline)


def _without_scope(handle: object, scope: Scope | None) -> Scope | None:
    """Return the list that starts at `scope`, without the scope of this handle."""
    if scope is None or scope.handle is handle:
        return None if scope is None else scope.outer
    return scope._replace(outer=_without_scope(handle, scope.outer))
