"""Evidence, outages, quantiles and intervals of logs with known properties."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import assume, example, given
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
    hedged_quantile,
    quantile_interval,
    required_samples,
    round_two_digits,
    share_above,
    wilson_interval,
)
from tests.tuning.builders import EPOCH, LogModel

OK, BAD = Kind.SUCCESS, Kind.TRANSIENT
P995, P999 = 2.5758, 3.0902
"""The 99.5 % and 99.9 % quantiles of the normal distribution."""


def test_empty_log_is_rejected() -> None:
    """A log without attempts is rejected."""
    with pytest.raises(ConfigurationError, match="at least one attempt"):
        analyze_log(AttemptLog())


def test_evidence_matches_the_model() -> None:
    """Quantiles, success rates, retry ratio and failure rate are close to those of the model."""
    model = LogModel(calls=40_000, success_rates=(0.95, 0.8, 0.4), outages=((100, 130), (400, 460)))
    evidence = analyze_log(model.log())
    healthy = analyze_log(LogModel(calls=20_000, success_rates=(0.95, 0.8, 0.4)).log())

    assert model.quantile(P995) == pytest.approx(
        quantile(evidence.success_durations, 0.995), rel=0.05
    )
    assert 0.05 == pytest.approx(quantile(evidence.success_durations, 0.5), rel=0.02)
    assert 0.05 + 0.05 * 0.2 == pytest.approx(evidence.healthy_retry_ratio, rel=0.1)
    assert 40_000 == evidence.calls
    assert 50 == pytest.approx(evidence.rate, rel=0.03)
    for rate, estimate in zip(model.success_rates, healthy.attempt_success_rates, strict=True):
        assert estimate.low < rate < estimate.high
    assert [0.95, 0.8, 0.4] == pytest.approx(
        [estimate.share for estimate in healthy.attempt_success_rates], abs=0.04
    )


def test_outages_do_not_affect_healthy_durations() -> None:
    """Attempts within outages are not counted as healthy."""
    model = LogModel(calls=20_000, success_rates=(0.99, 0.9), outages=((100, 200),))
    evidence = analyze_log(model.log())

    assert 0.01 == pytest.approx(evidence.failure_rate, rel=0.4)
    assert len(evidence.success_durations) + len(evidence.failure_durations) < 16_000


def make_attempt(task: str, number: int, start: float, kind: Kind) -> LoggedAttempt:
    """Return an attempt of one second."""
    return LoggedAttempt(task, number, start, 1.0, kind)


def test_calls_are_the_attempts_of_a_task() -> None:
    """Attempts with the same task id are one call; attempt 1 starts a new call."""
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
    assert [(1, 4, 2), (2, 1, 0), (3, 2, 2)] == [
        rate[:3] for rate in evidence.attempt_success_rates
    ]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (1, 1), (2, 0), (2, 0)], 1),
        ([(0, 5), (1, 1), (3, 5), (4, 9), (4.5, 1), (6, 1)], 4),
    ],
)
def test_max_concurrency_counts_overlapping_attempts(
    spans: list[tuple[float, float]], expected: int
) -> None:
    """Only successes count, and an attempt that starts when another ends does not overlap."""
    attempts = [LoggedAttempt(f"{start}", 1, start, duration, OK) for start, duration in spans]
    failed = [LoggedAttempt(f"bad {number}", 1, 4.0, 1.0, BAD) for number in range(5)]

    assert expected == analyze_log(AttemptLog([*attempts, *failed])).max_concurrency


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
    """For all logs, calls and retries are at most the attempts, and rates lie within 0 and 1."""
    log = AttemptLog(
        make_attempt(str(task), number, float(start), OK if succeeds else BAD)
        for start, (task, number, succeeds) in enumerate(rows)
    )
    if not rows:
        return
    evidence = analyze_log(log)

    assert evidence.calls == sum(number == 1 for _, number, _ in rows)
    assert evidence.calls + evidence.retries <= evidence.attempts == len(rows)
    assert len(rows) == sum(rate.attempts for rate in evidence.attempt_success_rates)
    assert all(0 <= r.low <= r.share <= r.high <= 1 for r in evidence.attempt_success_rates)


def test_earlier_hedge_saves_more() -> None:
    """An earlier copy adds more load and saves more of the tail."""
    hedges = analyze_log(LogModel(calls=10_000, sigma=1.0).log()).hedges

    assert list(HEDGE_PERCENTILES) == [hedge.percentile for hedge in hedges]
    assert [0.5, 0.25, 0.1, 0.05, 0.01] == pytest.approx([hedge.load for hedge in hedges], abs=1e-3)
    savings = [hedge.saving for hedge in hedges]
    assert sorted(savings, reverse=True) == savings
    assert savings[0] > 0.5


def test_hedge_of_a_fixed_latency_saves_nothing() -> None:
    """A hedge saves nothing if all latencies are equal, also if they are 0."""
    assert (1.0, 1.0, 0.0, 0.0) == estimate_hedge([1.0] * 10, "p95")[1:]
    assert (0.0, 0.0, 0.0, 0.0) == estimate_hedge([0.0] * 10, "p95")[1:]


def log_from_pattern(letters: str, *, duration: float = 0.1) -> AttemptLog:
    """Return a log of one attempt per second: "." succeeds, the other letters are failures."""
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
        success_rates=(0.98,) * 4,
        outages=((50, 80), (200, 210), (300, 360)),
    )
    found = find_outages(model.log())

    assert 3 == len(found)
    for (start, end), outage in zip(model.outages, found, strict=True):
        tolerance = 2 * BLOCK_ATTEMPTS / rate
        assert (start, end) == pytest.approx(
            (outage.start - EPOCH, outage.end - EPOCH), abs=tolerance
        )
        assert outage.share > 0.8


@pytest.mark.parametrize("success_rate", [0.99, 0.9, 0.8])
def test_random_failures_are_no_outage(success_rate: float) -> None:
    """If up to a fifth of 30,000 attempts fails at random, no outage is found."""
    assert () == find_outages(LogModel(calls=30_000, success_rates=(success_rate,)).log())


def test_one_bad_block_is_no_outage_and_two_are() -> None:
    """Twenty failures in a row are no outage, and forty are one."""
    healthy, failing = "." * BLOCK_ATTEMPTS, "x" * BLOCK_ATTEMPTS

    assert () == find_outages(log_from_pattern(healthy + failing + healthy))
    (found,) = find_outages(log_from_pattern(healthy + failing + failing + healthy))
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
    assert () == find_outages(log_from_pattern("p" * 400))
    (found,) = find_outages(log_from_pattern("." * 20 + "xppp" * 40 + "." * 20))
    assert (20, 1.0) == (found.start, found.share)


def test_throttled_attempts_neither_make_nor_hide_an_outage() -> None:
    """A dependency that limits the rate of its clients works."""
    assert () == find_outages(log_from_pattern("." * 20 + "t" * 400))
    (found,) = find_outages(log_from_pattern("." * 20 + "xttt" * 40 + "." * 20))
    assert (20, 1.0) == (found.start, found.share)


def test_tasks_that_always_fail_are_no_outage() -> None:
    """A tenth of the tasks fails in each of four attempts: 27 % of all attempts, but no outage."""

    def attempts() -> Iterator[LoggedAttempt]:
        source = Random(3)
        for call in range(20_000):
            always_fails = source.random() < 0.1
            for number in range(1, 5):
                kind = BAD if always_fails or source.random() < 0.03 else OK
                yield LoggedAttempt(str(call), number, call / 20 + number * 0.3, 0.05, kind)
                if kind is OK:
                    break

    assert () == find_outages(AttemptLog(attempts()))


def test_outage_may_last_until_the_end_of_the_log() -> None:
    """An outage without a recovery ends with the last attempt of the log."""
    (found,) = find_outages(log_from_pattern("." * 20 + "x" * 55, duration=30.0))

    assert (20, 74, 30.0) == (found.start, found.end, found.median_failure_duration)


@pytest.mark.parametrize("letters", ["", "x", "." * 19, "x" * 29])
def test_too_few_attempts_are_no_outage(letters: str) -> None:
    """Fewer attempts than two blocks are no outage."""
    assert () == find_outages(log_from_pattern(letters))


samples = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0])


@pytest.mark.parametrize(("q", "size"), [(0.5, 10), (0.99, 500), (0.995, 1000), (0.999, 5000)])
def test_five_samples_lie_at_a_quantile_or_beyond(q: float, size: int) -> None:
    """The required number of samples leaves five at the quantile or beyond it."""
    sample = [float(number) for number in range(size)]

    assert size == required_samples(q)
    assert 5 == sum(value >= quantile(sample, q) for value in sample)


@pytest.mark.parametrize("q", [0.5, 0.95, 0.995])
def test_95_percent_interval_contains_the_true_quantile(q: float) -> None:
    """Of 300 intervals about 285 contain the true quantile."""
    random_source = Random(7)
    hits = 0
    for _ in range(300):
        low, high = quantile_interval(sorted(random_source.random() for _ in range(1000)), q)
        hits += low <= q <= high

    assert 279 <= hits <= 300


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (2, 1000, 0.0005, 0.0073),
    ],
)
def test_wilson_interval_has_published_values(
    successes: int, trials: int, low: float, high: float
) -> None:
    """The interval has the published values, also for shares of 0 and 1."""
    assert (low, high) == pytest.approx(wilson_interval(successes, trials), abs=1e-4)


def test_wilson_interval_without_trials() -> None:
    """Without trials the interval is 0 to 1."""
    assert (0.0, 1.0) == wilson_interval(0, 0)


def hedged_durations(sample: list[float], delay: float) -> list[float]:
    """Return the sorted durations of hedged calls, one for each pair of durations of two copies."""
    return sorted(min(first, delay + second) for first in sample for second in sample)


@given(samples, shares.filter(lambda q: 0 < q < 1), st.floats(0, 100))
@example([1.0, 1.0, 5.0], 0.9, 1.0)
def test_hedged_quantile_equals_that_of_all_pairs(
    sample: list[float], q: float, delay: float
) -> None:
    """The closed form gives the quantile over all pairs of copies."""
    assume(delay == 0 or delay > 1e-6)  # a smaller delay is lost in the rounding of t + delay

    assert quantile(hedged_durations(sample, delay), q) == pytest.approx(
        hedged_quantile(sample, q, delay), abs=1e-9
    )


def test_hedged_quantile_equals_that_of_random_pairs() -> None:
    """200,000 random pairs of copies have the computed p99 and load."""
    random_source = Random(7)
    sample = sorted(random_source.lognormvariate(-3, 1) for _ in range(5_000))
    delay = quantile(sample, 0.95)
    durations: list[float] = []
    second_copies = 0
    for _ in range(200_000):
        first, second = random_source.choice(sample), random_source.choice(sample)
        second_copies += first > delay
        durations.append(min(first, delay + second))

    assert quantile(sorted(durations), 0.99) == pytest.approx(
        hedged_quantile(sample, 0.99, delay), rel=0.02
    )
    assert second_copies / 200_000 == pytest.approx(share_above(sample, delay), rel=0.05)


@given(samples, shares, st.floats(0, 100))
def test_hedged_quantile_is_never_longer(sample: list[float], q: float, delay: float) -> None:
    """A quantile of a hedged call is at most that of a single copy."""
    assert hedged_quantile(sample, q, delay) <= quantile(sample, q)


@pytest.mark.parametrize(
    ("value", "nearest", "up"),
    [
        (0.0, 0.0, 0.0),
        (0.1234, 0.12, 0.13),
        (0.12, 0.12, 0.12),
        (0.0999, 0.1, 0.1),
        (9.96, 10.0, 10.0),
        (1234.0, 1200.0, 1300.0),
        (0.00035, 0.00035, 0.00035),
    ],
)
def test_round_two_digits(value: float, nearest: float, up: float) -> None:
    """A value is rounded to two significant digits, to the nearest or up."""
    assert (nearest, up) == (round_two_digits(value), round_two_digits(value, up=True))


@given(st.floats(1e-6, 1e6))
def test_value_is_rounded_up_by_at_most_a_tenth(value: float) -> None:
    assert value * (1 - 1e-9) <= round_two_digits(value, up=True) <= value * 1.1 + 1e-12
