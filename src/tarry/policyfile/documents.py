"""Helpers for the documents that `tarry policy export` writes and `tarry policy import` reads.

Durations in proto3 JSON (Envoy, Istio, gRPC) are seconds with up to nine decimals ("0.1s"), those
of the Gateway API are whole numbers of up to four units ("1m500ms"). Istio also accepts durations
in the format of Go ("1.5h", "100ms"). A parameter `path` is the field or key that an error names.
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
_PROTO_DURATION = re.compile(r"(?:\d+(?:\.\d{1,9})?|\.\d{1,9})s")
_PROTO_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_RESOURCE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TYPO_SIMILARITY = 0.8
"""A key that is this similar (0 to 1) to a known key is taken for a misspelling."""

_DurationParser: TypeAlias = Callable[[str, object], float]


def format_proto_duration(path: str, seconds: float) -> str:
    """Return seconds in the format of proto3 JSON: "0.1s"."""
    if seconds > _MAX_PROTO_S:
        rule = f"must be at most {_MAX_PROTO_S:,} s to be exported, got {seconds:g}"
        raise ConfigurationError(path, rule)
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def format_gateway_duration(path: str, seconds: float) -> str:
    """Return seconds, rounded to milliseconds, in the format of the Gateway API: "1m30s"."""
    remaining_ms = round(seconds * 1000)
    hours = remaining_ms // 3_600_000
    if hours > _MAX_GATEWAY_HOURS:
        rule = f"must be less than 100,000 h for the Gateway API, got {seconds:g} s"
        raise ConfigurationError(path, rule)
    parts: list[str] = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        amount, remaining_ms = divmod(remaining_ms, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"


def round_to_ms(seconds: float) -> float:
    """Round seconds to whole milliseconds (the resolution of proxies), but to at least 1 ms."""
    rounded = max(1, round(seconds * 1000)) / 1000
    return seconds if isclose(rounded, seconds, rel_tol=1e-9) else rounded


def parse_proto_duration(path: str, text: object) -> float:
    """Return the seconds of a duration in proto3 JSON, whose only unit is seconds."""
    seconds = parse_duration(path, text)
    if not _PROTO_DURATION.fullmatch(str(text)):
        corrected = format_proto_duration(path, seconds)
        rule = f'must be a duration in seconds such as "0.1s", got {text!r}: write "{corrected}"'
        raise ConfigurationError(path, rule)
    if seconds > _MAX_PROTO_S:
        raise ConfigurationError(path, f"must be at most {_MAX_PROTO_S} s", text)
    return seconds


def parse_duration(path: str, text: object) -> float:
    """Return the seconds of a duration in the format of proto3 JSON or Go."""
    rule = 'must be a duration such as "0.1s"'
    if not isinstance(text, str):
        raise ConfigurationTypeError(path, rule, text)
    if not _DURATION.fullmatch(text):
        raise ConfigurationError(path, rule, text)
    # Rounding to twelve digits makes "100ms" exactly 0.1.
    parts = _DURATION_PART.findall(text)
    return float(f"{sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts):.12g}")


def check_resource_name(path: str, name: str) -> str:
    """Return the name of a Kubernetes resource; raise ConfigurationError if it is not allowed."""
    if not _RESOURCE_NAME.fullmatch(name):
        rule = "must be 1 to 63 letters a-z, digits and '-', with a letter or digit at both ends"
        raise ConfigurationError(path, rule, name)
    return name


def k8s_resource(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a Kubernetes resource."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


class DocumentTable:
    """A table (a JSON or YAML object) and its path in the document.

    It records which keys were read; `unread` returns the others. A null value counts as missing.
    """

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
        """Return all keys, also those whose value is null."""
        return list(self._values)

    def reject_typos(self, known_keys: Iterable[str]) -> None:
        """Raise ConfigurationError for a misspelt known key; other unknown keys are allowed."""
        known = list(known_keys)
        for key in self._values:
            meant = None if key in known else suggest(str(key), known, similarity=_TYPO_SIMILARITY)
            if meant:
                rule = f"is not a known key: did you mean {meant!r}?"
                raise ConfigurationError(self.path_of(key), rule)

    def path_of(self, key: str) -> str:
        """Return the path of a key in the document."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """Return the value of a key, or None when the key is missing."""
        self._keys_read.add(key)
        return self._values.get(key)

    def table(self, key: str) -> DocumentTable | None:
        """Return the table at a key, or None when the key is missing."""
        return DocumentTable(self.path_of(key), self.get(key)) if key in self else None

    def table_or_empty(self, key: str) -> DocumentTable:
        """Return the table at a key, or an empty table when the key is missing."""
        return self.table(key) or DocumentTable(self.path_of(key), {})

    def items_of(self, key: str) -> list[Any]:
        """Return the items of the list at a key; none when the key is missing."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigurationTypeError(self.path_of(key), "must be a list", value)
        return value  # pyright: ignore[reportUnknownVariableType]  # a list of anything

    def tables(self, key: str) -> list[DocumentTable]:
        """Return the tables in the list at a key; none when the key is missing."""
        path = self.path_of(key)
        return [DocumentTable(f"{path}[{i}]", item) for i, item in enumerate(self.items_of(key))]

    def seconds(
        self, key: str, *, allow_zero: bool = False, parse: _DurationParser = parse_duration
    ) -> float | None:
        """Return the seconds of a duration, or None when the key is missing."""
        if key not in self:
            return None
        seconds = parse(self.path_of(key), self.get(key))
        if not seconds and not allow_zero:
            raise ConfigurationError(self.path_of(key), "must be longer than 0 s", self.get(key))
        return seconds

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        minimum: float = 0.0,
        accept_text: bool = False,
    ) -> float:
        """Return a number of at least `minimum`; a missing key without a default is an error.

        `accept_text`: the number may be a string, as in proto3 JSON.
        """
        value = self.get(key)
        if accept_text and isinstance(value, str) and _PROTO_NUMBER.fullmatch(value):
            value = float(value)
        if value is None and default is not None:
            return default
        return check_at_least(self.path_of(key), value, minimum)

    def count(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """Return a whole number; the arguments are those of `number`."""
        value = self.number(key, default, minimum=minimum)
        if value != int(value):
            raise ConfigurationTypeError(self.path_of(key), "must be a whole number", value)
        return int(value)

    def text(self, key: str, default: str) -> str:
        """Return a string, or the default when the key is missing."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigurationTypeError(self.path_of(key), "must be a string", value)
        return value

    def unread(self) -> dict[str, Any]:
        """Return the keys that were not read, with their values; null values are left out."""
        items = self._values.items()
        return {key: value for key, value in items if not (key in self._keys_read or value is None)}
