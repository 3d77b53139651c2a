"""Evidence and outages of logs with known properties."""

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
from tests.tuning.builders import EPOCH, LogModel

OK, BAD = Kind.SUCCESS, Kind.TRANSIENT
P995, P999 = 2.5758, 3.0902
"""The quantiles of the normal distribution."""


def test_empty_log_is_rejected() -> None:
    """A log without attempts is rejected."""
    with pytest.raises(ConfigurationError, match="at least one attempt"):
        analyze_log(AttemptLog())


def test_evidence_matches_the_model() -> None:
    """Quantiles, odds, retry ratio and failure rate are close to those of the model."""
    model = LogModel(calls=40_000, odds=(0.95, 0.8, 0.4), outages=((100, 130), (400, 460)))
    evidence = analyze_log(model.log())
    well = analyze_log(LogModel(calls=20_000, odds=(0.95, 0.8, 0.4)).log())

    assert model.quantile(P995) == pytest.approx(
        quantile(evidence.success_durations, 0.995), rel=0.05
    )
    assert 0.05 == pytest.approx(quantile(evidence.success_durations, 0.5), rel=0.02)
    assert 0.05 + 0.05 * 0.2 == pytest.approx(evidence.healthy_retry_ratio, rel=0.1)
    assert 40_000 == evidence.calls
    assert 50 == pytest.approx(evidence.rate, rel=0.03)
    for odds, one in zip(model.odds, well.odds, strict=True):
        assert one.low < odds < one.high
    assert [0.95, 0.8, 0.4] == pytest.approx([one.share for one in well.odds], abs=0.04)


def test_outages_do_not_affect_healthy_durations() -> None:
    """Attempts within outages are not counted as healthy."""
    model = LogModel(calls=20_000, odds=(0.99, 0.9), outages=((100, 200),))
    evidence = analyze_log(model.log())

    assert 0.01 == pytest.approx(evidence.failure_rate, rel=0.4)
    assert len(evidence.success_durations) + len(evidence.failure_durations) < 16_000


def make_attempt(task: str, number: int, start: float, kind: Kind) -> LoggedAttempt:
    """Return an attempt of one second."""
    return LoggedAttempt(task, number, start, 1.0, kind)


