"""Whether the parts that the service cannot do without are well."""

from __future__ import annotations

import logging

_logger = logging.getLogger("tarry.service")


class Health:
    """What is out of order just now, by part; said once in the log when it changes."""

    def __init__(self) -> None:
        self._ills: dict[str, str] = {}

    @property
    def ills(self) -> dict[str, str]:
        """The parts that are out of order, and why."""
        return dict(self._ills)

    def failed(self, part: str, error: object) -> None:
        """Learn that a part does not work."""
        if part not in self._ills:
            _logger.error("%s is out of order: %s", part, error)
        self._ills[part] = str(error)

    def worked(self, part: str) -> None:
        """Learn that a part works."""
        if self._ills and self._ills.pop(part, None) is not None:
            _logger.warning("%s works again", part)
