"""Durations as text for people: 100 ms, 2.5 s, 3 min."""

from __future__ import annotations

_MIN_SECONDS_UNIT = 0.9995
"""From here on the unit is seconds: three digits of milliseconds would read 1e+03."""
_MIN_INTEGER, _MAX_INTEGER = 100, 1_000_000
"""Numbers in this range have no decimals: `.3g` would lose digits or use an exponent."""


def format_duration(seconds: float) -> str:
    """Return seconds with three digits and a unit that suits them: 100 ms, 2.5 s, 3 min, 75 h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_format_number(seconds / size)} {unit}"
    if seconds >= _MIN_SECONDS_UNIT:
        return f"{_format_number(seconds)} s"
    return f"{_format_number(seconds * 1000)} ms"


def _format_number(number: float) -> str:
    return f"{number:.0f}" if _MIN_INTEGER <= number < _MAX_INTEGER else f"{number:.3g}"
