"""Proposals: near the truth of logs whose truth is known."""

from __future__ import annotations

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.tuning.proposal import propose
from tarry.wire.defence import Defence
from tests.tuning.logs import Truth
from tests.tuning.proposals import P995, TRUTH, evidence_of, line_of


def test_the_timeout_is_the_p995() -> None:
    """It comes near the p99.5 of the distribution, from above, and shows its interval."""
    line = line_of(TRUTH, "attempt_timeout")

    assert TRUTH.quantile(P995) == pytest.approx(line.proposed, rel=0.1)
    assert "p99.5 of healthy attempts" == line.reason
    assert " ms to " in line.evidence
    assert line.enough


def test_a_timeout_that_cuts_is_not_made_shorter() -> None:
    """What the timeout has cut off is missing in the log: the p99.5 of the rest is too short."""
    truth = Truth(calls=10_000, odds=(1.0, 1.0), timeout=0.1)
    current = Defence(Policy(attempt_timeout=0.1))
    line = line_of(truth, "attempt_timeout", current)

    assert (0.1, False) == (line.proposed, line.enough)
    assert "8.2 % of healthy attempts ran into the timeout" in line.reason
    assert line.reason.endswith("raise it and measure again; kept at 100 ms")


def test_a_timeout_that_seldom_cuts_is_measured() -> None:
    """One attempt in a thousand cut off leaves enough to see the p99.5."""
    truth = Truth(calls=10_000, odds=(1.0, 1.0), timeout=0.25)
    line = line_of(truth, "attempt_timeout", Defence(Policy(attempt_timeout=0.25)))

    assert truth.quantile(P995) == pytest.approx(line.proposed, rel=0.1)


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
    truth = Truth(calls=10_000, odds=(0.999, 0.99, 0.99), outages=((50, 90),))
    line = line_of(truth, "max_attempts", Defence(Policy(max_attempts=3)))

    assert 1 <= line.proposed < 3
    assert " of the time: drop it" in line.reason


def test_attempts_with_odds_stay() -> None:
    """Where the last attempt still helps, none is dropped, and none is invented."""
    line = line_of(
        Truth(calls=10_000, odds=(0.7, 0.6, 0.5)), "max_attempts", Defence(Policy(max_attempts=3))
    )

    assert (3, True) == (line.proposed, line.enough)
    assert line.reason.startswith("attempt 3 still succeeds 5")


def test_attempts_seen_to_help_beyond_the_policy_are_proposed() -> None:
    """The log may come from a client with more attempts than the policy that is tuned."""
    line = line_of(
        Truth(calls=10_000, odds=(0.7, 0.6, 0.5)), "max_attempts", Defence(Policy(max_attempts=2))
    )

    assert 3 == line.proposed


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
    assert line.evidence.startswith("3 outages, median 40")


def test_the_budget_is_twice_the_retries_of_a_usual_day() -> None:
    """Three in a hundred first attempts fail, and outages do not count."""
    line = line_of(TRUTH, "budget")

    assert None is line.current
    assert "ratio" == line.proposed["kind"]
    assert 2 * 0.033 == pytest.approx(line.proposed["ratio"], rel=0.25)
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
    line = proposal.lines[-1]

    assert ("hedging.after", "p95", True) == (line.field, line.proposed, line.advice)
    assert line.reason.startswith("advice, instead of retries: p95: -")
    assert line.reason.endswith(" % p99.9 for +5 % load")
    assert None is proposal.defence.hedging


def test_a_hedging_is_tuned_as_such() -> None:
    """Who hedges gets a percentile and a budget, and no retries."""
    current = Defence(hedging=Hedging(after=0.5, max_attempts=3))
    proposal = propose(evidence_of(Truth(calls=8_000, sigma=1.0)), current)

    assert ["hedging.after", "budget"] == [line.field for line in proposal.lines]
    assert Hedging(after="p95", max_attempts=3) == proposal.defence.hedging
    assert not proposal.lines[0].advice


def test_a_hedge_that_gains_nothing_is_not_proposed() -> None:
    """Without a tail there is nothing to hedge against."""
    line = line_of(Truth(calls=8_000, sigma=0.01), "hedging.after")

    assert None is line.proposed
    assert line.reason.startswith("a second copy would not pay (p95: -")
