"""How many attempts: as many as have odds. The tries of one outage fail together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.outcome import Kind
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tests.tuning.builders import TRUTH, Truth, evidence_of, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.rules import Suggestion


def test_an_attempt_without_odds_is_dropped() -> None:
    """The fourth attempt hardly ever succeeds, and the line says how surely."""
    line = line_of(TRUTH, "max_attempts")

    assert (4, 3) == (line.current, line.proposed)
    assert line.reason.startswith("attempt 4 succeeds 0")
    assert line.reason.endswith(" % of the time: drop it")
    assert " of 5," in line.evidence


def test_an_attempt_that_helps_on_usual_days_stays() -> None:
    """Over all the third attempt succeeds in 0.5 %, because of outages; outside it is every second.

    What it costs in an outage, the retry budget bounds.
    """
    evidence = evidence_of(TRUTH)
    over_all, usual = evidence.odds[2], evidence.healthy_odds[2]

    assert over_all.high < 0.01
    assert 0.3 < usual.share < 0.7
    assert 3 == line_of(TRUTH, "max_attempts").proposed


def test_an_attempt_that_is_only_made_in_outages_is_dropped() -> None:
    """Where hardly any call comes to a third attempt on a usual day, it is those that count."""
    outages = ((30, 70), (90, 130), (150, 190))
    truth = Truth(calls=10_000, odds=(0.999, 0.99, 0.99), outages=outages)
    line = line_of(truth, "max_attempts", Defence(Policy(max_attempts=3)))

    assert 1 <= line.proposed < 3
    assert " of the time: drop it" in line.reason


def test_attempts_with_odds_stay() -> None:
    """Where the last attempt still helps, none is dropped, and none is invented."""
    line = line_of(
        Truth(calls=10_000, odds=(0.7, 0.6, 0.5)), "max_attempts", Defence(Policy(max_attempts=3))
    )

    assert (3, True) == (line.proposed, line.has_enough_data)
    assert line.reason.startswith("attempt 3 still succeeds 5")


def test_attempts_seen_to_help_beyond_the_policy_are_proposed() -> None:
    """The log may come from a client with more attempts than the policy that is tuned."""
    line = line_of(
        Truth(calls=10_000, odds=(0.7, 0.6, 0.5)), "max_attempts", Defence(Policy(max_attempts=2))
    )

    assert 3 == line.proposed


def line_for(*outages: int) -> Suggestion:
    """Return what is said of 3,000 calls that fail only in outages of so many, four times each."""
    down = {call for at, size in enumerate(outages) for call in range(at * 900, at * 900 + size)}

    def attempts() -> Iterator[LoggedAttempt]:
        for call in range(3_000):
            kind = Kind.TRANSIENT if call in down else Kind.SUCCESS
            for number in range(1, 5 if call in down else 2):
                yield LoggedAttempt(str(call), number, call + number / 10, 0.05, kind)

    lines = propose(analyze_log(AttemptLog(attempts()))).suggestions
    return next(line for line in lines if line.field == "max_attempts")


def test_one_outage_does_not_abolish_retries() -> None:
    """Its 500 failures have one cause, and say nothing about a failure that has another."""
    for outages in ((500,), (250, 250)):
        line = line_for(*outages)

        assert (4, 4, False) == (line.current, line.proposed, line.has_enough_data)
        assert (
            "too little data: attempt 2 was made 0 times outside outages, "
            "200 needed, or 3 outages; kept at 4"
        ) == line.reason


def test_three_outages_are_enough_to_drop_an_attempt() -> None:
    """What has not helped in any of three is not expected to help in the next."""
    line = line_for(200, 200, 200)

    assert (1, "0 of 600 (95 % interval 0 % to 0.64 %)") == (line.proposed, line.evidence)
    assert "attempt 2 succeeds 0 % of the time: drop it" == line.reason


def test_usual_days_are_enough_to_drop_an_attempt() -> None:
    """Where retries fail outside outages too, no outage is needed to see it."""
    line = line_of(Truth(calls=10_000, odds=(0.9, 0.001)), "max_attempts")

    assert (1, True) == (line.proposed, line.has_enough_data)
    assert line.reason.endswith(" of the time: drop it")


def test_what_was_never_seen_to_help_is_not_said_to() -> None:
    """None of 300 tries succeeded, which leaves 1.3 %: it stays, but not with praise."""
    line = line_for(300)

    assert 4 == line.proposed
    assert "attempt 4 cannot be ruled out: 0 of 300, 95 % interval up to 1.3 %" == line.reason
