"""Claims about the findings of a study, for a build that must fail: "full: peak_load <= 2"."""

from __future__ import annotations

import re
from math import isclose
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, NamedTuple

from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tarry.simulator.study import Findings, Row

_CLAIM = re.compile(
    r"""\s*(?:(?P<variant>.*\S)\s*:\s*)?
        (?P<metric>\w+)\s*
        (?P<sign><=|>=|==|<|>)\s*
        (?P<bound>[+-]?(?:inf|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+))\s*
        (?P<unit>ms|s|%|x|)\s*""",
    re.VERBOSE,
)
_UNITS = {"": 1.0, "x": 1.0, "s": 1.0, "ms": 0.001, "%": 0.01}
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
    "==": isclose,  # so that a mean over trials can meet it
}


class Claim(NamedTuple):
    """One claim, about every row or about those of one variant."""

    text: str
    variant: str | None
    metric: str
    sign: str
    bound: float


class Verdict(NamedTuple):
    """Whether a row meets a claim, and the value that was seen."""

    claim: Claim
    row: Row
    value: float
    holds: bool


def claim_of(text: str, variants: Iterable[str]) -> Claim:
    """Read a claim; it can be about one of these variants."""
    found = _CLAIM.fullmatch(text)
    if found is None:
        msg = (
            f'cannot read the claim {text!r}; write "amplification < 1.2" or "full: p99 <= 250ms", '
            f"with one of {', '.join(_SIGNS)}"
        )
        raise ConfigurationError(msg)
    known = list(variants)
    if found["variant"] is not None and found["variant"] not in known:
        msg = f"claim {text!r}: no variant {found['variant']!r} is run; there is {', '.join(known)}"
        raise ConfigurationError(msg)
    bound = float(found["bound"]) * _UNITS[found["unit"]]
    return Claim(text, found["variant"], found["metric"], found["sign"], bound)


def check(findings: Findings, texts: Sequence[str]) -> list[Verdict]:
    """Hold the findings against each claim, row by row."""
    variants = list(dict.fromkeys(row.variant for row in findings.rows))
    claims = [claim_of(text, variants) for text in texts]
    rows = [(row, row.metrics) for row in findings.rows]
    return [
        _verdict(claim, row, metrics)
        for claim in claims
        for row, metrics in rows
        if claim.variant in {None, row.variant}
    ]


def _verdict(claim: Claim, row: Row, metrics: dict[str, float]) -> Verdict:
    if claim.metric not in metrics:
        known = ", ".join(metrics)
        msg = f"claim {claim.text!r}: there is no number {claim.metric!r}; there are {known}"
        raise ConfigurationError(msg)
    value = metrics[claim.metric]
    return Verdict(claim, row, value, _SIGNS[claim.sign](value, claim.bound))
