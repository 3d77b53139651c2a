"""Claims about the findings of a study, for a build that must fail: "full: peak_load <= 2"."""

from __future__ import annotations

import re
from math import isclose, isfinite, isinf, isnan
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, NamedTuple

from tarry.errors import ConfigurationError
from tarry.simulator.metrics import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tarry.simulator.study import Column, Findings, Row

_CLAIM = re.compile(
    r"""\s*(?:(?P<variant>.*\S)\s*:\s*)?
        (?P<metric>\w+)\s*
        (?P<sign><=|>=|==|<|>)\s*
        (?P<bound>[+-]?(?:inf|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+))\s*
        (?P<unit>ms|s|%|x|)\s*""",
    re.VERBOSE,
)
_UNITS = {"": 1.0, "x": 1.0, "s": 1.0, "ms": 0.001, "%": 0.01}
_TIMES = ("s", "ms")
_TAKEN = {"": ("",), "x": ("", "x", "%"), "%": ("", "%"), "s": _TIMES, "ms": _TIMES}
"""By the unit of a number, the units that its bound may have."""
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
    "==": isclose,  # so that a mean over trials can meet it
}
_NO_VALUE = {
    "success_rate": "no call was begun",
    "amplification": "no call was begun",
    "attempts_per_call": "no call was begun",
    "peak_load": "the last server has no capacity",
    "recovered": "there is no trouble to recover from",
    "recovered_after": "there is no trouble to recover from",
    "p50": "no call succeeded",
    "p99": "no call succeeded",
    "p999": "no call succeeded",
}
"""Why a number of a run may be missing."""


class Claim(NamedTuple):
    """One claim, about every row or about those of one variant."""

    text: str
    variant: str | None
    metric: str
    sign: str
    bound: float
    unit: str = ""
    """The one that the bound was written in."""


class Verdict(NamedTuple):
    """Whether a row meets a claim, and the value that was seen."""

    claim: Claim
    row: Row
    value: float
    holds: bool
    missing: int
    """In how many of the trials the number has no value."""

    def seen(self) -> str:
        """Say what was seen instead of what is claimed."""
        metric, trials = self.claim.metric, len(self.row.trials)
        if not self.missing:
            unit = self.claim.unit if isfinite(self.value) else ""
            return f"{metric} is {self.value / _UNITS[unit]:.6g}{unit}"
        where = f" in {self.missing} of {trials} trials" if trials > 1 else ""
        why = f": {_NO_VALUE[metric]}" if metric in _NO_VALUE else ""
        return f"{metric} has no value{where}{why}"


def units_of(columns: Iterable[Column]) -> dict[str, str]:
    """Return the unit of each number that has one by nature or in the table."""
    shown = {column.metric: column.unit for column in columns}
    return shown | {name: metric.unit for name, metric in MEANINGS.items()}


def claim_of(text: str, variants: Iterable[str], units: Mapping[str, str]) -> Claim:
    """Read a claim; it can be about one of these variants, and its bound needs a fitting unit."""
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
    unit = found["unit"]
    bound = float(found["bound"]) * _UNITS[unit]
    of = units.get(found["metric"])
    if of in _TIMES and not unit and (bound == 0 or isinf(bound)):
        unit = "s"  # nothing and never are the same in all units
    if of is not None:
        _check_unit(text, found, of, bound, unit)
    return Claim(text, found["variant"], found["metric"], found["sign"], bound, unit)


def check(findings: Findings, texts: Sequence[str]) -> list[Verdict]:
    """Hold the findings against each claim, row by row."""
    variants = list(dict.fromkeys(row.variant for row in findings.rows))
    columns = findings.study.columns
    units = units_of(columns)
    claims = [claim_of(text, variants, units) for text in texts]
    rows = [(row, row.metrics) for row in findings.rows]
    return [
        _verdict(claim, row, metrics, columns)
        for claim in claims
        for row, metrics in rows
        if claim.variant in {None, row.variant}
    ]


def _check_unit(text: str, found: re.Match[str], of: str, bound: float, unit: str) -> None:
    metric, number = found["metric"], found["bound"]
    if of in _TIMES and not unit:
        msg = f"claim {text!r}: is that {number}ms or {number}s?"
    elif of == "%" and not unit and bound > 1:
        msg = f"claim {text!r}: {metric} is a share; write {number}%"
    elif unit not in _TAKEN[of]:
        taken = " or ".join(f"{number}{one}" for one in _TAKEN[of])
        msg = f"claim {text!r}: {metric} is not counted in {unit!r}; write {taken}"
    else:
        return
    raise ConfigurationError(msg)


def _verdict(
    claim: Claim, row: Row, metrics: dict[str, float], columns: Iterable[Column]
) -> Verdict:
    if claim.metric not in metrics:
        titles = {one.metric: one.title for one in columns if one.title != one.metric}
        known = ", ".join(f"{one} ({titles[one]})" if one in titles else one for one in metrics)
        msg = f"claim {claim.text!r}: there is no number {claim.metric!r}; there are {known}"
        raise ConfigurationError(msg)
    value = metrics[claim.metric]
    # The mean leaves out trials without a value, which may be the ones where all was lost.
    missing = sum(isnan(trial.metrics()[claim.metric]) for trial in row.trials)
    holds = not missing and _SIGNS[claim.sign](value, claim.bound)
    return Verdict(claim, row, value, holds, missing)
