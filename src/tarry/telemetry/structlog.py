"""For structlog: each event by a name that stays, with the fields of the standard log.

    tarry.listen(StructlogListener())

Levels and fields are in `fields`. The standard log writes its warnings beside this one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tarry.errors import MissingExtra
from tarry.telemetry.event_fields import EVENT_NAMES, event_fields, log_level

try:
    import structlog
except ImportError as _missing:
    raise MissingExtra(
        "this listener needs structlog: pip install 'tarry[structlog]'"
    ) from _missing

if TYPE_CHECKING:
    from tarry.core.events import Event


class StructlogListener:
    """Writes events to a structlog logger: `structlog.get_logger("tarry")` unless one is given."""

    __slots__ = ("_logger",)

    def __init__(self, logger: Any = None) -> None:
        self._logger: Any = structlog.get_logger("tarry") if logger is None else logger

    def __call__(self, event: Event) -> None:
        """Write one event."""
        level = log_level(event)
        if level is not None:
            # By method and not by `log`, which some loggers do not have; and asked for each time,
            # because the program may configure structlog after it made this.
            write = getattr(self._logger, _METHODS[level])
            write(EVENT_NAMES[type(event)], **event_fields(event))


_METHODS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
