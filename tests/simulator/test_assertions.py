"""Claims: how they are read, and what they say about findings."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.assertions import check_assertions, metric_units, parse_assertion
from tarry.simulator.study import Column, Study, StudyResults, StudyRow

UNITS = metric_units([Column("time", "time", "ms")])


class Numbers:
    """A trial that has these numbers."""

    def __init__(self, **numbers: float) -> None:
        self._numbers = numbers

    def metrics(self) -> dict[str, float]:
        """Return them."""
        return self._numbers


def findings(*rows: tuple[str, dict[str, float]]) -> StudyResults:
    """What a study with one trial for each row found."""
    study = Study(
        name="s",
        question="",
        lesson="",
        run=list,
        variant_parameter="variant",
        variants=tuple(name for name, _ in rows),
        columns=(),
        plots=(),
    )
    return StudyResults(
        study, 0, 1, [StudyRow(name, {}, [Numbers(**numbers)]) for name, numbers in rows]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amplification < 1.2", (None, "amplification", "<", 1.2, "")),
        ("amplification<1.2x", (None, "amplification", "<", 1.2, "x")),
        ("full: peak_load <= 2", ("full", "peak_load", "<=", 2.0, "")),
        (" full+budget : p99 > 250 ms ", ("full+budget", "p99", ">", 0.25, "ms")),
        ("a: b: p50 >= .5s", ("a: b", "p50", ">=", 0.5, "s")),
        ("success_rate >= 99%", (None, "success_rate", ">=", 0.99, "%")),
        ("success_rate >= 0.99", (None, "success_rate", ">=", 0.99, "")),
        ("recovered_after < inf", (None, "recovered_after", "<", inf, "s")),
        ("recovered_after == 0", (None, "recovered_after", "==", 0.0, "s")),
        ("crashes == 0", (None, "crashes", "==", 0.0, "")),
        ("calls < 1e3", (None, "calls", "<", 1000.0, "")),
        ("calls > -1", (None, "calls", ">", -1.0, "")),
        ("of_its_own < 3ms", (None, "of_its_own", "<", 0.003, "ms")),
    ],
)
def test_claim_is_read(text: str, expected: tuple[object, ...]) -> None:
    """A name, a sign and a bound with its unit; a variant before a colon."""
    claim = parse_assertion(text, ["full", "full+budget", "a: b"], UNITS)

    assert (text, *expected) == claim


@pytest.mark.parametrize(
    "text", ["", "p99", "p99 <", "p99 = 3", "p99 != 3", "< 3", "p99 < x", "p99 < nan", "p99 < 3 kg"]
)
def test_what_is_no_claim_is_refused(text: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(
        ConfigurationError, match=r'cannot parse the assertion .* "amplification < 1.2"'
    ):
        parse_assertion(text, [], UNITS)


def test_claim_about_unknown_variant_is_refused() -> None:
    """A claim about nothing would hold for ever."""
    with pytest.raises(
        ConfigurationError, match="variant 'fall' is not run; the variants are full, none"
    ):
        parse_assertion("fall: p99 < 3s", ["full", "none"], UNITS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99 < 250", "p99 is a time; write 250ms or 250s"),
        ("time < 250", "time is a time; write 250ms or 250s"),
        ("p99 < 99%", "p99 is not measured in '%'; write 99s or 99ms"),
        ("success_rate > 90", "success_rate is a share; write 90%"),
        ("success_rate > 90s", "success_rate is not measured in 's'; write 90 or 90%"),
        ("succeeded > 90%", "succeeded is not measured in '%'; write 90"),
    ],
)
def test_unit_that_does_not_fit_is_refused(text: str, expected: str) -> None:
    """A build that means milliseconds does not pass because nothing takes as many seconds."""
    with pytest.raises(ConfigurationError) as caught:
        parse_assertion(text, [], UNITS)

    assert f"assertion {text!r}: {expected}" == str(caught.value)


def test_claim_about_unknown_number_is_refused() -> None:
    """The message lists the numbers that there are, with the titles of those in the table."""
    of = findings(("a", {"p50": 1.0, "p99": 2.0, "calls": 3.0}))
    columns = (Column("p99", "p99 of those"), Column("calls", "calls"))

    with pytest.raises(ConfigurationError) as caught:
        check_assertions(of._replace(study=replace(of.study, columns=columns)), ["p98 < 3"])

    assert str(caught.value).endswith(
        "unknown metric 'p98'; there are p50, p99 (p99 of those), calls"
    )


def test_every_row_is_held_against_a_claim() -> None:
    """Without a variant, a claim is about all of them."""
    found = findings(("a", {"load": 1.0}), ("b", {"load": 3.0}))

    verdicts = check_assertions(found, ["load < 2", "b: load == 3"])

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
    (verdict,) = check_assertions(findings(("a", {"x": value})), [claim])

    assert holds == verdict.holds


@pytest.mark.parametrize(
    ("metric", "seen"),
    [
        ("p99", "p99 has no value: no call succeeded"),
        ("peak_load", "peak_load has no value: the last server has no capacity limit"),
        ("recovered_after", "recovered_after has no value: there is no disruption to recover from"),
        ("x", "x has no value"),
    ],
)
def test_number_without_value_fails_and_says_why(metric: str, seen: str) -> None:
    """A build does not pass because there was nothing to measure."""
    unit = UNITS.get(metric, "")
    claims = [f"{metric} < 1{unit}", f"{metric} >= 1{unit}"]

    verdicts = check_assertions(findings(("a", {metric: nan})), claims)

    assert [(False, seen)] * 2 == [(one.holds, one.describe_value()) for one in verdicts]


def test_trial_without_value_fails_though_the_others_are_well() -> None:
    """A mean over the trials that went well says nothing about the one that did not."""
    found = findings(("a", {"p99": 0.1}))
    row = found.rows[0]._replace(trials=[Numbers(p99=0.1), Numbers(p99=nan), Numbers(p99=0.3)])

    (verdict,) = check_assertions(found._replace(rows=[row]), ["p99 < 1s"])

    assert not verdict.holds
    assert "p99 has no value in 1 of 3 trials: no call succeeded" == verdict.describe_value()


@pytest.mark.parametrize(
    ("claim", "value", "expected"),
    [
        ("p99 < 1s", 2.3014712, "p99 is 2.30147s"),
        ("p99 < 250ms", 2.3014712, "p99 is 2301.47ms"),
        ("recovered_after < 1ms", inf, "recovered_after is inf"),
        ("success_rate > 90%", 0.187, "success_rate is 18.7%"),
        ("success_rate > 0.9", 0.187, "success_rate is 0.187"),
        ("amplification < 1.2x", 4.22, "amplification is 4.22x"),
    ],
)
def test_value_that_was_seen_is_said(claim: str, value: float, expected: str) -> None:
    """In the unit of the bound, and with as many digits as anybody needs."""
    (verdict,) = check_assertions(findings(("a", {claim.partition(" ")[0]: value})), [claim])

    assert expected == verdict.describe_value()
