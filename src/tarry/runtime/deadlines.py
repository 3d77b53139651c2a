"""`deadline` and `remaining`: the deadline of the current context, which all calls share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tarry.core.checks import check_number, to_seconds
from tarry.runtime import scopes
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Generator

    from tarry.core.checks import Seconds


@contextmanager
def deadline(seconds: Seconds) -> Generator[None]:
    """Set a deadline `seconds` (or a `timedelta`) from now for all calls in the block.

    If a deadline outside the block is earlier, it still applies.
    """
    handle = scopes.enter(effects.now() + check_number("seconds", to_seconds(seconds)))
    try:
        yield
    finally:
        scopes.leave(handle)


def remaining() -> float | None:
    """Return the seconds until the current deadline, at least 0; None without a deadline."""
    ends_at = scopes.current_deadline()
    return None if ends_at is None else max(0.0, ends_at - effects.now())
