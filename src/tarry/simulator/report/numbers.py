"""How a number of a study is shown: the same in the terminal, in the page and in the charts.

Values are in their own measure, seconds and shares; the unit says how they are written.
"""

from __future__ import annotations

from math import floor, isinf, isnan, log10

_FACTORS = {"": 1.0, "s": 1.0, "ms": 1000.0, "%": 100.0, "x": 1.0}
SUFFIXES = {"": "", "s": " s", "ms": " ms", "%": " %", "x": "x"}
_TIMES = ("s", "ms")
NOTHING = "-"
_DIGITS = 3
_SMALLEST = 0.001


def shown(value: float, unit: str = "") -> str:
    """Return it for people: 12,345, 0.25 s, 250 ms, 99.2 %, 4.1x; infinite seconds are never."""
    if isnan(value):
        return NOTHING
    if isinf(value):
        return "never" if unit in _TIMES else ("-∞" if value < 0 else "∞")
    return _plain(value, unit) + SUFFIXES[unit]


def scaled(value: float, unit: str) -> float:
    """Return the number that is written before the unit, as an axis needs it."""
    return value * _FACTORS[unit]


def _plain(value: float, unit: str) -> str:
    number = scaled(value, unit)
    if 0 < abs(number) < _SMALLEST:
        return f"{'>-' if number < 0 else '<'}{_SMALLEST}"
    text = _rounded(number)
    if unit == "%" and value < 1 and text == "100":
        return ">99.9"  # a failure in ten thousand calls is still a failure
    return text


def _rounded(number: float) -> str:
    """Return three significant digits, and every digit before the point."""
    if number == 0:
        return "0"
    places = max(0, _DIGITS - 1 - floor(log10(abs(number))))
    text = f"{number:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text
