"""The part that all parts of the store in memory share: the data and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from tarry.runtime.clocks import system
from tests.service.stores.model_store.data import Data

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S", bound=msgspec.Struct)


class Part:
    """Holds the data; `clock` gives epoch milliseconds."""

    def __init__(self, clock: Callable[[], int] | None = None, data: Data | None = None) -> None:
        self._clock = clock or wall_clock
        self.data: Data = data or Data()
        """Hand it to another store to go on where this one was."""


def wall_clock() -> int:
    """Return the epoch ms of the machine."""
    return int(system.unix_time() * 1000)


def copy(value: S) -> S:
    """Return a copy, so that nobody shares what the store keeps."""
    return msgspec.structs.replace(value)
