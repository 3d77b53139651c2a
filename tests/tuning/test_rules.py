"""The rules for the number of attempts and the attempt timeout, and how values are formatted."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING

import pytest

from tarry.core.outcome import Kind
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import analyze_log, round_two_digits
from tarry.tuning.proposal import propose
from tarry.tuning.rules import find_timeout, format_percent, format_setting
from tests.tuning.builders import LOG_MODEL, P995, LogModel, analyze_model, suggestion_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.rules import Suggestion


def test_attempt_that_hardly_ever_succeeds_is_dropped() -> None:
    """The fourth attempt is dropped, and the basis has the number of its successes."""
    suggestion = suggestion_for(LOG_MODEL, "max_attempts")

    assert (4, 3) == (suggestion.current, suggestion.proposed)
    assert suggestion.reason.startswith("attempt 4 succeeds 0")
    assert suggestion.reason.endswith(" % of the time: drop it")
    assert " of 5," in suggestion.basis


def test_attempt_that_helps_outside_outages_is_kept() -> None:
    """The third attempt is kept because of its success rate outside outages, not overall."""
    evidence = analyze_model(LOG_MODEL)
    overall, healthy = evidence.attempt_success_rates[2], evidence.healthy_attempt_success_rates[2]

    assert overall.high < 0.01
    assert 0.3 < healthy.share < 0.7
    assert 3 == suggestion_for(LOG_MODEL, "max_attempts").proposed


def test_an_attempt_that_is_only_made_in_outages_is_dropped() -> None:
    """If a third attempt is hardly made outside outages, the success rates of outages decide."""
    outages = ((30, 70), (90, 130), (150, 190))
    model = LogModel(calls=10_000, success_rates=(0.999, 0.99, 0.99), outages=outages)
    suggestion = suggestion_for(model, "max_attempts", Defence(Policy(max_attempts=3)))

    assert 1 <= suggestion.proposed < 3
    assert " of the time: drop it" in suggestion.reason


def test_attempts_that_succeed_are_kept() -> None:
    """If the last attempt still succeeds, none is dropped and none is added."""
    suggestion = suggestion_for(
        LogModel(calls=10_000, success_rates=(0.7, 0.6, 0.5)),
        "max_attempts",
        Defence(Policy(max_attempts=3)),
    )

    assert (3, True) == (suggestion.proposed, suggestion.has_enough_data)
    assert suggestion.reason.startswith("attempt 3 still succeeds 5")


def test_more_attempts_than_the_current_policy_are_proposed() -> None:
    """If the third attempt of the log helps, three attempts are proposed instead of two."""
    suggestion = suggestion_for(
        LogModel(calls=10_000, success_rates=(0.7, 0.6, 0.5)),
        "max_attempts",
        Defence(Policy(max_attempts=2)),
    )

    assert 3 == suggestion.proposed


def suggestion_for_outages(*outages: int) -> Suggestion:
    """Return the suggestion for 3,000 calls that fail only in outages of these sizes."""
    down = {call for at, size in enumerate(outages) for call in range(at * 900, at * 900 + size)}

    def attempts() -> Iterator[LoggedAttempt]:
        for call in range(3_000):
            kind = Kind.TRANSIENT if call in down else Kind.SUCCESS
            for number in range(1, 5 if call in down else 2):
                yield LoggedAttempt(str(call), number, call + number / 10, 0.05, kind)

    suggestions = propose(analyze_log(AttemptLog(attempts()))).suggestions
    return next(suggestion for suggestion in suggestions if suggestion.field == "max_attempts")


def test_one_outage_does_not_drop_attempts() -> None:
    """The 500 failures of one outage have one cause and count as one sample."""
    for outages in ((500,), (250, 250)):
        suggestion = suggestion_for_outages(*outages)

        assert (4, 4, False) == (
            suggestion.current,
            suggestion.proposed,
            suggestion.has_enough_data,
        )
        # The retries of the last call of an outage can lie in the block after it.
        expected = (
            "too little data: attempt 2 was made ([01]) times? outside outages, "
            "200 needed, or 3 outages; kept at 4"
        )
        assert re.fullmatch(expected, suggestion.reason)


def test_three_outages_are_enough_to_drop_an_attempt() -> None:
    """An attempt that failed in three outages is dropped."""
    suggestion = suggestion_for_outages(200, 200, 200)

    assert (1, "0 of 600 (95 % interval 0 % to 0.64 %)") == (
        suggestion.proposed,
        suggestion.basis,
    )
    assert "attempt 2 succeeds 0 % of the time: drop it" == suggestion.reason


def test_healthy_attempts_are_enough_to_drop_an_attempt() -> None:
    """If retries fail outside outages too, no outages are needed."""
    suggestion = suggestion_for(LogModel(calls=10_000, success_rates=(0.9, 0.001)), "max_attempts")

    assert (1, True) == (suggestion.proposed, suggestion.has_enough_data)
    assert suggestion.reason.endswith(" of the time: drop it")


def test_attempt_that_cannot_be_ruled_out_is_kept() -> None:
    """An attempt is kept if none of 300 succeeded, because the interval reaches 1.3 %."""
    suggestion = suggestion_for_outages(300)

    assert 4 == suggestion.proposed
    assert "attempt 4 cannot be ruled out: 0 of 300, 95 % interval up to 1.3 %" == suggestion.reason


LATENCY = [number / 1000 for number in range(1, 1001)]
"""Durations of successes: one for each millisecond up to a second."""


def test_the_timeout_is_the_p995() -> None:
    """The timeout is close to the p99.5 of the model, rounded up, with its interval."""
    suggestion = suggestion_for(LOG_MODEL, "attempt_timeout")

    assert LOG_MODEL.quantile(P995) == pytest.approx(suggestion.proposed, rel=0.05)
    assert "p99.5 of successful attempts outside outages" == suggestion.reason
    assert " (95 % interval 1" in suggestion.basis
    assert " ms to " in suggestion.basis
    assert suggestion.has_enough_data


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("success_rates", [(1.0,) * 4, (0.9,) * 4])
def test_repeated_tuning_keeps_the_timeout(
    *, is_known: bool, success_rates: tuple[float, ...]
) -> None:
    """A log with the proposed timeout gives the same timeout, known or inferred."""
    rounds: list[float] = []
    current = None
    for number in range(5):
        timeout = rounds[-1] if rounds else None
        model = LogModel(calls=20_000, median=0.1, success_rates=success_rates, timeout=timeout)
        proposal = propose(analyze_log(model.log(seed=number)), current)
        rounds.append(proposal.suggestions[0].proposed)
        current = proposal.proposed if is_known else None

    assert [rounds[0]] * 5 == rounds
    assert LogModel(median=0.1).quantile(P995) == pytest.approx(rounds[0], rel=0.06)


@pytest.mark.parametrize("current", [Defence(Policy(attempt_timeout=0.25)), None])
def test_attempts_cut_off_by_a_timeout_count_as_longer(current: Defence | None) -> None:
    """Attempts that were cut off count as longer; without them the timeout would be 180 ms."""
    model = LogModel(calls=40_000, success_rates=(1.0, 1.0), timeout=0.25)
    suggestion = suggestion_for(model, "attempt_timeout", current)

    assert 0.19 == suggestion.proposed == round_two_digits(model.quantile(P995), up=True)
    assert " cut off at 250 ms" in suggestion.basis


def test_timeout_that_cuts_off_is_not_shortened() -> None:
    """A timeout that cuts off many attempts is kept, and the reason asks to raise it."""
    model = LogModel(calls=10_000, success_rates=(1.0, 1.0), timeout=0.1)
    suggestion = suggestion_for(model, "attempt_timeout", Defence(Policy(attempt_timeout=0.1)))

    assert (0.1, False) == (suggestion.proposed, suggestion.has_enough_data)
    assert (
        "8.2 % of the successful and cut-off attempts outside outages ran into" in suggestion.reason
    )
    assert suggestion.reason.endswith("raise it and measure again; kept at 100 ms")
    assert "over 100 ms of 10,835, 892 cut off at 100 ms" == suggestion.basis


def test_unknown_timeout_is_inferred() -> None:
    """Without a policy, the timeout is inferred from failures after nearly the same time."""
    model = LogModel(calls=10_000, success_rates=(0.95, 0.95), timeout=0.1)
    suggestion = suggestion_for(model, "attempt_timeout")

    assert (None, 0.1, False) == (
        suggestion.current,
        suggestion.proposed,
        suggestion.has_enough_data,
    )
    assert suggestion.reason.endswith("raise it and measure again; kept at 100 ms")
    assert suggestion.basis.endswith(" cut off at 100 ms: they failed after nearly the same time")


def test_timeout_longer_than_that_of_the_log_is_kept() -> None:
    """A current timeout is kept if the log comes from a client with a shorter one."""
    model = LogModel(calls=10_000, success_rates=(1.0, 1.0), timeout=0.1)
    suggestion = suggestion_for(model, "attempt_timeout", Defence(Policy(attempt_timeout=2.0)))

    assert (2.0, False) == (suggestion.proposed, suggestion.has_enough_data)
    assert suggestion.reason.endswith("; kept at 2 s")


@pytest.mark.parametrize(
    ("current_timeout", "proposed"), [(0.1, 0.19), (0.18, 0.18), (0.19, 0.19), (1.0, 0.19)]
)
def test_timeout_changes_if_the_log_contradicts_it(current_timeout: float, proposed: float) -> None:
    """A timeout outside the interval of the p99.5, 177 to 188 ms, is replaced by 190 ms."""
    model = LogModel(calls=20_000, success_rates=(1.0,))

    assert (
        proposed
        == suggestion_for(
            model, "attempt_timeout", Defence(Policy(attempt_timeout=current_timeout))
        ).proposed
    )


def test_a_timeout_is_within_the_latency_target() -> None:
    """A timeout that is kept is limited by the target too."""
    model = LogModel(calls=10_000, success_rates=(1.0, 1.0), timeout=0.1)
    current = Defence(Policy(attempt_timeout=0.1))

    assert 0.06 == suggestion_for(model, "attempt_timeout", current, 0.06).proposed
    assert 0.1 == suggestion_for(model, "attempt_timeout", current, 2.0).proposed


def timeout_durations(timeout: float, count: int) -> list[float]:
    """Return durations slightly above a timeout, as of real timers."""
    random_source = Random(7)
    return sorted(timeout * (1 + random_source.expovariate(200)) for _ in range(count))


@pytest.mark.parametrize(
    "failures",
    [
        timeout_durations(1.0, 50),
        [0.002] * 500 + timeout_durations(1.0, 50),
        sorted([*LATENCY[::5], *timeout_durations(1.0, 50)]),
    ],
)
def test_inexact_timeout_is_inferred(failures: list[float]) -> None:
    """A timeout of a second is found among fast failures and random failures."""
    found = find_timeout(LATENCY, failures, None)

    assert found is not None
    assert (1.0, True) == (round_two_digits(found.timeout), found.is_inferred)
    assert 50 <= found.cut_off_count <= 60


@pytest.mark.parametrize(
    "failures",
    [
        [],
        [0.002] * 500,
        [0.5] * 500,
        [1.0] * 2,
        LATENCY[::4],
        [1 + number / 10 for number in range(10)],
    ],
    ids=[
        "no failures",
        "fast",
        "within the successes",
        "too few",
        "spread like successes",
        "spread after successes",
    ],
)
def test_other_failures_are_no_timeout(failures: list[float]) -> None:
    """No timeout is inferred from failures that are few, fast or spread."""
    assert None is find_timeout(LATENCY, failures, None)


@pytest.mark.parametrize("current_timeout", [None, 0.1, 0.103])
def test_errors_of_a_steady_dependency_are_no_timeouts(current_timeout: float | None) -> None:
    """If all attempts take nearly the same time, failures are not taken for timeouts."""
    steady = LogModel(calls=10_000, median=0.1, sigma=0.01, success_rates=(0.9,))
    suggestion = suggestion_for(
        steady, "attempt_timeout", Defence(Policy(attempt_timeout=current_timeout))
    )

    assert (0.11, True) == (suggestion.proposed, suggestion.has_enough_data)


def test_timeout_of_few_attempts_is_ignored() -> None:
    """A timeout is ignored if more attempts succeed after it than fail at it."""
    assert None is find_timeout(LATENCY, [0.9] * 50, 0.9)
    assert (0.9, 150, False) == find_timeout(LATENCY, [0.9] * 150, 0.9)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.00001, "under 0.01 %"),
        (0.002, "0.2 %"),
        (0.041, "4.1 %"),
        (0.0997, "10 %"),
        (0.384, "38 %"),
        (1.0, "100 %"),
        (2.9, "290 %"),
    ],
)
def test_format_percent(share: float, text: str) -> None:
    """Percentages have two significant digits."""
    assert text == format_percent(share)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("attempt_timeout", 0.25, "250 ms"),
        ("max_attempts", 4, "4"),
        ("total_budget", None, "none"),
        ("budget", {"kind": "ratio", "ratio": 0.02}, "ratio 0.02"),
        ("budget", {"kind": "token", "capacity": 50}, "token capacity=50"),
        ("hedging.after", "p95", "p95"),
    ],
)
def test_format_setting(field: str, value: object, text: str) -> None:
    """Durations have a unit, and a table is one line."""
    assert text == format_setting(field, value)
