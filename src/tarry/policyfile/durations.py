"""Lengths of time as other systems write them.

proto3 JSON has seconds with up to nine decimals ("0.1s"), the Gateway API whole numbers of up to
four units ("1m500ms"), and Istio reads whatever Go does ("1.5h", "100ms").
"""

from __future__ import annotations

import re
from math import isclose

from tarry.errors import ConfigurationError, ConfigurationTypeError

_LONGEST_PROTO = 315_576_000_000
"""Seconds: about 10,000 years, by the definition of google.protobuf.Duration."""
_LONGEST_GATEWAY_HOURS = 99_999
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(h|ms|us|µs|ns|m|s)"
_PARTS = re.compile(_PART)
_DURATION = re.compile(rf"(?:{_PART})+")
_PROTO = re.compile(r"\d+(?:\.\d{1,9})?s")


def proto(field: str, seconds: float) -> str:
    """Return seconds in proto3 JSON: "0.1s"."""
    if seconds > _LONGEST_PROTO:
        rule = f"must be at most {_LONGEST_PROTO:,} s to be exported, got {seconds:g}"
        raise ConfigurationError(field, rule)
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def gateway(field: str, seconds: float) -> str:
    """Return whole milliseconds in the form of the Gateway API: "1m30s"."""
    rest = round(seconds * 1000)
    hours = rest // 3_600_000
    if hours > _LONGEST_GATEWAY_HOURS:
        rule = f"must be less than 100,000 h for the Gateway API, got {seconds:g} s"
        raise ConfigurationError(field, rule)
    parts: list[str] = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        amount, rest = divmod(rest, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"


def milliseconds(seconds: float) -> float:
    """Round to whole milliseconds, at least one: what proxies count in."""
    rounded = max(1, round(seconds * 1000)) / 1000
    return seconds if isclose(rounded, seconds, rel_tol=1e-9) else rounded


def parse_proto(path: str, text: object) -> float:
    """Return the seconds that a duration of proto3 JSON stands for, which has no other unit."""
    seconds = parse(path, text)
    if not _PROTO.fullmatch(str(text)):
        right = proto(path, seconds)
        rule = f'must be a duration such as "0.1s", got {text!r}: write "{right}"'
        raise ConfigurationError(path, rule)
    return seconds


def parse(path: str, text: object) -> float:
    """Return the seconds that a duration of proto3 JSON or of Go stands for."""
    if not isinstance(text, str):
        raise ConfigurationTypeError(path, 'must be a duration such as "0.1s"', text)
    if not _DURATION.fullmatch(text):
        raise ConfigurationError(path, 'must be a duration such as "0.1s"', text)
    # Twelve digits, so that 100 ms are 0.1 s and not 0.1 s and a hair.
    return float(f"{sum(float(n) * _UNITS[unit] for n, unit in _PARTS.findall(text)):.12g}")
