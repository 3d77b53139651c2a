"""Read documents of other systems: errors contain the path, and unread keys become losses."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from tarry.core.text import format_duration, suggest
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.durations import parse_duration
from tarry.policyfile.losses import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tarry.core.policy import Policy

_TYPO_SIMILARITY = 0.8
"""A key that is this similar (0 to 1) to a known key is taken for a misspelling."""


class DocumentTable:
    """A table of a document with its path. It keeps track of the keys that were read."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise ConfigurationTypeError(path or "the document", "must be an object", value)
        self.path = path
        self._values = cast("Mapping[str, Any]", value)
        self._keys_read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._keys_read.add(key)
        return self._values.get(key) is not None

    def keys(self) -> list[str]:
        """Return all keys."""
        return list(self._values)

    def check_spelling(self, known: Iterable[str]) -> None:
        """Reject a key that looks like a misspelt known key; other keys may be valid elsewhere."""
        names = list(known)
        for key in self._values:
            close = None if key in names else suggest(str(key), names, similarity=_TYPO_SIMILARITY)
            if close:
                rule = f"is not a known key: did you mean {close!r}?"
                raise ConfigurationError(self.path_of(key), rule)

    def path_of(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """Return the value of a key, or None when it is missing."""
        self._keys_read.add(key)
        return self._values.get(key)

    def table(self, key: str) -> DocumentTable | None:
        """Return a nested table, or None when it is missing."""
        return DocumentTable(self.path_of(key), self.get(key)) if key in self else None

    def items(self, key: str) -> list[Any]:
        """Return a list; it is empty when the key is missing."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigurationTypeError(self.path_of(key), "must be a list", value)
        return value  # pyright: ignore[reportUnknownVariableType]

    def tables(self, key: str) -> list[DocumentTable]:
        """Return a list of nested tables."""
        return [
            DocumentTable(f"{self.path_of(key)}[{i}]", item)
            for i, item in enumerate(self.items(key))
        ]

    def seconds(
        self,
        key: str,
        *,
        above: float = 0.0,
        read: Callable[[str, object], float] = parse_duration,
    ) -> float | None:
        """Return a duration that is longer than `above`, or None when it is missing."""
        if key not in self:
            return None
        seconds = read(self.path_of(key), self.get(key))
        if seconds <= above:
            rule = f"must be longer than {above:g} s"
            raise ConfigurationError(self.path_of(key), rule, self.get(key))
        return seconds

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """Return a finite number that is at least `minimum`; without a default it is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise ConfigurationTypeError(self.path_of(key), "must be a number", value)
        if value < minimum:
            raise ConfigurationError(self.path_of(key), f"must be at least {minimum:g}", value)
        return value

    def count(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """Return a whole number that is at least `minimum`; without a default it is required."""
        value = self.number(key, default, minimum=minimum)
        if value != int(value):
            raise ConfigurationTypeError(self.path_of(key), "must be a whole number", value)
        return int(value)

    def text(self, key: str, default: str) -> str:
        """Return a string, or the default when it is missing."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigurationTypeError(self.path_of(key), "must be a string", value)
        return value

    def unread_losses(self, *ignored: str) -> Iterator[Loss]:
        """Return a loss for each key that was not read, except for keys in `ignored`."""
        for key, value in self._values.items():
            if key not in self._keys_read and key not in ignored and value is not None:
                yield Loss(
                    self.path_of(key), value, "left out: a policy of tarry has no such setting"
                )


def apply_call_timeout(
    policy: Policy, timeout: float | None, path: str, losses: list[Loss]
) -> Policy:
    """Return the policy with `timeout`, the other system's timeout for the whole call.

    A total budget does not stop a running attempt, so each attempt gets a timeout as well.
    """
    if timeout is None:
        return policy
    attempt = min(timeout, policy.attempt_timeout or timeout)
    if policy.max_attempts == 1:
        return policy.replace(attempt_timeout=attempt)
    instead = (
        "no attempt starts after it, but tarry lets a running attempt finish: "
        f"at most {format_duration(timeout + attempt)} in total"
    )
    losses.append(Loss(path, timeout, instead))
    return policy.replace(total_budget=timeout, attempt_timeout=attempt)


def hint_loss(path: str, name: str, source: str, max_hint: float) -> Loss:
    """Return the loss that tarry follows the hint `name` of a server differently.

    `source` says what the other system does with it.
    """
    return Loss(
        path, name, f"{source}; tarry waits for up to {format_duration(max_hint)}, or gives up"
    )
