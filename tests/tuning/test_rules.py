"""The rule for the number of attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.outcome import Kind
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tests.tuning.builders import LOG_MODEL, LogModel, analyze_model, suggestion_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.rules import Suggestion


def test_attempt_that_never_succeeds_is_dropped() -> None:
    """The fourth attempt hardly ever succeeds, and the evidence has its interval."""
    suggestion = suggestion_for(LOG_MODEL, "max_attempts")

    assert (4, 3) == (suggestion.current, suggestion.proposed)
    assert suggestion.reason.startswith("attempt 4 succeeds 0")
    assert suggestion.reason.endswith(" % of the time: drop it")
    assert " of 5," in suggestion.evidence


def test_attempt_that_helps_outside_outages_is_kept() -> None:
    """Outside outages the third attempt succeeds half of the time, and overall in 0.5 %.

    The retry budget limits its cost in an outage.
    """
    evidence = analyze_model(LOG_MODEL)
    over_all, usual = evidence.odds[2], evidence.healthy_odds[2]

    assert over_all.high < 0.01
    assert 0.3 < usual.share < 0.7
    assert 3 == suggestion_for(LOG_MODEL, "max_attempts").proposed


def test_an_attempt_that_is_only_made_in_outages_is_dropped() -> None:
    """If a third attempt is hardly made outside outages, the odds of outages decide."""
    outages = ((30, 70), (90, 130), (150, 190))
    model = LogModel(calls=10_000, odds=(0.999, 0.99, 0.99), outages=outages)
    suggestion = suggestion_for(model, "max_attempts", Defence(Policy(max_attempts=3)))

    assert 1 <= suggestion.proposed < 3
    assert " of the time: drop it" in suggestion.reason


def test_attempts_that_succeed_are_kept() -> None:
    """If the last attempt still succeeds, none is dropped and none is added."""
    suggestion = suggestion_for(
        LogModel(calls=10_000, odds=(0.7, 0.6, 0.5)),
        "max_attempts",
        Defence(Policy(max_attempts=3)),
    )

    assert (3, True) == (suggestion.proposed, suggestion.has_enough_data)
    assert suggestion.reason.startswith("attempt 3 still succeeds 5")


def test_more_attempts_than_the_current_policy_are_proposed() -> None:
    """The log may come from a client with more attempts than the current policy."""
    suggestion = suggestion_for(
        LogModel(calls=10_000, odds=(0.7, 0.6, 0.5)),
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
        assert (
            "too little data: attempt 2 was made 0 times outside outages, "
            "200 needed, or 3 outages; kept at 4"
        ) == suggestion.reason


def test_three_outages_are_enough_to_drop_an_attempt() -> None:
    """An attempt that failed in three outages is dropped."""
    suggestion = suggestion_for_outages(200, 200, 200)

    assert (1, "0 of 600 (95 % interval 0 % to 0.64 %)") == (
        suggestion.proposed,
        suggestion.evidence,
    )
    assert "attempt 2 succeeds 0 % of the time: drop it" == suggestion.reason


def test_healthy_attempts_are_enough_to_drop_an_attempt() -> None:
    """If retries fail outside outages too, no outages are needed."""
    suggestion = suggestion_for(LogModel(calls=10_000, odds=(0.9, 0.001)), "max_attempts")

    assert (1, True) == (suggestion.proposed, suggestion.has_enough_data)
    assert suggestion.reason.endswith(" of the time: drop it")


def test_attempt_that_cannot_be_ruled_out_is_kept() -> None:
    """None of 300 tries succeeded, which leaves up to 1.3 %: the attempt is kept."""
    suggestion = suggestion_for_outages(300)

    assert 4 == suggestion.proposed
    assert "attempt 4 cannot be ruled out: 0 of 300, 95 % interval up to 1.3 %" == suggestion.reason
