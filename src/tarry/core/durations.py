"""Durations as text for people: 100 ms, 2.5 s, 3 min."""

from __future__ import annotations

_MIN_SECONDS_UNIT = 0.9995
"""Times from here on are in seconds, because 999.5 ms would be printed as 1e+03 ms."""
_MIN_INTEGER, _MAX_INTEGER = 100, 1_000_000
"""Numbers in this range are printed without decimals, because `.3g` would drop digits."""


def format_duration(seconds: float) -> str:
    """Return seconds with three digits in the best unit: 100 ms, 2.5 s, 3 min, 75 h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_format_number(seconds / size)} {unit}"
    if seconds >= _MIN_SECONDS_UNIT:
        return f"{_format_number(seconds)} s"
    return f"{_format_number(seconds * 1000)} ms"


def _format_number(number: float) -> str:
    return f"{number:.0f}" if _MIN_INTEGER <= number < _MAX_INTEGER else f"{number:.3g}"
