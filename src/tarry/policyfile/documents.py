"""Helpers for documents of other systems: tables with typed values, and duration formats.

proto3 JSON has durations in seconds with up to nine decimals ("0.1s"). The Gateway API has whole
numbers of up to four units ("1m500ms"). Istio accepts the durations of Go ("1.5h", "100ms").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import isclose
from typing import Any, TypeAlias, cast

from tarry.core.checks import check_at_least
from tarry.core.text import suggest
from tarry.errors import ConfigurationError, ConfigurationTypeError

_MAX_PROTO_S = 315_576_000_000
"""About 10,000 years, the limit of google.protobuf.Duration."""
_MAX_GATEWAY_HOURS = 99_999
_UNIT_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION_PART_PATTERN = r"(\d+(?:\.\d*)?|\.\d+)(h|ms|us|µs|ns|m|s)"
_DURATION_PART = re.compile(_DURATION_PART_PATTERN)
_DURATION = re.compile(rf"(?:{_DURATION_PART_PATTERN})+")
_PROTO_DURATION = re.compile(r"\d+(?:\.\d{1,9})?s")
_RESOURCE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TYPO_SIMILARITY = 0.8
"""A key that is this similar (0 to 1) to a known key is taken for a misspelling."""

_DurationParser: TypeAlias = Callable[[str, object], float]


def format_proto_duration(field: str, seconds: float) -> str:
    """Return seconds in the format of proto3 JSON: "0.1s"."""
    if seconds > _MAX_PROTO_S:
        rule = f"must be at most {_MAX_PROTO_S:,} s to be exported, got {seconds:g}"
        raise ConfigurationError(field, rule)
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def format_gateway_duration(field: str, seconds: float) -> str:
    """Return seconds, rounded to milliseconds, in the format of the Gateway API: "1m30s"."""
    remaining_ms = round(seconds * 1000)
    hours = remaining_ms // 3_600_000
    if hours > _MAX_GATEWAY_HOURS:
        rule = f"must be less than 100,000 h for the Gateway API, got {seconds:g} s"
        raise ConfigurationError(field, rule)
    parts: list[str] = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        amount, remaining_ms = divmod(remaining_ms, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"


def round_to_ms(seconds: float) -> float:
    """Return seconds rounded to whole milliseconds, at least 1 ms, because proxies count in ms."""
    rounded = max(1, round(seconds * 1000)) / 1000
    return seconds if isclose(rounded, seconds, rel_tol=1e-9) else rounded


def parse_proto_duration(path: str, text: object) -> float:
    """Return the seconds of a duration in proto3 JSON, whose only unit is seconds."""
    seconds = parse_duration(path, text)
    if not _PROTO_DURATION.fullmatch(str(text)):
        corrected = format_proto_duration(path, seconds)
        rule = f'must be a duration such as "0.1s", got {text!r}: write "{corrected}"'
        raise ConfigurationError(path, rule)
    return seconds


def parse_duration(path: str, text: object) -> float:
    """Return the seconds of a duration in the format of proto3 JSON or Go."""
    rule = 'must be a duration such as "0.1s"'
    if not isinstance(text, str):
        raise ConfigurationTypeError(path, rule, text)
    if not _DURATION.fullmatch(text):
        raise ConfigurationError(path, rule, text)
    # Rounded to twelve digits, so that "100ms" is exactly 0.1.
    parts = _DURATION_PART.findall(text)
    return float(f"{sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts):.12g}")


def check_resource_name(name: str) -> str:
    """Return the name, or raise ConfigurationError if Kubernetes does not allow it."""
    if not _RESOURCE_NAME.fullmatch(name):
        rule = "must be lower case letters, digits and '-', at most 63 characters"
        raise ConfigurationError("name", rule, name)
    return name


def k8s_resource(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a Kubernetes resource as plain values."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


class DocumentTable:
    """A table (a JSON or YAML object) with its path in the document. Keeps track of keys read."""

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

    def reject_typos(self, known: Iterable[str]) -> None:
        """Reject a key that looks like a misspelt known key; other unknown keys are allowed."""
        names = list(known)
        for key in self._values:
            meant = None if key in names else suggest(str(key), names, similarity=_TYPO_SIMILARITY)
            if meant:
                rule = f"is not a known key: did you mean {meant!r}?"
                raise ConfigurationError(self.path_of(key), rule)

    def path_of(self, key: str) -> str:
        """Return the path of a key in the document."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """Return the value of a key, or None when it is missing."""
        self._keys_read.add(key)
        return self._values.get(key)

    def table(self, key: str) -> DocumentTable | None:
        """Return a nested table, or None when it is missing."""
        return DocumentTable(self.path_of(key), self.get(key)) if key in self else None

    def table_or_empty(self, key: str) -> DocumentTable:
        """Return a nested table; a missing table is empty."""
        return self.table(key) or DocumentTable(self.path_of(key), {})

    def items_of(self, key: str) -> list[Any]:
        """Return the items of a list; a missing list is empty."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigurationTypeError(self.path_of(key), "must be a list", value)
        return value  # pyright: ignore[reportUnknownVariableType]  # a list of anything

    def tables(self, key: str) -> list[DocumentTable]:
        """Return the items of a list of nested tables."""
        path = self.path_of(key)
        return [DocumentTable(f"{path}[{i}]", item) for i, item in enumerate(self.items_of(key))]

    def seconds(
        self, key: str, *, allow_zero: bool = False, parse: _DurationParser = parse_duration
    ) -> float | None:
        """Return a duration in seconds, or None when it is missing."""
        if key not in self:
            return None
        seconds = parse(self.path_of(key), self.get(key))
        if not seconds and not allow_zero:
            raise ConfigurationError(self.path_of(key), "must be longer than 0 s", self.get(key))
        return seconds

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """Return a finite number that is at least `minimum`; without a default it is required."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        return check_at_least(self.path_of(key), value, minimum)

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

    def unread(self) -> dict[str, Any]:
        """Return the keys that were not read, with their values."""
        items = self._values.items()
        return {key: value for key, value in items if not (key in self._keys_read or value is None)}
