"""Proposals: near the truth of logs whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tarry.core.backoff import Schedule
from tarry.core.durations import format_duration
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.tuning.attempt_log import AttemptLog
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tests.tuning.builders import TRUTH, Truth, evidence_of, line_of


def test_the_first_wait_is_one_round_trip_on_average() -> None:
    """The base is twice the median, of which full jitter takes half."""
    assert 0.1 == pytest.approx(line_of(TRUTH, "initial_delay").proposed, rel=0.05)


def test_the_first_wait_is_not_too_short() -> None:
    """A cache that answers in a tenth of a millisecond is not asked again at once."""
    line = line_of(Truth(median=0.0001), "initial_delay")

    assert 0.01 == line.proposed
    assert "no less than 10 ms" in line.reason


def test_the_cap_is_a_quarter_of_a_usual_outage() -> None:
    """Three outages of forty seconds make a cap of ten."""
    line = line_of(TRUTH, "max_delay")

    assert 10.0 == pytest.approx(line.proposed, rel=0.05)
    assert line.evidence.startswith("3 outages of 40 s to 40")


def test_the_budget_is_twice_the_retries_outside_outages() -> None:
    """Three in a hundred first attempts fail, and outages do not count."""
    line = line_of(TRUTH, "budget")

    assert None is line.current
    assert "ratio" == line.proposed["kind"]
    assert 2 * 0.033 == pytest.approx(line.proposed["ratio"], rel=0.25)
    assert "twice the retry ratio outside outages" == line.reason
    assert line.evidence.endswith(" % over all")


@pytest.mark.parametrize(
    ("odds", "ratio", "words"),
    [((1.0,), 0.02, "no less than 2 %"), ((0.8, 1.0), 0.2, "no more than 20 %")],
)
def test_the_budget_has_bounds(odds: tuple[float, ...], ratio: float, words: str) -> None:
    """A day without retries leaves room for some; a bad one is not a licence."""
    line = line_of(Truth(odds=odds), "budget")

    assert ratio == line.proposed["ratio"]
    assert words in line.reason


def test_a_ratio_budget_keeps_its_other_settings() -> None:
    """Only the ratio is measured."""
    current = Defence(budget={"kind": "ratio", "ratio": 0.5, "window": 30.0})

    assert {"kind": "ratio", "ratio": 0.02, "window": 30.0} == line_of(
        Truth(odds=(1.0,)), "budget", current
    ).proposed


def test_hedging_is_advice_beside_a_policy() -> None:
    """It names the bargain, and is not part of the proposed defence."""
    truth = Truth(calls=8_000, sigma=1.0)
    proposal = propose(evidence_of(truth))
    line = proposal.suggestions[-1]

    assert ("hedging.after", "p95", True) == (line.field, line.proposed, line.is_advice)
    assert line.reason.startswith("advice, instead of retries: p95: -")
    assert line.reason.endswith(" % p99.9 for +5 % load")
    assert None is proposal.defence.hedging


def test_a_hedging_is_tuned_as_such() -> None:
    """Who hedges gets a percentile and a budget, and no retries."""
    current = Defence(hedging=Hedging(after=0.5, max_attempts=3))
    proposal = propose(evidence_of(Truth(calls=8_000, sigma=1.0)), current)

    assert ["hedging.after", "budget"] == [line.field for line in proposal.suggestions]
    assert Hedging(after="p95", max_attempts=3) == proposal.defence.hedging
    assert not proposal.suggestions[0].is_advice


def test_a_hedge_that_gains_nothing_is_not_proposed() -> None:
    """Without a tail there is nothing to hedge against."""
    line = line_of(Truth(calls=8_000, sigma=0.01), "hedging.after")

    assert None is line.proposed
    assert line.reason.startswith("a second copy would not pay (p95: -")


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


SMALL = Truth(calls=37, odds=(1.0,))


def test_what_fits_into_a_latency_target() -> None:
    """Attempts stay by their odds: the total budget bounds a call's time, and the line says so."""
    proposal = propose(evidence_of(TRUTH), None, 0.6)
    policy = proposal.defence.policy
    line = next(line for line in proposal.suggestions if line.field == "max_attempts")
    longest = 3 * (policy.attempt_timeout or 0.0) + policy.ceiling(1) + policy.ceiling(2)

    assert (3, 0.6, 0.6) == (policy.max_attempts, policy.total_budget, policy.max_delay)
    assert 0.6 < longest
    assert line.reason.endswith(
        f" of the time: drop it; 3 can take {format_duration(longest)}, which total_budget limits"
    )
    assert () == proposal.warnings


def test_a_wide_latency_target_drops_nothing() -> None:
    """Where all attempts fit, the odds alone decide, and the budget is still enforced."""
    policy = propose(evidence_of(TRUTH), None, 60.0).defence.policy

    assert (3, 60.0) == (policy.max_attempts, policy.total_budget)
    assert 10.0 == pytest.approx(policy.max_delay, rel=0.05)


