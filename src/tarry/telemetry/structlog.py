"""The listener for structlog: logs each event that has a log level, with its name and fields.

    tarry.listen(StructlogListener())

`tarry.telemetry.logs` defines the levels, names and fields. The built-in listener remains active
and logs the same events to the standard library's logger "tarry".
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tarry.core.extras import require_extra
from tarry.telemetry.logs import EVENT_NAMES, event_fields, log_level

with require_extra("this listener needs structlog", "structlog"):
    import structlog

if TYPE_CHECKING:
    from tarry.core.events import Event


class StructlogListener:
    """Logs events to a structlog logger, by default `structlog.get_logger("tarry")`."""

    __slots__ = ("_logger",)

    def __init__(self, logger: Any = None) -> None:
        self._logger: Any = structlog.get_logger("tarry") if logger is None else logger

    def __call__(self, event: Event) -> None:
        """Log one event."""
        level = log_level(event)
        if level is not None:
            # Use the method for the level, because some loggers have no method `log`. Look it up
            # each time, because the program may configure structlog after creating this listener.
            write = getattr(self._logger, _METHODS[level])
            write(EVENT_NAMES[type(event)], **event_fields(event))


_METHODS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
