"""The settings of the whole process: whether calls are retried, and whether waits may block."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tarry.core.checks import check_one_of
from tarry.errors import ConfigurationTypeError

Blocking: TypeAlias = Literal["allow", "raise"]
"""Whether the waits of a plain function may block a running event loop."""


class ProcessSettings:
    """The values that `configure`, `set_active` and `tarry.testing.capped_attempts` set."""

    __slots__ = ("allows_blocking", "is_active", "max_attempts")

    def __init__(self) -> None:
        self.allows_blocking: bool = False
        """Whether waits may block a running event loop, see `configure`."""
        self.max_attempts: int | None = None
        """An upper limit for the `max_attempts` of every policy; None: no limit."""
        self.is_active: bool = True
        """The last argument of `set_active`, for the reason of calls that are not retried."""


process_settings: ProcessSettings = ProcessSettings()


def check_blocking(blocking: object) -> bool:
    """Return whether `blocking` allows waits that block an event loop; reject an unknown value."""
    check_one_of("blocking", blocking, ("allow", "raise"))
    return blocking == "allow"


def configure(*, blocking: Blocking) -> None:
    """Set what happens in the whole process before a wait that would block a running event loop.

    The attempts of a plain function are always made. By default ("raise"), the error of an attempt
    is raised instead of a wait, with a note. With "allow", the wait blocks the loop, as in a
    notebook, where nothing else runs. The argument `blocking` of a call takes precedence.
    """
    process_settings.allows_blocking = check_blocking(blocking)


def set_active(active: bool, /) -> None:  # noqa: FBT001 - as in stamina
    """Turn the retries of the whole process off or on, for example off in a test suite.

    While retries are off, each call makes one attempt and raises its error. Breakers, limits,
    timeouts and deadlines still apply, and `tarry.hedge` still sends copies.
    """
    if not isinstance(active, bool):  # "no" is true
        raise ConfigurationTypeError("active", "must be True or False", active)
    process_settings.is_active = active
    process_settings.max_attempts = None if active else 1
