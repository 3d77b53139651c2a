"""Outages: found where they are, at the length they have, and not where chance is enough."""

from __future__ import annotations

import pytest

from tarry.core.outcome import Kind
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import BLOCK_ATTEMPTS, find_outages
from tests.tuning.logs import EPOCH, Truth


def log_of(letters: str, *, duration: float = 0.1) -> AttemptLog:
    """Make an attempt a second: a dot succeeds, an x fails, a p fails for good."""
    kinds = {".": Kind.SUCCESS, "x": Kind.TRANSIENT, "t": Kind.THROTTLED, "p": Kind.PERMANENT}
    return AttemptLog(
        LoggedAttempt(str(second), 1, float(second), duration, kinds[letter])
        for second, letter in enumerate(letters)
    )


@pytest.mark.parametrize("rate", [5.0, 20.0, 50.0])
def test_outages_are_found_with_their_lengths(rate: float) -> None:
    """At any rate, each outage begins and ends within two blocks of where it truly does."""
    truth = Truth(
        calls=int(400 * rate),
        rate=rate,
        odds=(0.98,) * 4,
        outages=((50, 80), (200, 210), (300, 360)),
    )
    found = find_outages(truth.log())

    assert 3 == len(found)
    for (start, end), outage in zip(truth.outages, found, strict=True):
        near = 2 * BLOCK_ATTEMPTS / rate
        assert (start, end) == pytest.approx((outage.start - EPOCH, outage.end - EPOCH), abs=near)
        assert outage.share > 0.8


@pytest.mark.parametrize("odds", [0.99, 0.9, 0.8])
def test_chance_is_no_outage(odds: float) -> None:
    """Where up to a fifth fails at any time, nothing looks like an outage in 30,000 attempts."""
    assert () == find_outages(Truth(calls=30_000, odds=(odds,)).log())


def test_one_bad_block_is_no_outage_and_two_are() -> None:
    """Twenty failures in a row may be one client; forty are not."""
    well, ill = "." * BLOCK_ATTEMPTS, "x" * BLOCK_ATTEMPTS

    assert () == find_outages(log_of(well + ill + well))
    (found,) = find_outages(log_of(well + ill + ill + well))
    assert (BLOCK_ATTEMPTS, 3 * BLOCK_ATTEMPTS - 1) == (found.start, found.end)
    assert (BLOCK_ATTEMPTS, 3 * BLOCK_ATTEMPTS) == (found.first, found.stop)


def test_flapping_is_one_outage() -> None:
    """A service that is half back and down again is in one outage all the while."""
    (found,) = find_outages(log_of("." * 20 + "x" * 40 + "...x" * 5 + "x" * 40 + "." * 40))

    assert 99 == found.length
    assert pytest.approx(85 / 100) == found.share


def test_permanent_failures_count_neither_way() -> None:
    """A client that asks for what does not exist makes no outage, and hides none."""
    assert () == find_outages(log_of("p" * 400))
    (found,) = find_outages(log_of("." * 20 + "xppp" * 40 + "." * 20))
    assert (20, 1.0) == (found.start, found.share)


def test_throttling_counts() -> None:
    """A dependency that says "too many requests" to everybody is not available."""
    assert 1 == len(find_outages(log_of("." * 20 + "t" * 40)))


def test_an_outage_at_the_end_of_the_log() -> None:
    """A log that ends while all fails has an outage up to there."""
    (found,) = find_outages(log_of("." * 20 + "x" * 55, duration=30.0))

    assert (20, 74, 30.0) == (found.start, found.end, found.median_failure_duration)


@pytest.mark.parametrize("letters", ["", "x", "." * 19, "x" * 29])
def test_too_few_attempts_are_no_outage(letters: str) -> None:
    """What does not fill two blocks is not judged."""
    assert () == find_outages(log_of(letters))
