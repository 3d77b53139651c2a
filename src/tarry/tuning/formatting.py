"""Numbers as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from tarry.core.checks import check_positive
from tarry.core.explain import format_duration
from tarry.errors import ConfigurationError

INTERVAL = "95 % interval"
"""How surely the truth lies between two bounds: see `tarry.tuning.estimates.Z`."""
_SECONDS = ("attempt_timeout", "initial_delay", "max_delay", "total_budget")
_TIME = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|m|min|h|)\s*", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_WHOLE = 9.95
"""From here on a percentage has two digits without a decimal."""
_LEAST = 0.01


def percent(share: float) -> str:
    """Return 0.38 as "38 %" and 0.002 as "0.2 %"."""
    value = 100 * share
    if 0 < value < _LEAST:
        return f"under {_LEAST:g} %"
    return f"{value:.0f} %" if abs(value) >= _WHOLE else f"{value:.2g} %"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 outage", "1,200 outages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def setting(field: str, value: object) -> str:
    """Return the value of a field of a policy, or of a table beside it."""
    if value is None:
        return "none"
    if field in _SECONDS and isinstance(value, (int, float)):
        return format_duration(value)
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        bare = ("kind", table.get("kind"))  # "ratio 0.02" says it as well as "ratio ratio=0.02"
        return " ".join(
            f"{one}" if name in bare else f"{name}={one}" for name, one in table.items()
        )
    return str(value)


def seconds(field: str, text: str) -> float:
    """Read a length of time: 2s, 500ms, 1.5 min; a bare number is seconds."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ConfigurationError(field, "must be a time such as 500ms, 2s, 10m or 24h", text)
    return check_positive(field, float(found[1]) * _UNITS[found[2]])
