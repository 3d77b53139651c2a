"""The clock of the SQLite store, which does not follow when the clock of the machine is set.

If the machine's wall clock jumped ahead by an hour, all leases would expire at once, their attempts
would be made twice, and all waits would end early. So the wall clock is read only once. After that,
the time is the wall clock's time of that moment, plus the time that has passed since on the boot
clock. The boot clock starts with the machine, is never set, and also runs while the machine is
suspended.

The difference of both clocks, the *offset*, is stored in the file, so that all processes that use
the file have the same time. A process that opens the file while no other process uses it reads the
wall clock again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from tarry.runtime.effects import effects, read_boot_ms

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

_logger = logging.getLogger("tarry.service")
_MAX_DEVIATION_MS = 5_000  # a larger deviation from the wall clock is logged
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> int | None:
    """Return a number that changes when the machine is restarted; None if there is none."""
    with suppress(OSError, ValueError):
        return UUID(_BOOT_ID_PATH.read_text().strip()).int >> 65  # 63 bits: SQLite has no more
    return None


class AnchoredClock:
    """Returns epoch milliseconds; they do not jump when the clock of the machine is set.

    `SqliteDatabase` loads or stores the offset when it opens a file. If `logs_deviation` is true, a
    deviation from the wall clock is logged, once for each change.
    """

    def __init__(
        self,
        *,
        unix_time: Callable[[], float] | None = None,
        boot_ms: Callable[[], int] | None = None,
        boot_id: Callable[[], int | None] | None = None,
        logs_deviation: bool = True,
    ) -> None:
        self._unix_time = unix_time or effects.unix_time
        self._boot_ms = boot_ms or read_boot_ms
        self._boot_id = (boot_id or read_boot_id)()
        self._logs_deviation = logs_deviation
        self._logged_deviation_ms = 0
        self._offset_ms = self._wall_ms() - self._boot_ms()

    def __call__(self) -> int:
        """Return the time."""
        now = self._boot_ms() + self._offset_ms
        if self._logs_deviation:
            self._log_deviation(self._wall_ms() - now)
        return now

    def load_offset(self, connection: sqlite3.Connection) -> bool:
        """Use the offset in the file; return False if it has none since the start of the machine.

        Without a boot id, nothing is loaded or stored.
        """
        if self._boot_id is None:
            return True
        rows = "SELECT name, value FROM meta WHERE name IN ('boot_id', 'clock_offset')"
        stored = dict(connection.execute(rows).fetchall())
        if stored.get("boot_id") != self._boot_id:
            return False
        self._offset_ms = stored["clock_offset"]
        return True

    def store_offset(self, connection: sqlite3.Connection) -> None:
        """Set the time to that of the wall clock, and store the offset in the file."""
        self._offset_ms = self._wall_ms() - self._boot_ms()
        if self._boot_id is not None:
            connection.execute(
                "INSERT OR REPLACE INTO meta VALUES ('boot_id', ?), ('clock_offset', ?)",
                (self._boot_id, self._offset_ms),
            )

    def _wall_ms(self) -> int:
        return int(self._unix_time() * 1000)

    def _log_deviation(self, deviation_ms: int) -> None:
        if abs(deviation_ms - self._logged_deviation_ms) <= _MAX_DEVIATION_MS:
            return
        self._logged_deviation_ms = deviation_ms
        _logger.warning(
            "the clock of the machine was set, and differs from the time of the store by %+d s; "
            "to use the clock's time, stop all processes of the service and start them again",
            round(deviation_ms / 1000),
        )
