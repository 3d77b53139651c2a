"""Functions that run when the process forks, and values that each forked child creates again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def after_fork(function: Callable[[], None]) -> None:
    """Call `function` in each forked child, for example to replace a lock held at the fork."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=function)


def around_fork(before: Callable[[], object], after: Callable[[], object]) -> None:
    """Call `before` and `after` in a process that forks, just before and after the fork."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=before, after_in_parent=after)


class PerProcess(Generic[T]):
    """A value that each forked child creates again, such as a lock that another thread may hold."""

    __slots__ = ("_create", "value")

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._create_value()
        after_fork(self._create_value)

    def _create_value(self) -> None:
        self.value: T = self._create()
