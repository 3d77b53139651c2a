"""What a proposal gives and takes, in words, by the two runs of a simulation."""

from __future__ import annotations

from math import isclose, isnan
from typing import TYPE_CHECKING

from tarry.core.verdict import Reason
from tarry.simulator.report.numbers import shown

if TYPE_CHECKING:
    from tarry.simulator.summary import Summary

LOSES = 0.01
"""The share of all calls from which on the loss is said first."""
_NOTABLE = 0.05
_CALLS = 0.001
"""Of ten thousand calls, ten more or less that succeed are not worth a word."""
_LESS_IS_BETTER = (
    ("p99", "ms", 0.001, "calls that succeed end sooner: p99", "calls that succeed end later: p99"),
    ("amplification", "x", 0.01, "fewer requests for each call:", "more requests for each call:"),
    ("recovered_after", "s", 2.0, "well again sooner:", "well again later:"),
)


def verdict(old: Summary, new: Summary) -> str:
    """Say which numbers got better and which got worse; small changes are left out."""
    better: list[str] = []
    worse: list[str] = []
    gain = new.success_rate - old.success_rate
    rates = _change(old.success_rate, new.success_rate, "%")
    if gain > _CALLS:
        better.append(f"more calls succeed: {rates}")
    if gain < -_CALLS:
        worse.append(f"fewer calls succeed: {rates}{_because(old, new)}")
    for name, unit, least, sooner, later in _LESS_IS_BETTER:
        before, after = float(getattr(old, name)), float(getattr(new, name))
        if isnan(before + after) or isclose(before, after, rel_tol=_NOTABLE, abs_tol=least):
            continue
        change = _change(before, after, unit)
        if after < before:
            better.append(f"{sooner} {change}")
        else:
            worse.append(f"{later} {change}")
    said = [
        f"{title}: {'; '.join(changes)}."
        for title, changes in (("Worse", worse), ("Better", better))
        if changes
    ]
    if gain < -LOSES:
        said.insert(0, "The proposal loses calls in this simulation.")
    return " ".join(said) or "No number changes by much."


def _change(before: float, after: float, unit: str) -> str:
    return f"{shown(before, unit)} → {shown(after, unit)}"


def _because(old: Summary, new: Summary) -> str:
    """Name what ends more calls than before, by the simulation's own count."""
    more = {name: count - old.reasons.get(name, 0) for name, count in new.reasons.items()}
    name = max(more, key=more.__getitem__, default=None)
    if name is None or more[name] <= 0:
        return ""
    words = "no attempts are left" if name == Reason.ATTEMPTS else Reason(name).words
    counts = f"{old.reasons.get(name, 0):,} → {new.reasons[name]:,}"
    return f", because more calls end where {words}: {counts}"
