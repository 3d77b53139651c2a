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

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    def metrics(self) -> dict[str, float]:
        """Return the metrics."""
        return self._metrics


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
        study, 0, 1, [StudyRow(name, {}, [FixedTrial(**metrics)]) for name, metrics in rows]
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
        ("custom_metric < 3ms", (None, "custom_metric", "<", 0.003, "ms")),
    ],
)
def test_assertion_is_parsed(text: str, expected: tuple[object, ...]) -> None:
    """An assertion has a metric, an operator, a bound with its unit, and an optional variant."""
    assertion = parse_assertion(text, ["full", "full+budget", "a: b"], UNITS)

    assert (text, *expected) == assertion


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
    """An assertion about an unknown variant is rejected, because it would always hold."""
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
    """A bound with a wrong or missing unit is rejected, and the error names the valid units."""
    with pytest.raises(ConfigurationError) as caught:
        parse_assertion(text, [], UNITS)

    assert f"assertion {text!r}: {expected}" == str(caught.value)


def test_unknown_metric_is_rejected() -> None:
    """The error lists the known metrics, with the titles of the columns."""
    results = make_results(("a", {"p50": 1.0, "p99": 2.0, "calls": 3.0}))
    columns = (Column("p99", "p99 of calls"), Column("calls", "calls"))

    with pytest.raises(ConfigurationError) as caught:
        check_assertions(
            results._replace(study=replace(results.study, columns=columns)), ["p98 < 3"]
        )

    assert str(caught.value).endswith(
        "unknown metric 'p98'; there are p50, p99 (p99 of calls), calls"
    )


def test_every_row_is_checked() -> None:
    """An assertion without a variant applies to all rows."""
    results = make_results(("a", {"load": 1.0}), ("b", {"load": 3.0}))

    checks = check_assertions(results, ["load < 2", "b: load == 3"])

    assert [("a", 1.0, True), ("b", 3.0, False), ("b", 3.0, True)] == [
        (check.row.variant, check.value, check.holds) for check in checks
    ]


@pytest.mark.parametrize(
    ("assertion", "value", "holds"),
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
def test_operators_compare_value_and_bound(assertion: str, value: float, holds: bool) -> None:
    """Each operator compares the value with the bound; a missing value never holds."""
    (check,) = check_assertions(make_results(("a", {"x": value})), [assertion])

    assert holds == check.holds


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("p99", "p99 has no value: no call succeeded"),
        ("peak_load", "peak_load has no value: the last server has no capacity limit"),
        ("recovered_after", "recovered_after has no value: there is no disruption to recover from"),
        ("x", "x has no value"),
    ],
)
def test_missing_value_fails_with_its_cause(metric: str, expected: str) -> None:
    """An assertion about a missing value fails, and its description names the cause."""
    unit = UNITS.get(metric, "")
    assertions = [f"{metric} < 1{unit}", f"{metric} >= 1{unit}"]

    checks = check_assertions(make_results(("a", {metric: nan})), assertions)

    assert [(False, expected)] * 2 == [(check.holds, check.describe_value()) for check in checks]


def test_one_trial_without_value_fails() -> None:
    """An assertion fails if one of the trials has no value."""
    results = make_results(("a", {"p99": 0.1}))
    row = results.rows[0]._replace(
        trials=[FixedTrial(p99=0.1), FixedTrial(p99=nan), FixedTrial(p99=0.3)]
    )

    (check,) = check_assertions(results._replace(rows=[row]), ["p99 < 1s"])

    assert not check.holds
    assert "p99 has no value in 1 of 3 trials: no call succeeded" == check.describe_value()


@pytest.mark.parametrize(
    ("assertion", "value", "expected"),
    [
        ("p99 < 1s", 2.3014712, "p99 is 2.30147s"),
        ("p99 < 250ms", 2.3014712, "p99 is 2301.47ms"),
        ("recovered_after < 1ms", inf, "recovered_after is inf"),
        ("success_rate > 90%", 0.187, "success_rate is 18.7%"),
        ("success_rate > 0.9", 0.187, "success_rate is 0.187"),
        ("amplification < 1.2x", 4.22, "amplification is 4.22x"),
    ],
)
def test_actual_value_is_described(assertion: str, value: float, expected: str) -> None:
    """The actual value is shown in the unit of the bound, with up to six digits."""
    (check,) = check_assertions(
        make_results(("a", {assertion.partition(" ")[0]: value})), [assertion]
    )

    assert expected == check.describe_value()
