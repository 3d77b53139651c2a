"""`current_attempt`: the number of the attempt that is running.

The scope of the context has the number, if there is a scope: see `scopes`. Setting a context
variable takes 0.3 us, a tenth of the time of a retry. So an attempt of a plain function gets no
scope just for its number: the number is found in the local variables of the driver that has called
the function. Retries of coroutine functions have a scope, because they may start tasks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tarry.runtime import scopes

if TYPE_CHECKING:
    from types import FrameType

_DRIVERS_MODULE = "tarry.runtime.drivers"
_DRIVER_FUNCTIONS = frozenset({"call", "drive", "drive_async"})
_HOOKS_MODULE = "tarry.runtime.call"
"""The module from which drivers call predicates, hooks and fallbacks, between attempts."""


def current_attempt() -> int:
    """Return the number of the attempt that is running, from 1; 1 outside of retried calls.

    In nested calls, the number is that of the innermost call.
    """
    scope = scopes.current_scope.get()
    while scope is not None and scope.handle.has_ended:
        scope = scope.outer
    if scope is not None and scope.attempt is not None:
        return scope.attempt
    is_between_attempts = False
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - `inspect` is slow to import
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module != _DRIVERS_MODULE:
            is_between_attempts = module == _HOOKS_MODULE
        elif frame.f_code.co_name in _DRIVER_FUNCTIONS and not is_between_attempts:
            return _number_in_driver(frame)
        frame = frame.f_back
    return 1


def _number_in_driver(frame: FrameType) -> int:
    """Return the number of the attempt that a driver is making, from its local variables."""
    variables = frame.f_locals
    if "running" in variables:
        return int(variables["running"].attempts)
    # The fast path makes the second attempt without a `RunningCall`, after a `decision`.
    return 2 if "decision" in variables else 1
