"""The timeout: the p99.5 of what healthy attempts take, however often it is tuned."""

from __future__ import annotations

from random import Random

import pytest

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.tuning.estimates import round_two_digits
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tarry.tuning.timeouts import find_timeout
from tests.tuning.builders import P995, TRUTH, Truth, line_of

LATENCY = [number / 1000 for number in range(1, 1001)]
"""Of successes: one of each millisecond up to a second."""


def test_the_timeout_is_the_p995() -> None:
    """It comes near the p99.5 of the distribution, from above, and shows its interval."""
    line = line_of(TRUTH, "attempt_timeout")

    assert TRUTH.quantile(P995) == pytest.approx(line.proposed, rel=0.05)
    assert "p99.5 of healthy attempts" == line.reason
    assert " (95 % interval 1" in line.evidence
    assert " ms to " in line.evidence
    assert line.has_enough_data


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("odds", [(1.0,) * 4, (0.9,) * 4])
def test_tuned_again_and_again_it_stays(*, given: bool, odds: tuple[float, ...]) -> None:
    """The log of the proposed timeout gives the same one, round by round, known or only seen."""
    rounds: list[float] = []
    current = None
    for number in range(5):
        timeout = rounds[-1] if rounds else None
        truth = Truth(calls=20_000, median=0.1, odds=odds, timeout=timeout)
        proposal = propose(analyze_log(truth.log(seed=number)), current)
        rounds.append(proposal.suggestions[0].proposed)
        current = proposal.defence if given else None

    assert [rounds[0]] * 5 == rounds
    assert Truth(median=0.1).quantile(P995) == pytest.approx(rounds[0], rel=0.06)


@pytest.mark.parametrize("current", [Defence(Policy(attempt_timeout=0.25)), None])
def test_a_timeout_that_seldom_cuts_is_measured(current: Defence | None) -> None:
    """What one attempt in 1,500 is cut off from counts as longer: without it, this were 180 ms."""
    truth = Truth(calls=40_000, odds=(1.0, 1.0), timeout=0.25)
    line = line_of(truth, "attempt_timeout", current)

    assert 0.19 == line.proposed == round_two_digits(truth.quantile(P995), up=True)
    assert " cut off at 250 ms" in line.evidence


def test_a_timeout_that_cuts_is_not_made_shorter() -> None:
    """What the timeout has cut off is missing in the log: the p99.5 of the rest is too short."""
    truth = Truth(calls=10_000, odds=(1.0, 1.0), timeout=0.1)
    line = line_of(truth, "attempt_timeout", Defence(Policy(attempt_timeout=0.1)))

    assert (0.1, False) == (line.proposed, line.has_enough_data)
    assert "8.2 % of healthy attempts ran into the timeout" in line.reason
    assert line.reason.endswith("raise it and measure again; kept at 100 ms")
    assert "over 100 ms of 10,835, 892 cut off at 100 ms" == line.evidence


def test_a_timeout_that_nobody_told_of_is_seen() -> None:
    """Without the policy, what failed after the same time gives it away, and it is not undercut."""
    truth = Truth(calls=10_000, odds=(0.95, 0.95), timeout=0.1)
    line = line_of(truth, "attempt_timeout")

    assert (None, 0.1, False) == (line.current, line.proposed, line.has_enough_data)
    assert line.reason.endswith("raise it and measure again; kept at 100 ms")
    assert line.evidence.endswith(" cut off at 100 ms: they failed after nearly the same time")


def test_a_longer_timeout_than_the_one_that_cut_is_kept() -> None:
    """The log is of a client that gave up earlier than the policy in force does."""
    truth = Truth(calls=10_000, odds=(1.0, 1.0), timeout=0.1)
    line = line_of(truth, "attempt_timeout", Defence(Policy(attempt_timeout=2.0)))

    assert (2.0, False) == (line.proposed, line.has_enough_data)
    assert line.reason.endswith("; kept at 2 s")


@pytest.mark.parametrize(
    ("now", "proposed"), [(0.1, 0.19), (0.18, 0.18), (0.19, 0.19), (1.0, 0.19)]
)
def test_a_timeout_changes_where_the_log_speaks_against_it(now: float, proposed: float) -> None:
    """Of a log that was never cut off, the p99.5 lies from 177 to 188 ms."""
    truth = Truth(calls=20_000, odds=(1.0,))

    assert (
        proposed == line_of(truth, "attempt_timeout", Defence(Policy(attempt_timeout=now))).proposed
    )


def test_a_timeout_is_within_the_latency_target() -> None:
    """One that is kept is held to it as well."""
    truth = Truth(calls=10_000, odds=(1.0, 1.0), timeout=0.1)
    current = Defence(Policy(attempt_timeout=0.1))

    assert 0.06 == line_of(truth, "attempt_timeout", current, 0.06).proposed
    assert 0.1 == line_of(truth, "attempt_timeout", current, 2.0).proposed


def late(limit: float, count: int) -> list[float]:
    """Return what timers make of a timeout: a little longer, now and then much."""
    dice = Random(7)
    return sorted(limit * (1 + dice.expovariate(200)) for _ in range(count))


@pytest.mark.parametrize(
    "faults",
    [late(1.0, 50), [0.002] * 500 + late(1.0, 50), sorted([*LATENCY[::5], *late(1.0, 50)])],
)
def test_timers_are_not_exact(faults: list[float]) -> None:
    """A timeout of a second is seen among what fails at once, and among what fails at any time."""
    cut = find_timeout(LATENCY, faults, None)

    assert cut is not None
    assert (1.0, True) == (round_two_digits(cut.limit), cut.is_inferred)
    assert 50 <= cut.attempts <= 60


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [0.002] * 500,
        [0.5] * 500,
        [1.0] * 2,
        LATENCY[::4],
        [1 + number / 10 for number in range(10)],
    ],
    ids=["none", "at once", "within", "too few", "as long as successes", "apart"],
)
def test_what_is_no_timeout(faults: list[float]) -> None:
    """Errors that come fast or at any time are not cut off, and are not samples."""
    assert None is find_timeout(LATENCY, faults, None)


@pytest.mark.parametrize("now", [None, 0.1, 0.103])
def test_errors_of_a_steady_dependency_are_no_timeouts(now: float | None) -> None:
    """Where all takes nearly the same time, failures do too, and that is no pile."""
    steady = Truth(calls=10_000, median=0.1, sigma=0.01, odds=(0.9,))
    line = line_of(steady, "attempt_timeout", Defence(Policy(attempt_timeout=now)))

    assert (0.11, True) == (line.proposed, line.has_enough_data)


def test_a_timeout_that_few_had_is_not_taken_for_that_of_all() -> None:
    """Where more succeed later than fail at the timeout, it was not in force for them."""
    assert None is find_timeout(LATENCY, [0.9] * 50, 0.9)
    assert (0.9, 150, False) == find_timeout(LATENCY, [0.9] * 150, 0.9)
