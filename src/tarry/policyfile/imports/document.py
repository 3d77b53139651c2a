"""Read foreign documents key by key: every refusal names the path, and what is not read is told."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from tarry.core.durations import format_duration
from tarry.core.suggest import suggest
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.durations import parse
from tarry.policyfile.losses import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tarry.core.policy import Policy

_A_TYPO = 0.8
"""How alike two keys are, from 0 to 1, if one is taken for the other misspelt."""


class Table:
    """A table of a document and its path. It knows which keys were asked for."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            rule = f"must be an object, got {value!r:.60}"
            raise ConfigurationTypeError(path or "the document", rule)
        self.path = path
        self._values = cast("Mapping[str, Any]", value)
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._asked.add(key)
        return self._values.get(key) is not None

    def keys(self) -> list[str]:
        """Return the keys that are there."""
        return list(self._values)

    def spelled(self, known: Iterable[str]) -> None:
        """Refuse a key that is nearly one of these; another one may be somebody else's."""
        names = list(known)
        for key in self._values:
            close = None if key in names else suggest(str(key), names, similarity=_A_TYPO)
            if close:
                msg = f"{self.at(key)} is no key that is known: did you mean {close!r}?"
                raise ConfigurationError(msg)

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
            raise ConfigurationTypeError(self.at(key), f"must be a list, got {value!r:.60}")
        return value  # pyright: ignore[reportUnknownVariableType]

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables."""
        return [Table(f"{self.at(key)}[{i}]", item) for i, item in enumerate(self.items(key))]

    def seconds(
        self,
        key: str,
        *,
        above: float = 0.0,
        read: Callable[[str, object], float] = parse,
    ) -> float | None:
        """Return a duration that is longer than `above`, or None."""
        if key not in self:
            return None
        seconds = read(self.at(key), self.get(key))
        if seconds <= above:
            rule = f"must be longer than {above:g} s"
            raise ConfigurationError(self.at(key), rule, self.get(key))
        return seconds

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Return a finite number that is not below `least`; without a default it must be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise ConfigurationTypeError(self.at(key), f"must be a number, got {value!r:.60}")
        if value < least:
            raise ConfigurationError(self.at(key), f"must be at least {least:g}", value)
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """Return a whole number that is not below `least`; without a default it must be there."""
        value = self.number(key, default, least=least)
        if value != int(value):
            raise ConfigurationTypeError(self.at(key), "must be a whole number", value)
        return int(value)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigurationTypeError(self.at(key), f"must be a text, got {value!r:.60}")
        return value

    def unread(self, *beside: str) -> Iterator[Loss]:
        """Say what nobody has asked for, except what is beside the point."""
        for key, value in self._values.items():
            if key not in self._asked and key not in beside and value is not None:
                yield Loss(self.at(key), value, "left out: no policy of tarry says this")


def within(policy: Policy, timeout: float | None, path: str, losses: list[Loss]) -> Policy:
    """Bound a policy by the time that its source gives the call, all attempts together.

    A total budget alone bounds no attempt that has started, so each has a timeout, too.
    """
    if timeout is None:
        return policy
    attempt = min(timeout, policy.attempt_timeout or timeout)
    if policy.max_attempts == 1:
        return policy.replace(attempt_timeout=attempt)
    instead = (
        "no attempt starts after it, but tarry lets the one that runs end: "
        f"{format_duration(timeout + attempt)} in all at most"
    )
    losses.append(Loss(path, timeout, instead))
    return policy.replace(total_budget=timeout, attempt_timeout=attempt)


def hinted(path: str, name: str, source: str, max_hint: float) -> Loss:
    """Say that the source does something else when a server asks for a wait."""
    return Loss(
        path, name, f"{source}; tarry waits for up to {format_duration(max_hint)}, or gives up"
    )
