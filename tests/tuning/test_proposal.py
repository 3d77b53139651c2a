"""Proposals: near the truth of logs whose truth is known."""

from __future__ import annotations

import pytest

from tarry.core.hedging import Hedging
from tarry.policyfile.defence import Defence
from tarry.tuning.proposal import propose
from tests.tuning.logs import Truth
from tests.tuning.proposals import TRUTH, evidence_of, line_of


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
