"""Read foreign documents key by key: every refusal names the path, and what is not read is told."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.wire.durations import parse
from tarry.wire.losses import Loss

if TYPE_CHECKING:
    from collections.abc import Iterator


class Table:
    """A table of a document and its path. It knows which keys were asked for."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            msg = f"{path or 'the document'} must be an object, got {value!r:.60}"
            raise ConfigurationTypeError(msg)
        self.path = path
        self._values = cast("Mapping[str, Any]", value)
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._asked.add(key)
        return self._values.get(key) is not None

    def at(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """Return a value as it stands, or None."""
        self._asked.add(key)
        return self._values.get(key)

    def table(self, key: str) -> Table | None:
        """Return a table within this one."""
        return Table(self.at(key), self.get(key)) if key in self else None

    def items(self, key: str) -> list[Any]:
        """Return a list, empty if there is none."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            msg = f"{self.at(key)} must be a list, got {value!r:.60}"
            raise ConfigurationTypeError(msg)
        return value  # pyright: ignore[reportUnknownVariableType]

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables."""
        return [Table(f"{self.at(key)}[{i}]", item) for i, item in enumerate(self.items(key))]

    def seconds(self, key: str, *, above: float = 0.0) -> float | None:
        """Return a duration that is longer than `above`, or None."""
        if key not in self:
            return None
        seconds = parse(self.at(key), self.get(key))
        if seconds <= above:
            msg = f"{self.at(key)} must be longer than {above:g} s, got {self.get(key)!r}"
            raise ConfigurationError(msg)
        return seconds

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Return a finite number that is not below `least`; without a default it must be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            msg = f"{self.at(key)} must be a number, got {value!r:.60}"
            raise ConfigurationTypeError(msg)
        if value < least:
            msg = f"{self.at(key)} must be at least {least:g}, got {value!r}"
            raise ConfigurationError(msg)
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """Return a whole number that is not below `least`; without a default it must be there."""
        value = self.number(key, default, least=least)
        if value != int(value):
            msg = f"{self.at(key)} must be a whole number, got {value!r}"
            raise ConfigurationTypeError(msg)
        return int(value)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            msg = f"{self.at(key)} must be a text, got {value!r:.60}"
            raise ConfigurationTypeError(msg)
        return value

    def unread(self) -> Iterator[Loss]:
        """Say what nobody has asked for."""
        for key, value in self._values.items():
            if key not in self._asked and value is not None:
                yield Loss(self.at(key), value, "left out: no policy of tarry says this")
