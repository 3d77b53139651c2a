"""One number of a proposal, and what is said when the log is too small for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tarry.tuning.words import setting


class Line(NamedTuple):
    """One number of a proposal. Values are plain: seconds, counts, tables."""

    field: str
    current: Any
    proposed: Any
    reason: str
    evidence: str = ""
    enough: bool = True
    """False: too little data, so the current value stays."""
    advice: bool = False
    """True: not part of the proposed defence."""


def kept(field: str, value: Any, why: str, evidence: str = "", *, enough: bool = True) -> Line:
    """Leave a value as it is, and say why."""
    stays = "left out" if value is None else f"kept at {setting(field, value)}"
    return Line(field, value, value, f"{why}; {stays}", evidence, enough)


def too_little(field: str, value: Any, there: str, need: str) -> Line:
    """Leave a value as it is, because a number that the log does not have is not guessed."""
    return kept(field, value, f"too little data: {there}, {need}", enough=False)
