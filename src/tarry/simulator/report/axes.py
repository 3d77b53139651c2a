"""Scales and axes of the charts: where they start and end, and what stands at their ticks."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.simulator.report.numbers import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable

_FEW_DECADES = 2


class Extent(NamedTuple):
    """The part of an axis that is drawn. `top` is where values stand that never come."""

    low: float
    high: float
    top: float
    log: bool

    def at(self, value: float | None, *, never: bool = False) -> float | None:
        """Return where a value is drawn: zero has no place on a log axis but its foot."""
        if never:
            return self.top
        if value is None:
            return None
        return max(value, self.low) if self.log else value

    def scale(self) -> dict[str, Any]:
        """Return the scale."""
        kind = {"type": "log"} if self.log else {"type": "linear", "nice": False}
        return {**kind, "domain": [self.low, self.top]}


def extent(values: Iterable[float | None], *, log: bool, room: float = 1.0) -> Extent:
    """Return an extent that holds all values, with `room` above the highest as a factor."""
    known = [value for value in values if value is not None]
    positive = [value for value in known if value > 0]
    if log and positive:
        low = 10.0 ** floor(log10(min(positive)))
        high = max(positive)
        high = max(high, low * 10)
        return Extent(low, high, high * (high / low) ** (room - 1), log=True)
    high = max(known, default=0.0) or 1.0
    low = min(0.0, *known) if known else 0.0
    return Extent(low, high, low + (high - low) * room, log=False)


def axis(reach: Extent, unit: str, title: str | None, count: int = 4) -> dict[str, Any]:
    """Return an axis whose ticks carry the unit; one title stands level above it."""
    plain = "abs(datum.value) >= 10000 ? format(datum.value, '.3~s') : format(datum.value, ',~g')"
    made: dict[str, Any] = {
        "title": title,
        "labelExpr": f"({plain}) + '{SUFFIXES[unit]}'",
        "domain": False,
        "ticks": False,
    }
    return made | ({"values": ticks(reach)} if reach.log else {"tickCount": count})


def ticks(reach: Extent) -> list[float]:
    """Return the powers of ten on a log axis, and the steps between when they are few."""
    first, last = floor(log10(reach.low)), ceil(log10(reach.high))
    steps = (1, 2, 5) if last - first <= _FEW_DECADES else (1,)
    every = max(1, (last - first) // 5)
    marks = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
    return [mark for mark in marks if reach.low <= mark <= reach.high]
