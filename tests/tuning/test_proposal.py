"""Proposals: suggestions for each field, warnings, latency targets and small logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from random import Random

import pytest

from tarry.core.backoff import Schedule
from tarry.core.hedging import Hedging
from tarry.core.outcome import Kind
from tarry.core.policy import Policy
from tarry.core.text import format_duration
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tarry.tuning.rules import drop_unreachable_max_delay, suggest_max_delay
from tests.tuning.builders import LOG_MODEL, LogModel, analyze_model, suggestion_for


def test_initial_delay_is_twice_the_median_latency() -> None:
    """A median latency of 50 ms gives an initial delay of 100 ms, which full jitter halves."""
    assert 0.1 == pytest.approx(suggestion_for(LOG_MODEL, "initial_delay").proposed, rel=0.05)


def test_initial_delay_has_a_minimum() -> None:
    """For a very fast dependency the initial delay is 10 ms."""
    suggestion = suggestion_for(LogModel(median=0.0001), "initial_delay")

    assert 0.01 == suggestion.proposed
    assert "no less than 10 ms" in suggestion.reason


def test_max_delay_is_a_quarter_of_the_median_outage() -> None:
    """Three outages of 40 s give a maximum delay of 10 s."""
    suggestion = suggest_max_delay(analyze_model(LOG_MODEL), Policy(), None)

    assert 10.0 == pytest.approx(suggestion.proposed, rel=0.05)
    assert suggestion.basis.startswith("3 outages of 40 s to 40")


def test_the_budget_is_twice_the_retries_outside_outages() -> None:
    """The ratio is twice the retry ratio outside outages; retries in outages do not count."""
    suggestion = suggestion_for(LOG_MODEL, "budget")

    assert None is suggestion.current
    assert "ratio" == suggestion.proposed["kind"]
    assert 2 * 0.033 == pytest.approx(suggestion.proposed["ratio"], rel=0.25)
    assert suggestion.reason.startswith("twice the retry ratio outside outages")
    assert suggestion.basis.endswith(" % of all")


@pytest.mark.parametrize(
    ("always_failing", "attempts", "expected"),
    [(0.0, 4, 2 * 0.02), (0.02, 4, 2 * 0.02 + 0.02), (0.02, 10, 2 * 0.02 + 0.02)],
)
def test_calls_that_always_fail_do_not_double_the_budget(
    always_failing: float, attempts: int, expected: float
) -> None:
    """Only the retries that the proposed policy makes for them are added, once.

    Without them, the other calls would find the budget empty.
    """
    model = LogModel(
        calls=20_000,
        success_rates=(0.98, *[1.0] * (attempts - 1)),
        always_failing=always_failing,
    )
    proposal = propose(analyze_model(model))
    suggestion = next(each for each in proposal.suggestions if each.field == "budget")

    assert expected == pytest.approx(suggestion.proposed["ratio"], rel=0.15)
    assert bool(always_failing) == ("% for calls that fail)" in suggestion.basis)


@pytest.mark.parametrize(
    ("success_rates", "ratio", "message"),
    [((1.0,), 0.02, "no less than 2 %"), ((0.8, 1.0), 0.2, "no more than 20 %")],
)
def test_budget_ratio_is_limited(
    success_rates: tuple[float, ...], ratio: float, message: str
) -> None:
    """The ratio is at least 2 % and at most 20 %."""
    suggestion = suggestion_for(LogModel(success_rates=success_rates), "budget")

    assert ratio == suggestion.proposed["ratio"]
    assert message in suggestion.reason


def test_a_ratio_budget_keeps_its_other_settings() -> None:
    """Only the ratio of a budget is changed."""
    current = Defence(budget={"kind": "ratio", "ratio": 0.5, "window": 30.0})

    assert {"kind": "ratio", "ratio": 0.02, "window": 30.0} == suggestion_for(
        LogModel(success_rates=(1.0,)), "budget", current
    ).proposed


def test_hedging_is_advice_next_to_a_policy() -> None:
    """The suggestion names saving and load, and is not part of the proposed defence."""
    model = LogModel(calls=8_000, sigma=1.0)
    proposal = propose(analyze_model(model))
    suggestion = proposal.suggestions[-1]

    assert ("hedging.after", "p95", True) == (
        suggestion.field,
        suggestion.proposed,
        suggestion.is_advice,
    )
    assert suggestion.reason.startswith("advice, instead of retries: p95: -")
    assert suggestion.reason.endswith(" % p99.9 for +5 % load")
    assert None is proposal.proposed.hedging


def test_hedging_is_tuned_without_retries() -> None:
    """A defence with hedging gets a percentile and a budget, and no retries."""
    current = Defence(hedging=Hedging(after=0.5, max_attempts=3))
    proposal = propose(analyze_model(LogModel(calls=8_000, sigma=1.0)), current)

    assert ["hedging.after", "budget"] == [suggestion.field for suggestion in proposal.suggestions]
    assert Hedging(after="p95", max_attempts=3) == proposal.proposed.hedging
    assert not proposal.suggestions[0].is_advice


def test_hedging_without_a_gain_is_not_proposed() -> None:
    """Without a tail no hedging is proposed."""
    suggestion = suggestion_for(LogModel(calls=8_000, sigma=0.01), "hedging.after")

    assert None is suggestion.proposed
    assert suggestion.reason.startswith("hedging would not pay (p95: -")


STEADY = LogModel(calls=1_000, median=0.061, sigma=0.0, success_rates=(1.0,))


def warnings_for(model: LogModel, latency_target: float | None = None) -> tuple[str, ...]:
    """Return the warnings for a log and a latency target."""
    return propose(analyze_model(model), None, latency_target).warnings


def test_usual_log_has_no_warnings() -> None:
    """A log with three outages and a target of two seconds has no warnings."""
    assert () == warnings_for(LOG_MODEL, 2.0)


def test_latency_target_below_the_median_is_rejected() -> None:
    """A target that half of the successful attempts miss is rejected."""
    with pytest.raises(ConfigurationError) as caught:
        warnings_for(STEADY, 0.05)

    assert (
        "half of the successful attempts outside outages took longer than the latency target "
        "of 50 ms (median 61 ms): retries cannot meet it"
    ) == str(caught.value)


@pytest.mark.parametrize(("target", "share"), [(0.055, "42 %"), (0.1, "8.3 %"), (0.17, "0.78 %")])
def test_latency_target_below_the_p995_gives_a_warning(target: float, share: str) -> None:
    """The warning has the share of healthy attempts that miss the target."""
    (warning,) = warnings_for(LogModel(calls=20_000, success_rates=(1.0,)), target)

    assert warning.startswith(f"{share} of the successful attempts outside outages took longer")
    assert " ms (median 49.7 ms, p99.5 182" in warning


def test_warning_of_a_small_log_has_no_p995() -> None:
    """The warning of a small log has a share but no p99.5; a log of 9 calls gives no warning."""
    (warning,) = warnings_for(LogModel(calls=37, success_rates=(1.0,)), 0.08)

    assert "p99.5" not in warning
    assert () == warnings_for(LogModel(calls=9, success_rates=(1.0,)), 0.001)


def test_latency_target_for_hedging_gives_a_warning() -> None:
    """A latency target has no effect on a hedged call, which gives a warning."""
    current = Defence(hedging=Hedging(after="p95"))

    assert ("a hedged call has no total_budget: the latency target has no effect",) == propose(
        analyze_model(LOG_MODEL), current, 2.0
    ).warnings


def test_durations_in_seconds_give_a_warning() -> None:
    """A median below a millisecond gives a warning."""
    assert ("durationMs has a median of 0.061 ms: are these seconds?",) == warnings_for(
        replace(STEADY, median=0.000061)
    )
    assert () == warnings_for(replace(STEADY, median=0.001))


def test_log_without_first_attempts_gives_a_warning() -> None:
    """A log without first attempts gives a warning, because calls cannot be counted."""
    attempts = (attempt._replace(number=2) for attempt in STEADY.attempts())

    (warning,) = propose(analyze_log(AttemptLog(attempts))).warnings

    assert (
        "none of the 1,000 attempts has attemptNumber 1: without the first attempts, calls and "
        "their retries cannot be counted"
    ) == warning


@pytest.mark.parametrize(
    ("outages", "message"),
    [
        (((0, 1_000),), "100 % of the attempts lie in one single outage: "),
        (((0, 5), (7, 19)), "% of the attempts lie in 2 outages: "),
    ],
)
def test_log_that_is_mostly_outages_gives_a_warning(
    outages: tuple[tuple[float, float], ...], message: str
) -> None:
    """The warning has the share of attempts in outages."""
    (warning,) = warnings_for(replace(STEADY, success_rates=(1.0, 1.0), outages=outages))

    assert message in warning
    assert warning.endswith("little about the time outside outages; use a log of a longer period")


SMALL = LogModel(calls=37, success_rates=(1.0,))


def test_latency_target_does_not_drop_attempts() -> None:
    """Attempts are kept by their success rates; the reason names total_budget as the limit."""
    proposal = propose(analyze_model(LOG_MODEL), None, 0.6)
    policy = proposal.proposed.policy
    suggestion = next(
        suggestion for suggestion in proposal.suggestions if suggestion.field == "max_attempts"
    )
    longest = 3 * (policy.attempt_timeout or 0.0) + policy.ceiling(1) + policy.ceiling(2)

    assert (3, 0.6, 30.0) == (policy.max_attempts, policy.total_budget, policy.max_delay)
    assert 0.6 < longest
    assert suggestion.reason.endswith(
        f" of the time: drop it; 3 can take {format_duration(longest)}, which total_budget limits"
    )
    assert () == proposal.warnings


def test_wide_latency_target_sets_only_the_total_budget() -> None:
    policy = propose(analyze_model(LOG_MODEL), None, 60.0).proposed.policy

    assert (3, 60.0) == (policy.max_attempts, policy.total_budget)


def test_a_latency_target_below_the_p995_is_the_timeout() -> None:
    """The attempt timeout is at most the latency target."""
    suggestion = suggestion_for(LOG_MODEL, "attempt_timeout", None, 0.1)

    assert 0.1 == suggestion.proposed
    assert suggestion.reason.startswith("the latency target: no attempt can take longer, and 8")
    assert suggestion.reason.endswith(" % of the successful ones are cut off")
    assert suggestion.basis.startswith("18")
    assert 3 == suggestion_for(LOG_MODEL, "max_attempts", None, 0.1).proposed


def test_timeout_is_rounded_up_to_at_most_the_latency_target() -> None:
    steady = LogModel(calls=2_000, median=0.1011, sigma=0.0, success_rates=(1.0,))
    suggestion = suggestion_for(steady, "attempt_timeout", None, 0.102)

    assert (0.102, "the latency target: no attempt can take longer") == (
        suggestion.proposed,
        suggestion.reason,
    )


def test_no_wait_is_longer_than_the_latency_target() -> None:
    """Neither the initial nor the maximum delay exceeds the target."""
    for field in ("initial_delay", "max_delay"):
        suggestion = suggestion_for(LOG_MODEL, field, None, 0.08)

        assert (0.08, "the latency target: no wait can be longer") == (
            suggestion.proposed,
            suggestion.reason,
        )


def test_policy_of_one_attempt_has_no_retry_suggestions() -> None:
    """Without retries there are no suggestions for waits and the retry budget."""
    current = Defence(Policy(initial_delay=0.7, max_delay=9.0), budget={"kind": "token"})
    proposal = propose(analyze_model(LogModel(calls=10_000, success_rates=(0.9, 0.001))), current)
    policy = proposal.proposed.policy

    assert ["attempt_timeout", "max_attempts", "hedging.after"] == [
        suggestion.field for suggestion in proposal.suggestions
    ]
    assert (1, 0.7, 9.0) == (policy.max_attempts, policy.initial_delay, policy.max_delay)
    assert current.budget == proposal.proposed.budget


@pytest.mark.parametrize("target", [0, -1, float("nan"), float("inf")])
def test_latency_target_must_be_positive(target: float) -> None:
    with pytest.raises(ConfigurationError, match=r"^latency_target must be"):
        propose(analyze_model(SMALL), None, target)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (
            "attempt_timeout",
            (
                "too little data: 37 successful attempts outside outages, "
                "1,000 needed for p99.5; left out"
            ),
        ),
        (
            "initial_delay",
            (
                "too little data: 37 successful attempts outside outages, "
                "200 needed for the median; kept at 100 ms"
            ),
        ),
        ("max_delay", "too little data: 0 outages, 3 needed for a median; kept at 30 s"),
        ("max_attempts", "too little data: attempt 2 was made 0 times, 200 needed; kept at 4"),
        (
            "budget",
            "too little data: 37 calls outside outages, 1,000 needed for the retry ratio; left out",
        ),
        (
            "hedging.after",
            (
                "too little data: 37 successful attempts outside outages, "
                "5,000 needed for p99.9; left out"
            ),
        ),
    ],
)
def test_too_little_data_is_explained(field: str, reason: str) -> None:
    """Each reason has the available and the required data."""
    suggestion = suggestion_for(SMALL, field)

    assert (reason, False) == (suggestion.reason, suggestion.has_enough_data)
    assert suggestion.current == suggestion.proposed


def test_too_little_data_changes_nothing() -> None:
    """With 37 calls the proposed defence is the current one."""
    for current in (
        Defence(Policy(max_attempts=7, attempt_timeout=3.0), budget={"kind": "token"}),
        Defence(hedging=Hedging(max_extra_load=0.02)),
    ):
        assert current == propose(analyze_model(SMALL), current).proposed


def test_other_settings_are_kept() -> None:
    """Breaker, limiter and other fields of the policy are kept."""
    current = Defence(
        Policy(multiplier=3.0, jitter="equal", max_hint=7.0),
        breaker={"consecutive": 5},
        limiter={"kind": "in-flight", "limit": 9},
    )
    defence = propose(analyze_model(LOG_MODEL), current).proposed

    assert (current.breaker, current.limiter) == (defence.breaker, defence.limiter)
    assert (3.0, "equal", 7.0) == (
        defence.policy.multiplier,
        defence.policy.jitter,
        defence.policy.max_hint,
    )


def test_custom_backoff_is_kept() -> None:
    """For a custom backoff no delays are proposed."""
    current = Defence(Policy(backoff=Schedule((1.0, 2.0))))
    policy = propose(analyze_model(LOG_MODEL), current).proposed.policy

    assert (0.1, 30.0) == (policy.initial_delay, policy.max_delay)
    assert "custom backoff" in suggestion_for(LOG_MODEL, "max_delay", current).reason


def test_max_delay_is_at_least_the_initial_delay() -> None:
    """Slow calls and short outages give a maximum delay equal to the initial delay."""
    slow = LogModel(
        calls=2_000,
        rate=20.0,
        median=3.0,
        success_rates=(0.99,) * 2,
        outages=((20, 24), (50, 54), (80, 84)),
    )
    policy = propose(analyze_model(slow)).proposed.policy

    assert policy.initial_delay == policy.max_delay == pytest.approx(6.0, rel=0.1)
    assert "no less than initial_delay" == suggestion_for(slow, "max_delay").reason


def test_max_delay_that_no_wait_reaches_is_not_proposed() -> None:
    """With three attempts the longest wait is twice the first one, whatever the outages were."""
    suggestion = suggestion_for(LOG_MODEL, "max_delay")

    assert 30.0 == suggestion.proposed
    assert "3 attempts wait at most 200 ms; kept at 30 s" == suggestion.reason


def test_max_delay_that_waits_reach_is_proposed() -> None:
    """The wait before the third attempt can be as long as the proposed maximum."""
    evidence = analyze_model(LOG_MODEL)
    suggestion = suggest_max_delay(evidence, Policy(), None)

    for initial_delay, expected in ((6.0, suggestion.proposed), (4.0, 30.0)):
        policy = Policy(max_attempts=3, initial_delay=initial_delay)
        assert expected == drop_unreachable_max_delay(suggestion, policy).proposed


def rate_limited_log() -> AttemptLog:
    """Return a log of 70 calls per second to a dependency that accepts 50 attempts."""

    def attempts() -> Iterator[LoggedAttempt]:
        accepted: Counter[int] = Counter()
        due = [(call / 70, call, 1) for call in range(70 * 120)]
        heapify(due)
        source = Random(5)
        while due:
            start, call, number = heappop(due)
            accepted[int(start)] += 1
            is_accepted = accepted[int(start)] <= 50
            kind = Kind.SUCCESS if is_accepted else Kind.THROTTLED
            yield LoggedAttempt(str(call), number, 1_800_000_000.0 + start, 0.02, kind)
            if not is_accepted and number < 4:
                heappush(due, (start + source.random() * 0.1 * 2**number, call, number + 1))

    return AttemptLog(attempts())


def test_a_rate_limit_is_no_outage_and_needs_a_limiter() -> None:
    """Throttled attempts are named, with the rate that was accepted, and a limiter is advised."""
    evidence = analyze_log(rate_limited_log())
    proposal = propose(evidence)
    suggestion = proposal.suggestions[0]

    assert () == evidence.outages
    assert ("limiter", {"kind": "adaptive-limit"}, True) == (
        suggestion.field,
        suggestion.proposed,
        suggestion.is_advice,
    )
    assert "use a limiter" in suggestion.reason
    assert "50 attempts per second succeeded meanwhile" in suggestion.basis
    assert None is proposal.proposed.limiter

    limited = Defence(limiter={"kind": "adaptive-limit"})
    kept = propose(evidence, limited).suggestions[0]
    assert ("limiter", limited.limiter) == (kept.field, kept.proposed)
    assert "in spite of the limiter" in kept.reason
    hedged = propose(evidence, Defence(hedging=Hedging(after="p95")))
    assert ["limiter", "hedging.after", "budget"] == [each.field for each in hedged.suggestions]
