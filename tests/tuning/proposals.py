"""Proposals for logs whose truth is known; what a log says is gathered once."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tests.tuning.logs import Truth

if TYPE_CHECKING:
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.rules import Suggestion

TRUTH = Truth(
    calls=20_000,
    median=0.05,
    odds=(0.97, 0.9, 0.5, 0.001),
    outages=((50, 90), (150, 190), (300, 340)),
)
P995 = 2.5758
"""Of the normal distribution."""


@cache
def evidence_of(truth: Truth) -> Evidence:
    """Gather once what many tests look at."""
    return analyze_log(truth.log())


def line_of(truth: Truth, field: str, *arguments: Any) -> Suggestion:
    """Return one line of the proposal for a log."""
    lines = propose(evidence_of(truth), *arguments).suggestions
    return next(line for line in lines if line.field == field)
