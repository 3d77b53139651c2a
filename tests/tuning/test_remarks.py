"""Remarks: what is odd about a log, and a latency target that asks too much of a dependency."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tarry.core.hedging import Hedging
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.tuning.attempt_log import AttemptLog
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tests.tuning.logs import Truth
from tests.tuning.proposals import TRUTH, evidence_of

STEADY = Truth(calls=1_000, median=0.061, sigma=0.0, odds=(1.0,))


def remarks_of(truth: Truth, budget: float | None = None) -> tuple[str, ...]:
    """Return what is said of a log and a latency target."""
    return propose(evidence_of(truth), None, budget).warnings


def test_of_a_usual_log_nothing_is_said() -> None:
    """Three outages, healthy times between them and a budget of two seconds are nothing odd."""
    assert () == remarks_of(TRUTH, 2.0)


def test_a_latency_target_below_the_median_is_refused() -> None:
    """What half of the healthy attempts break on their own, no policy can keep."""
    with pytest.raises(ConfigurationError) as refused:
        remarks_of(STEADY, 0.05)

    assert (
        "a latency target of 50 ms is shorter than half of the healthy attempts (median 61 ms): "
        "it cannot be met by retrying"
    ) == str(refused.value)


@pytest.mark.parametrize(("budget", "late"), [(0.055, "42 %"), (0.1, "8.3 %"), (0.17, "0.78 %")])
def test_a_latency_target_below_the_p995_is_warned_of(budget: float, late: str) -> None:
    """The share of healthy attempts that cannot end in time is named."""
    (remark,) = remarks_of(Truth(calls=20_000, odds=(1.0,)), budget)

    assert f" is shorter than {late} of the healthy attempts (median 49.7 ms, p99.5 182" in remark
    assert remark.endswith(" ms): these cannot end in time")


def test_of_a_small_log_the_p995_is_not_named() -> None:
    """The share is still counted; a handful of attempts says nothing."""
    (remark,) = remarks_of(Truth(calls=37, odds=(1.0,)), 0.08)

    assert "p99.5" not in remark
    assert () == remarks_of(Truth(calls=9, odds=(1.0,)), 0.001)


def test_a_hedged_call_has_no_latency_target() -> None:
    """An option that does nothing is said to."""
    current = Defence(hedging=Hedging(after="p95"))

    assert ("a hedged call has no total_budget: the latency target has no effect",) == propose(
        evidence_of(TRUTH), current, 2.0
    ).warnings


def test_durations_in_seconds_are_asked_about() -> None:
    """Nearly no dependency answers within a millisecond, but many within 60 of them."""
    assert ("durationMs has a median of 0.061 ms: are these seconds?",) == remarks_of(
        replace(STEADY, median=0.000061)
    )
    assert () == remarks_of(replace(STEADY, median=0.001))


def test_a_log_without_first_attempts_is_told() -> None:
    """Of retries alone no call can be counted."""
    attempts = (one._replace(number=2) for one in STEADY.attempts())

    (remark,) = propose(analyze_log(AttemptLog(attempts))).warnings

    assert (
        "none of the 1,000 attempts has attemptNumber 1: without the first attempts, calls and "
        "their retries cannot be counted"
    ) == remark


@pytest.mark.parametrize(
    ("outages", "words"),
    [
        (((0, 1_000),), "100 % of the attempts lie in one single outage: "),
        (((0, 5), (7, 19)), "% of the attempts lie in 2 outages: "),
    ],
)
def test_a_log_that_is_mostly_outage_is_told(
    outages: tuple[tuple[float, float], ...], words: str
) -> None:
    """What a healthy dependency does, such a log hardly shows."""
    (remark,) = remarks_of(replace(STEADY, odds=(1.0, 1.0), outages=outages))

    assert words in remark
    assert remark.endswith("little about a healthy dependency; use a log of a longer period")
