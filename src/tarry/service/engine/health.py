"""Whether the parts that the service cannot do without are well."""

from __future__ import annotations

import logging

_logger = logging.getLogger("tarry.service")


class Health:
    """What is out of order just now, by part; said once in the log when it changes."""

    def __init__(self) -> None:
        self.failing: dict[str, str] = {}
        """The parts that are out of order, and why; to look at."""
        self.behind: int = 0
        """Writes of what has happened that the store did not take at once, and has not yet."""

    def failed(self, part: str, error: object) -> None:
        """Learn that a part does not work."""
        if part not in self.failing:
            _logger.error("%s is out of order: %s", part, error)
        self.failing[part] = str(error)

    def worked(self, part: str) -> None:
        """Learn that a part works."""
        if self.failing and self.failing.pop(part, None) is not None:
            _logger.warning("%s works again", part)
