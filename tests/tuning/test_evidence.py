"""What a log says, held against logs whose truth is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.outcome import Kind
from tarry.errors import ConfigurationError
from tarry.simulator.metrics import quantile
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import (
    BLOCK_ATTEMPTS,
    HEDGE_PERCENTILES,
    analyze_log,
    estimate_hedge,
    find_outages,
)
from tests.tuning.builders import EPOCH, Truth

OK, BAD = Kind.SUCCESS, Kind.TRANSIENT
P995, P999 = 2.5758, 3.0902
"""The quantiles of the normal distribution."""


def test_nothing_says_nothing() -> None:
    """A log without attempts is refused, and no number is made up."""
    with pytest.raises(ConfigurationError, match="at least one attempt"):
        analyze_log(AttemptLog())


def test_the_truth_is_found() -> None:
    """Quantiles, odds, the retry ratio and the failure rate come near what the log was made of."""
    truth = Truth(calls=40_000, odds=(0.95, 0.8, 0.4), outages=((100, 130), (400, 460)))
    evidence = analyze_log(truth.log())
    well = analyze_log(Truth(calls=20_000, odds=(0.95, 0.8, 0.4)).log())

    assert truth.quantile(P995) == pytest.approx(
        quantile(evidence.success_durations, 0.995), rel=0.05
    )
    assert 0.05 == pytest.approx(quantile(evidence.success_durations, 0.5), rel=0.02)
    assert 0.05 + 0.05 * 0.2 == pytest.approx(evidence.healthy_retry_ratio, rel=0.1)
    assert 40_000 == evidence.calls
    assert 50 == pytest.approx(evidence.rate, rel=0.03)
    for odds, one in zip(truth.odds, well.odds, strict=True):
        assert one.low < odds < one.high
    assert [0.95, 0.8, 0.4] == pytest.approx([one.share for one in well.odds], abs=0.04)


def test_an_outage_does_not_lengthen_the_healthy_latency() -> None:
    """Latencies and failures within outages are not those of a healthy dependency."""
    truth = Truth(calls=20_000, odds=(0.99, 0.9), outages=((100, 200),))
    evidence = analyze_log(truth.log())

    assert 0.01 == pytest.approx(evidence.failure_rate, rel=0.4)
    assert len(evidence.success_durations) + len(evidence.failure_durations) < 16_000


def attempt(task: str, number: int, start: float, kind: Kind) -> LoggedAttempt:
    """Make an attempt of one second."""
    return LoggedAttempt(task, number, start, 1.0, kind)


def test_calls_are_the_attempts_of_a_task() -> None:
    """Calls overlap, are retried, are replayed under their old id, and may lack a beginning."""
    evidence = analyze_log(
        AttemptLog(
            [
                attempt("retried", 1, 10.0, BAD),
                attempt("other", 1, 10.5, OK),
                attempt("retried", 2, 12.0, BAD),
                attempt("retried", 3, 16.0, OK),
                attempt("replayed", 1, 20.0, BAD),
                attempt("replayed", 1, 30.0, OK),
                attempt("begun earlier", 3, 40.0, OK),
            ]
        )
    )

    assert (7, 4, 2) == (evidence.attempts, evidence.calls, evidence.retries)
    assert [1.0, 1.0, 7.0] == list(evidence.call_durations)
    assert 31.0 == evidence.span
    assert (3 / 4, 6 / 4) == (evidence.success_rate, evidence.attempts_per_call)
    assert [(1, 4, 2), (2, 1, 0), (3, 2, 2)] == [one[:3] for one in evidence.odds]


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (1, 1), (2, 0), (2, 0)], 1),
        ([(0, 5), (1, 1), (3, 5), (4, 9), (4.5, 1), (6, 1)], 4),
    ],
)
def test_the_most_at_once_is_what_overlaps(spans: list[tuple[float, float]], most: int) -> None:
    """Of attempts that succeeded; one that begins as another ends does not meet it."""
    attempts = [LoggedAttempt(f"{start}", 1, start, took, OK) for start, took in spans]
    failed = [LoggedAttempt(f"bad {number}", 1, 4.0, 1.0, BAD) for number in range(5)]

    assert most == analyze_log(AttemptLog([*attempts, *failed])).max_concurrency


def test_what_failed_for_good_is_no_sample() -> None:
    """A 404 says nothing about how long a success takes, nor that the dependency fails."""
    evidence = analyze_log(AttemptLog([attempt("a", 1, 0.0, Kind.PERMANENT)]))

    assert ([], [], ()) == (
        list(evidence.success_durations),
        list(evidence.failure_durations),
        evidence.hedges,
    )
    assert (0.0, 0.0) == (evidence.failure_rate, evidence.healthy_retry_ratio)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=40))
def test_every_call_and_every_retry_is_counted_once(rows: list[tuple[int, int, bool]]) -> None:
    """Whatever a log holds, calls and retries are never more than attempts, nor odds than one."""
    log = AttemptLog(
        attempt(str(task), number, float(start), OK if well else BAD)
        for start, (task, number, well) in enumerate(rows)
    )
    if not rows:
        return
    evidence = analyze_log(log)

    assert evidence.calls == sum(number == 1 for _, number, _ in rows)
    assert evidence.calls + evidence.retries <= evidence.attempts == len(rows)
    assert len(rows) == sum(one.tries for one in evidence.odds)
    assert all(0 <= one.low <= one.share <= one.high <= 1 for one in evidence.odds)


def test_a_hedge_saves_the_more_the_earlier_it_is_sent() -> None:
    """An earlier copy costs more load and saves more of the tail."""
    hedges = analyze_log(Truth(calls=10_000, sigma=1.0).log()).hedges

    assert list(HEDGE_PERCENTILES) == [one.percentile for one in hedges]
    assert [0.5, 0.25, 0.1, 0.05, 0.01] == pytest.approx([one.load for one in hedges], abs=1e-3)
    savings = [one.saving for one in hedges]
    assert sorted(savings, reverse=True) == savings
    assert savings[0] > 0.5


def test_a_hedge_of_what_is_always_the_same_saves_nothing() -> None:
    """A latency without a tail has nothing to gain, and one of zero nothing to divide by."""
    assert (1.0, 1.0, 0.0, 0.0) == estimate_hedge([1.0] * 10, "p95")[1:]
    assert (0.0, 0.0, 0.0, 0.0) == estimate_hedge([0.0] * 10, "p95")[1:]


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