def test_a_latency_target_below_the_p995_is_the_timeout() -> None:
    """No attempt may take longer than the call."""
    line = line_of(TRUTH, "attempt_timeout", None, 0.1)

    assert 0.1 == line.proposed
    assert line.reason.startswith("the latency target: no attempt can take longer, and 8")
    assert line.reason.endswith(" % of healthy ones are cut off")
    assert line.evidence.startswith("18")
    assert 3 == line_of(TRUTH, "max_attempts", None, 0.1).proposed


def test_a_timeout_is_only_rounded_up_to_the_latency_target() -> None:
    """A budget that no healthy attempt breaks cuts nothing off."""
    steady = Truth(calls=2_000, median=0.1011, sigma=0.0, odds=(1.0,))
    line = line_of(steady, "attempt_timeout", None, 0.102)

    assert (0.102, "the latency target: no attempt can take longer") == (line.proposed, line.reason)


def test_no_wait_is_longer_than_the_latency_target() -> None:
    """Two round trips of 50 ms do not go into 80 ms, neither as the first wait nor as the last."""
    for field in ("initial_delay", "max_delay"):
        line = line_of(TRUTH, field, None, 0.08)

        assert (0.08, "the latency target: no wait can be longer") == (line.proposed, line.reason)


def test_a_policy_of_one_attempt_has_nothing_to_wait_for() -> None:
    """Without retries there are no lines for waits and for a retry budget, and they stay."""
    current = Defence(Policy(initial_delay=0.7, max_delay=9.0), budget={"kind": "token"})
    proposal = propose(evidence_of(Truth(calls=10_000, odds=(0.9, 0.001))), current)
    policy = proposal.defence.policy

    assert ["attempt_timeout", "max_attempts", "hedging.after"] == [
        line.field for line in proposal.suggestions
    ]
    assert (1, 0.7, 9.0) == (policy.max_attempts, policy.initial_delay, policy.max_delay)
    assert current.budget == proposal.defence.budget


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf")])
def test_a_latency_target_is_a_length_of_time(budget: float) -> None:
    """Nothing else is a budget."""
    with pytest.raises(ConfigurationError, match=r"^latency_target must be"):
        propose(evidence_of(SMALL), None, budget)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (
            "attempt_timeout",
            "too little data: 37 healthy attempts, 1,000 needed for p99.5; left out",
        ),
        (
            "initial_delay",
            "too little data: 37 healthy attempts, 200 needed for the median; kept at 100 ms",
        ),
        ("max_delay", "too little data: 0 outages, 3 needed for a median; kept at 30 s"),
        ("max_attempts", "too little data: attempt 2 was made 0 times, 200 needed; kept at 4"),
        (
            "budget",
            "too little data: 37 calls outside outages, 1,000 needed for the retry ratio; left out",
        ),
        (
            "hedging.after",
            "too little data: 37 healthy attempts, 5,000 needed for p99.9; left out",
        ),
    ],
)
def test_too_little_is_said(field: str, reason: str) -> None:
    """Each number that the log is too small for says what is there and what is needed."""
    line = line_of(SMALL, field)

    assert (reason, False) == (line.reason, line.has_enough_data)
    assert line.current == line.proposed


def test_too_little_changes_nothing() -> None:
    """From 37 calls the proposed defence is the current one, whatever it is."""
    for current in (
        Defence(Policy(max_attempts=7, attempt_timeout=3.0), budget={"kind": "token"}),
        Defence(hedging=Hedging(max_extra_load=0.02)),
    ):
        assert current == propose(evidence_of(SMALL), current).defence


def test_what_the_log_says_nothing_about_stays() -> None:
    """Breaker, limiter and the other fields of the policy are carried over."""
    current = Defence(
        Policy(multiplier=3.0, jitter="equal", max_hint=7.0),
        breaker={"consecutive": 5},
        limiter={"kind": "in-flight", "limit": 9},
    )
    defence = propose(evidence_of(TRUTH), current).defence

    assert (current.breaker, current.limiter) == (defence.breaker, defence.limiter)
    assert (3.0, "equal", 7.0) == (
        defence.policy.multiplier,
        defence.policy.jitter,
        defence.policy.max_hint,
    )


def test_a_schedule_keeps_its_delays() -> None:
    """A custom backoff has neither base nor cap to tune."""
    current = Defence(Policy(backoff=Schedule((1.0, 2.0))))
    policy = propose(evidence_of(TRUTH), current).defence.policy

    assert (0.1, 30.0) == (policy.initial_delay, policy.max_delay)
    assert "custom backoff" in line_of(TRUTH, "max_delay", current).reason


def test_a_base_above_the_cap_does_not_break_the_policy() -> None:
    """Slow calls and short outages still come to a policy that is one."""
    slow = Truth(
        calls=2_000, rate=20.0, median=3.0, odds=(0.99,) * 2, outages=((20, 24), (50, 54), (80, 84))
    )
    policy = propose(evidence_of(slow)).defence.policy

    assert policy.initial_delay == policy.max_delay == pytest.approx(6.0, rel=0.1)
    assert "no less than initial_delay" == line_of(slow, "max_delay").reason
