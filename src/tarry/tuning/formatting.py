"""Format shares, counts and settings as text, and parse durations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from tarry.core.checks import check_positive
from tarry.core.text import format_duration
from tarry.errors import ConfigurationError

INTERVAL = "95 % interval"
"""The name of the confidence intervals that `tarry.tuning.estimates` computes."""
_DURATION_FIELDS = ("attempt_timeout", "initial_delay", "max_delay", "total_budget")
_DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|m|min|h|)\s*", re.ASCII)
_SECONDS_BY_UNIT = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_MIN_INTEGER_PERCENT = 9.95
"""A percentage of at least this is rounded to an integer, so that it has two digits or more."""
_MIN_SHOWN_PERCENT = 0.01


def format_percent(share: float) -> str:
    """Return 0.38 as "38 %" and 0.002 as "0.2 %"."""
    percent = 100 * share
    if 0 < percent < _MIN_SHOWN_PERCENT:
        return f"under {_MIN_SHOWN_PERCENT:g} %"
    return f"{percent:.0f} %" if abs(percent) >= _MIN_INTEGER_PERCENT else f"{percent:.2g} %"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 outage", "1,200 outages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_setting(field: str, value: object) -> str:
    """Return the value of a policy field, or of a table such as `budget`, as text."""
    if value is None:
        return "none"
    if field in _DURATION_FIELDS and isinstance(value, (int, float)):
        return format_duration(value)
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        # The names of `kind` and of the key that is named like the kind are left out:
        # "ratio 0.02" instead of "kind=ratio ratio=0.02".
        unnamed = ("kind", table.get("kind"))
        return " ".join(
            f"{item}" if name in unnamed else f"{name}={item}" for name, item in table.items()
        )
    return str(value)


def parse_duration(field: str, text: str) -> float:
    """Return the seconds of a duration such as 2s, 500ms or 1.5 min; a bare number is seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        rule = "must be a time such as 500ms, 2s, 10m or 24h"
        raise ConfigurationError(field, rule, text)
    return check_positive(field, float(match[1]) * _SECONDS_BY_UNIT[match[2]])
