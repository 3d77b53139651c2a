"""Durations in the formats of other systems.

proto3 JSON has seconds with up to nine decimals ("0.1s"). The Gateway API has whole numbers of up
to four units ("1m500ms"). Istio accepts the durations of Go ("1.5h", "100ms").
"""

from __future__ import annotations

import re
from math import isclose

from tarry.errors import ConfigurationError, ConfigurationTypeError

_MAX_PROTO_S = 315_576_000_000
"""About 10,000 years, the limit of google.protobuf.Duration."""
_MAX_GATEWAY_HOURS = 99_999
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(h|ms|us|µs|ns|m|s)"
_PARTS = re.compile(_PART)
_DURATION = re.compile(rf"(?:{_PART})+")
_PROTO = re.compile(r"\d+(?:\.\d{1,9})?s")


def format_proto(field: str, seconds: float) -> str:
    """Return seconds in the format of proto3 JSON: "0.1s"."""
    if seconds > _MAX_PROTO_S:
        rule = f"must be at most {_MAX_PROTO_S:,} s to be exported, got {seconds:g}"
        raise ConfigurationError(field, rule)
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def format_gateway(field: str, seconds: float) -> str:
    """Return seconds, rounded to milliseconds, in the format of the Gateway API: "1m30s"."""
    rest = round(seconds * 1000)
    hours = rest // 3_600_000
    if hours > _MAX_GATEWAY_HOURS:
        rule = f"must be less than 100,000 h for the Gateway API, got {seconds:g} s"
        raise ConfigurationError(field, rule)
    parts: list[str] = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        amount, rest = divmod(rest, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"


def round_to_ms(seconds: float) -> float:
    """Return seconds rounded to whole milliseconds, at least 1 ms, because proxies count in ms."""
    rounded = max(1, round(seconds * 1000)) / 1000
    return seconds if isclose(rounded, seconds, rel_tol=1e-9) else rounded


def parse_proto(path: str, text: object) -> float:
    """Return the seconds of a duration in proto3 JSON, whose only unit is seconds."""
    seconds = parse_duration(path, text)
    if not _PROTO.fullmatch(str(text)):
        corrected = format_proto(path, seconds)
        rule = f'must be a duration such as "0.1s", got {text!r}: write "{corrected}"'
        raise ConfigurationError(path, rule)
    return seconds


def parse_duration(path: str, text: object) -> float:
    """Return the seconds of a duration in the format of proto3 JSON or Go."""
    if not isinstance(text, str):
        raise ConfigurationTypeError(path, 'must be a duration such as "0.1s"', text)
    if not _DURATION.fullmatch(text):
        raise ConfigurationError(path, 'must be a duration such as "0.1s"', text)
    # Rounded to twelve digits, so that "100ms" is exactly 0.1.
    return float(f"{sum(float(n) * _UNITS[unit] for n, unit in _PARTS.findall(text)):.12g}")
