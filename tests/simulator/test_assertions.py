"""Assertions: how they are parsed, and how they are checked against results."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.assertions import check_assertions, metric_units, parse_assertion
from tarry.simulator.study import Column, Study, StudyResults, StudyRow

UNITS = metric_units([Column("time", "time", "ms")])


class FixedTrial:
    """A trial with these metrics."""

    def __init__(self, **numbers: float) -> None:
        self._numbers = numbers

    def metrics(self) -> dict[str, float]:
        """Return the metrics."""
        return self._numbers


def make_results(*rows: tuple[str, dict[str, float]]) -> StudyResults:
    """Return results with one trial for each row."""
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
        study, 0, 1, [StudyRow(name, {}, [FixedTrial(**numbers)]) for name, numbers in rows]
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
def test_assertion_is_parsed(text: str, expected: tuple[object, ...]) -> None:
    """An assertion has a metric, an operator, a bound with its unit, and an optional variant."""
    claim = parse_assertion(text, ["full", "full+budget", "a: b"], UNITS)

    assert (text, *expected) == claim


@pytest.mark.parametrize(
    "text", ["", "p99", "p99 <", "p99 = 3", "p99 != 3", "< 3", "p99 < x", "p99 < nan", "p99 < 3 kg"]
)
def test_invalid_assertion_is_rejected(text: str) -> None:
    """The error shows how an assertion is written."""
    with pytest.raises(
        ConfigurationError, match=r'cannot parse the assertion .* "amplification < 1.2"'
    ):
        parse_assertion(text, [], UNITS)


def test_unknown_variant_is_rejected() -> None:
    """An assertion about an unknown variant would always hold."""
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
def test_wrong_or_missing_unit_is_rejected(text: str, expected: str) -> None:
    """A build that means milliseconds must not pass because a bound was read as seconds."""
    with pytest.raises(ConfigurationError) as caught:
        parse_assertion(text, [], UNITS)

    assert f"assertion {text!r}: {expected}" == str(caught.value)


def test_unknown_metric_is_rejected() -> None:
    """The error lists the known metrics, with the titles of those in the table."""
    results = make_results(("a", {"p50": 1.0, "p99": 2.0, "calls": 3.0}))
    columns = (Column("p99", "p99 of those"), Column("calls", "calls"))

    with pytest.raises(ConfigurationError) as caught:
        check_assertions(
            results._replace(study=replace(results.study, columns=columns)), ["p98 < 3"]
        )

    assert str(caught.value).endswith(
        "unknown metric 'p98'; there are p50, p99 (p99 of those), calls"
    )


def test_every_row_is_checked() -> None:
    """An assertion without a variant applies to all rows."""
    found = make_results(("a", {"load": 1.0}), ("b", {"load": 3.0}))

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
def test_operators(claim: str, value: float, holds: bool) -> None:
    """An assertion about a missing value does not hold."""
    (verdict,) = check_assertions(make_results(("a", {"x": value})), [claim])

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
def test_missing_value_fails_with_its_cause(metric: str, seen: str) -> None:
    """A build must not pass because there was nothing to measure."""
    unit = UNITS.get(metric, "")
    claims = [f"{metric} < 1{unit}", f"{metric} >= 1{unit}"]

    verdicts = check_assertions(make_results(("a", {metric: nan})), claims)

    assert [(False, seen)] * 2 == [(one.holds, one.describe_value()) for one in verdicts]


def test_one_trial_without_value_fails() -> None:
    """A mean over the other trials says nothing about the trial without a value."""
    found = make_results(("a", {"p99": 0.1}))
    row = found.rows[0]._replace(
        trials=[FixedTrial(p99=0.1), FixedTrial(p99=nan), FixedTrial(p99=0.3)]
    )

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
def test_actual_value_is_described(claim: str, value: float, expected: str) -> None:
    """The actual value is shown in the unit of the bound, with up to six digits."""
    (verdict,) = check_assertions(make_results(("a", {claim.partition(" ")[0]: value})), [claim])

    assert expected == verdict.describe_value()
