"""What bounds a proposal: a latency target, too little data, and what a log cannot know."""

from __future__ import annotations

import pytest

from tarry.core.backoff import Schedule
from tarry.core.explain import format_duration
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.tuning.proposal import propose
from tests.tuning.logs import Truth
from tests.tuning.proposals import TRUTH, evidence_of, line_of

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