def test_calls_are_the_attempts_of_a_task() -> None:
    """Calls overlap, are retried, are replayed with their id, and may lack a first attempt."""
    evidence = analyze_log(
        AttemptLog(
            [
                make_attempt("retried", 1, 10.0, BAD),
                make_attempt("other", 1, 10.5, OK),
                make_attempt("retried", 2, 12.0, BAD),
                make_attempt("retried", 3, 16.0, OK),
                make_attempt("replayed", 1, 20.0, BAD),
                make_attempt("replayed", 1, 30.0, OK),
                make_attempt("begun earlier", 3, 40.0, OK),
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
def test_max_concurrency_counts_overlapping_attempts(
    spans: list[tuple[float, float]], most: int
) -> None:
    """Only successes count, and an attempt that starts when another ends does not overlap."""
    attempts = [LoggedAttempt(f"{start}", 1, start, took, OK) for start, took in spans]
    failed = [LoggedAttempt(f"bad {number}", 1, 4.0, 1.0, BAD) for number in range(5)]

    assert most == analyze_log(AttemptLog([*attempts, *failed])).max_concurrency


def test_permanent_failures_are_not_samples() -> None:
    """A permanent failure counts neither as a success nor as a failure."""
    evidence = analyze_log(AttemptLog([make_attempt("a", 1, 0.0, Kind.PERMANENT)]))

    assert ([], [], ()) == (
        list(evidence.success_durations),
        list(evidence.failure_durations),
        evidence.hedges,
    )
    assert (0.0, 0.0) == (evidence.failure_rate, evidence.healthy_retry_ratio)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=40))
def test_every_call_and_every_retry_is_counted_once(rows: list[tuple[int, int, bool]]) -> None:
    """For all logs, calls and retries are at most the attempts, and odds are at most 1."""
    log = AttemptLog(
        make_attempt(str(task), number, float(start), OK if well else BAD)
        for start, (task, number, well) in enumerate(rows)
    )
    if not rows:
        return
    evidence = analyze_log(log)

    assert evidence.calls == sum(number == 1 for _, number, _ in rows)
    assert evidence.calls + evidence.retries <= evidence.attempts == len(rows)
    assert len(rows) == sum(one.tries for one in evidence.odds)
    assert all(0 <= one.low <= one.share <= one.high <= 1 for one in evidence.odds)


def test_earlier_hedge_saves_more() -> None:
    """An earlier copy adds more load and saves more of the tail."""
    hedges = analyze_log(LogModel(calls=10_000, sigma=1.0).log()).hedges

    assert list(HEDGE_PERCENTILES) == [one.percentile for one in hedges]
    assert [0.5, 0.25, 0.1, 0.05, 0.01] == pytest.approx([one.load for one in hedges], abs=1e-3)
    savings = [one.saving for one in hedges]
    assert sorted(savings, reverse=True) == savings
    assert savings[0] > 0.5


def test_hedge_of_a_fixed_latency_saves_nothing() -> None:
    """A latency without a tail has nothing to save, and a latency of 0 is no error."""
    assert (1.0, 1.0, 0.0, 0.0) == estimate_hedge([1.0] * 10, "p95")[1:]
    assert (0.0, 0.0, 0.0, 0.0) == estimate_hedge([0.0] * 10, "p95")[1:]


def log_from_pattern(letters: str, *, duration: float = 0.1) -> AttemptLog:
    """Return a log of one attempt per second: "." succeeds, "x" fails, "p" fails permanently."""
    kinds = {".": Kind.SUCCESS, "x": Kind.TRANSIENT, "t": Kind.THROTTLED, "p": Kind.PERMANENT}
    return AttemptLog(
        LoggedAttempt(str(second), 1, float(second), duration, kinds[letter])
        for second, letter in enumerate(letters)
    )


@pytest.mark.parametrize("rate", [5.0, 20.0, 50.0])
def test_outages_are_found_with_their_lengths(rate: float) -> None:
    """At any rate, each outage starts and ends within two blocks of the true times."""
    model = LogModel(
        calls=int(400 * rate),
        rate=rate,
        odds=(0.98,) * 4,
        outages=((50, 80), (200, 210), (300, 360)),
    )
    found = find_outages(model.log())

    assert 3 == len(found)
    for (start, end), outage in zip(model.outages, found, strict=True):
        near = 2 * BLOCK_ATTEMPTS / rate
        assert (start, end) == pytest.approx((outage.start - EPOCH, outage.end - EPOCH), abs=near)
        assert outage.share > 0.8


@pytest.mark.parametrize("odds", [0.99, 0.9, 0.8])
def test_random_failures_are_no_outage(odds: float) -> None:
    """If up to a fifth of 30,000 attempts fails at random, no outage is found."""
    assert () == find_outages(LogModel(calls=30_000, odds=(odds,)).log())


def test_one_bad_block_is_no_outage_and_two_are() -> None:
    """Twenty failures in a row are no outage, and forty are one."""
    well, ill = "." * BLOCK_ATTEMPTS, "x" * BLOCK_ATTEMPTS

    assert () == find_outages(log_from_pattern(well + ill + well))
    (found,) = find_outages(log_from_pattern(well + ill + ill + well))
    assert (BLOCK_ATTEMPTS, 3 * BLOCK_ATTEMPTS - 1) == (found.start, found.end)
    assert (BLOCK_ATTEMPTS, 3 * BLOCK_ATTEMPTS) == (found.first, found.stop)


def test_flapping_is_one_outage() -> None:
    """A service that recovers only partly in between has one outage."""
    (found,) = find_outages(
        log_from_pattern("." * 20 + "x" * 40 + "...x" * 5 + "x" * 40 + "." * 40)
    )

    assert 99 == found.length
    assert pytest.approx(85 / 100) == found.share


def test_permanent_failures_neither_make_nor_hide_an_outage() -> None:
    """Permanent failures neither make nor hide an outage."""
    assert () == find_outages(log_from_pattern("p" * 400))
    (found,) = find_outages(log_from_pattern("." * 20 + "xppp" * 40 + "." * 20))
    assert (20, 1.0) == (found.start, found.share)


def test_throttled_attempts_count_as_failures() -> None:
    """A dependency that throttles all clients has an outage."""
    assert 1 == len(find_outages(log_from_pattern("." * 20 + "t" * 40)))


def test_an_outage_at_the_end_of_the_log() -> None:
    """An outage may last until the end of the log."""
    (found,) = find_outages(log_from_pattern("." * 20 + "x" * 55, duration=30.0))

    assert (20, 74, 30.0) == (found.start, found.end, found.median_failure_duration)


@pytest.mark.parametrize("letters", ["", "x", "." * 19, "x" * 29])
def test_too_few_attempts_are_no_outage(letters: str) -> None:
    """Fewer attempts than two blocks are no outage."""
    assert () == find_outages(log_from_pattern(letters))
