"""Claims: how they are read, and what they say about findings."""

from __future__ import annotations

from math import inf, nan

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.gate import check, claim_of
from tarry.simulator.study import Findings, Row, Study


class Numbers:
    """A trial that has these numbers."""

    def __init__(self, **numbers: float) -> None:
        self._numbers = numbers

    def metrics(self) -> dict[str, float]:
        """Return them."""
        return self._numbers


def findings(*rows: tuple[str, dict[str, float]]) -> Findings:
    """What a study with one trial for each row found."""
    study = Study(
        name="s",
        question="",
        lesson="",
        run=list,
        knob="variant",
        variants=tuple(name for name, _ in rows),
        columns=(),
        plots=(),
    )
    return Findings(study, 0, 1, [Row(name, {}, [Numbers(**numbers)]) for name, numbers in rows])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amplification < 1.2", (None, "amplification", "<", 1.2)),
        ("amplification<1.2x", (None, "amplification", "<", 1.2)),
        ("full: peak_load <= 2", ("full", "peak_load", "<=", 2.0)),
        (" full+budget : p99 > 250 ms ", ("full+budget", "p99", ">", 0.25)),
        ("a: b: p50 >= .5s", ("a: b", "p50", ">=", 0.5)),
        ("success_rate >= 99%", (None, "success_rate", ">=", 0.99)),
        ("recovered_after < inf", (None, "recovered_after", "<", inf)),
        ("crashes == 0", (None, "crashes", "==", 0.0)),
        ("calls < 1e3", (None, "calls", "<", 1000.0)),
        ("calls > -1", (None, "calls", ">", -1.0)),
    ],
)
def test_claim_is_read(text: str, expected: tuple[object, ...]) -> None:
    """A name, a sign and a bound with its unit; a variant before a colon."""
    claim = claim_of(text, ["full", "full+budget", "a: b"])

    assert (text, *expected) == claim


@pytest.mark.parametrize(
    "text", ["", "p99", "p99 <", "p99 = 3", "p99 != 3", "< 3", "p99 < x", "p99 < nan", "p99 < 3 kg"]
)
def test_what_is_no_claim_is_refused(text: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(ConfigurationError, match=r'cannot read the claim .* "amplification < 1.2"'):
        claim_of(text, [])


def test_claim_about_unknown_variant_is_refused() -> None:
    """A claim about nothing would hold for ever."""
    with pytest.raises(ConfigurationError, match="no variant 'fall' is run; there is full, none"):
        claim_of("fall: p99 < 3", ["full", "none"])


def test_claim_about_unknown_number_is_refused() -> None:
    """The message lists the numbers that there are."""
    with pytest.raises(ConfigurationError, match="no number 'p98'; there are p50, p99"):
        check(findings(("a", {"p50": 1.0, "p99": 2.0})), ["p98 < 3"])


def test_every_row_is_held_against_a_claim() -> None:
    """Without a variant, a claim is about all of them."""
    found = findings(("a", {"load": 1.0}), ("b", {"load": 3.0}))

    verdicts = check(found, ["load < 2", "b: load == 3"])

    assert [("a", 1.0, True), ("b", 3.0, False), ("b", 3.0, True)] == [
        (verdict.row.variant, verdict.value, verdict.holds) for verdict in verdicts
    ]


@pytest.mark.parametrize(
    ("claim", "value", "holds"),
    [
        ("x < 2", 2.0, False),
        ("x <= 2", 2.0, True),
        ("x > 2", 2.0, False),
        ("x >= 2", 2.0, True),
        ("x == 0.3", 0.1 + 0.2, True),
        ("x < inf", inf, False),
        ("x == inf", inf, True),
        ("x < 2", nan, False),
        ("x >= 2", nan, False),
    ],
)
def test_signs(claim: str, value: float, holds: bool) -> None:
    """A number that is not known meets no claim."""
    (verdict,) = check(findings(("a", {"x": value})), [claim])

    assert holds == verdict.holds
