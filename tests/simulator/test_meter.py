"""Counting: totals, series, quantiles, recovery and the peak."""

from __future__ import annotations

from math import inf, isclose
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.verdict import Reason
from tarry.simulator.distributions import Fixed
from tarry.simulator.meter import Meter, quantile
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.summary import METRICS, Summary

HUNDRED = Server(latency=Fixed(0.01), concurrency=1)
"""It can answer a hundred requests a second."""


def scenario(
    *, trouble: float | None = None, duration: float = 10.0, bucket: float = 1.0, **server: Any
) -> Scenario:
    """Return a scenario whose trouble ends then."""
    failures = () if trouble is None else (Failure(end=trouble),)
    servers = {"server": Server(failures=failures, **server)}
    return Scenario(servers=servers, duration=duration, bucket=bucket)


def summary_of(meter: Meter, of: Scenario | None = None, crashes: int = 0) -> Summary:
    """Sum up."""
    return meter.summary(scenario() if of is None else of, crashes)


# --- totals and series ---------------------------------------------------------------------------


def test_nothing_comes_to_nothing() -> None:
    """A run without calls has no shares to divide by, and nothing to recover from."""
    summary = summary_of(Meter(10.0, 1.0))

    assert {0.0, 1.0} == set(summary.metrics().values())
    assert ("recovered",) == tuple(name for name, value in summary.metrics().items() if value)
    assert {} == summary.reasons


def test_each_event_is_counted_in_its_bucket() -> None:
    """Buckets begin with their moment and end before the next."""
    meter = Meter(3.0, 1.0)
    meter.began(0.0)
    meter.began(0.999)
    meter.began(1.0)
    meter.request(1.5)
    meter.succeeded(2.0, 2.0)
    meter.failed(2.999, Reason.ATTEMPTS)
    meter.in_progress(1, 7)

    expected = {
        "calls": [2.0, 1.0, 0.0],
        "requests": [0.0, 1.0, 0.0],
        "succeeded": [0.0, 0.0, 1.0],
        "failed": [0.0, 0.0, 1.0],
        "in_progress": [0.0, 7.0, 0.0],
    }
    assert expected == summary_of(meter).series


@pytest.mark.parametrize(
    ("duration", "bucket", "expected"),
    [
        (10.0, 1.0, 10),
        (10.0, 3.0, 4),
        (0.3, 0.1, 3),
        (0.7, 0.1, 7),
        (1.0, 5.0, 1),
        (60.0, 0.1, 600),
    ],
)
def test_the_run_is_cut_into_buckets(duration: float, bucket: float, expected: int) -> None:
    """There are as many as begin before the end, and rounding makes none more."""
    meter = Meter(duration, bucket)
    summary = summary_of(meter)

    assert expected == meter.buckets
    assert {expected} == {len(values) for values in summary.series.values()}
    assert bucket == summary.bucket


def test_what_rounding_puts_beyond_the_end_belongs_to_the_last_bucket() -> None:
    """No event is lost from the series because a sum of floats falls on the end."""
    meter = Meter(3.0 + 1e-10, 1.0)
    meter.began(3.0 + 5e-11)

    summary = summary_of(meter)

    assert (1, [0.0, 0.0, 1.0]) == (summary.calls, summary.series["calls"])


def test_the_numbers_of_a_run() -> None:
    """Every total and share follows from what was counted."""
    meter = Meter(10.0, 1.0)
    for now in (0.0, 1.0, 2.0, 3.0):
        meter.began(now)
    for _ in range(6):
        meter.request(4.0)
        meter.attempts += 1
    meter.failure(4.0)
    meter.failure(4.5)
    meter.succeeded(5.0, 2.0)
    meter.succeeded(5.0, 1.0)
    meter.failed(6.0, Reason.LIMIT)

    summary = summary_of(meter, crashes=3)

    expected = {
        "calls": 4,
        "succeeded": 2,
        "failed": 1,
        "unfinished": 1,
        "attempts": 6,
        "requests": 6,
        "failures": 2,
        "crashes": 3,
        "success_rate": 0.5,
        "amplification": 1.5,
        "peak_load": 0.0,
        "recovered": 1.0,
        "recovered_after": 7.0,
        "p50": 2.0,
        "p99": 2.0,
        "p999": 2.0,
    }
    assert expected == summary.metrics()
    assert METRICS == tuple(summary.metrics())


def test_reasons_are_counted_and_sorted() -> None:
    """A summary says how often a call failed for which reason."""
    meter = Meter(10.0, 1.0)
    for reason in (Reason.LIMIT, Reason.ATTEMPTS, Reason.LIMIT):
        meter.failed(1.0, reason)

    assert [("attempts", 1), ("limit", 2)] == list(summary_of(meter).reasons.items())


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["began", "request", "succeeded", "failed"]), st.floats(0, 9.99)),
        max_size=60,
    ),
    bucket=st.sampled_from([0.1, 0.3, 1.0, 2.5, 7.0, 20.0]),
)
def test_series_sum_to_totals(events: list[tuple[str, float]], bucket: float) -> None:
    """What is counted in all is what is counted bucket by bucket."""
    meter = Meter(10.0, bucket)
    more: dict[str, tuple[Any, ...]] = {"succeeded": (1.0,), "failed": (Reason.ATTEMPTS,)}
    for name, now in events:
        getattr(meter, name)(now, *more.get(name, ()))
    summary = summary_of(meter, scenario(bucket=bucket))

    totals = {name: float(getattr(summary, name)) for name in summary.series if name in METRICS}
    assert totals == {name: sum(summary.series[name]) for name in totals}
    assert {"calls", "requests", "succeeded", "failed"} == totals.keys()
    assert summary.calls == summary.succeeded + summary.failed + summary.unfinished
    assert summary.failed == sum(summary.reasons.values())


# --- quantiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([], 0.5, 0.0),
        ([3.0], 0.0, 3.0),
        ([3.0], 0.999, 3.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 1.0, 4.0),
        ([float(number) for number in range(1000)], 0.99, 990.0),
        ([float(number) for number in range(1000)], 0.999, 999.0),
    ],
)
def test_a_quantile_is_one_of_the_values(values: list[float], q: float, expected: float) -> None:
    """It stands at its share of the way through them."""
    assert expected == quantile(values, q)


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.floats(0, 1))
def test_so_many_do_not_exceed_a_quantile(values: list[float], q: float) -> None:
    """At least the share q of the values is at most the quantile, and fewer lie strictly below."""
    value = quantile(values, q)

    assert value in values
    assert sum(other <= value for other in values) >= q * len(values) - 1e-9
    assert sum(other < value for other in values) <= q * len(values) + 1e-9


# --- recovery ------------------------------------------------------------------------------------


def measured(bad: set[int], buckets: int = 10, calls: int = 100) -> Meter:
    """Return a meter of a run in which a tenth of the calls failed in the bad buckets."""
    meter = Meter(float(buckets), 1.0)
    for index in range(buckets):
        failed = calls // 10 if index in bad else 0
        for number in range(calls):
            if number < failed:
                meter.failed(index + 0.5, Reason.ATTEMPTS)
            else:
                meter.succeeded(index + 0.5, 0.1)
    return meter


@pytest.mark.parametrize(
    ("bad", "trouble", "expected"),
    [
        pytest.param(set(), None, 0.0, id="all is well"),
        pytest.param(set(), 3.0, 0.0, id="trouble that nobody feels"),
        pytest.param({0, 1, 2}, 3.0, 0.0, id="over with the trouble"),
        pytest.param({0, 1}, 3.0, 0.0, id="over before the trouble is"),
        pytest.param({0, 1, 2, 3, 4}, 3.0, 2.0, id="two seconds later"),
        pytest.param({0, 6}, 3.0, 4.0, id="well in between does not count"),
        pytest.param({0}, None, 1.0, id="a bad start"),
        pytest.param({8}, 3.0, 6.0, id="bad until shortly before the end"),
        pytest.param({9}, 3.0, inf, id="bad at the end"),
        pytest.param({0, 1, 2, 9}, 3.0, inf, id="bad again at the end"),
        pytest.param(set(range(10)), 3.0, inf, id="never"),
        pytest.param({0, 1, 2, 3, 4, 5}, 20.0, 0.0, id="trouble that outlasts the run"),
    ],
)
def test_recovery_is_the_end_of_the_last_bad_bucket(
    bad: set[int], trouble: float | None, expected: float
) -> None:
    """It counts from the end of the trouble, and bad at the end means never."""
    summary = summary_of(measured(bad), scenario(trouble=trouble))

    assert (expected, float(expected < inf)) == (summary.recovered_after, summary.recovered)


def test_trouble_is_that_of_surges_too() -> None:
    """A surge is over when it ends."""
    surge = Surge(start=1.0, end=4.0, rate=1.0)
    of = Scenario(servers={"server": Server()}, duration=10.0, clients=Clients(surges=(surge,)))

    assert 2.0 == summary_of(measured({2, 5}), of).recovered_after


@pytest.mark.parametrize(
    ("failed", "rate", "expected"),
    [(5, 0.0, 0.0), (6, 0.0, 6.0), (25, 0.2, 0.0), (26, 0.2, 6.0)],
)
def test_a_few_failures_are_tolerated(failed: int, rate: float, expected: float) -> None:
    """Five in a hundred are no trouble, on top of those that the scenario itself asks for."""
    meter = Meter(10.0, 1.0)
    for number in range(100):
        if number < failed:
            meter.failed(5.5, Reason.ATTEMPTS)
        else:
            meter.succeeded(5.5, 0.1)

    assert expected == summary_of(meter, scenario(failure_rate=rate)).recovered_after


def test_failed_attempts_are_trouble_too() -> None:
    """A dependency that is saved by retries alone has not recovered."""
    meter = measured(set())
    for _ in range(6):
        meter.failure(5.5)

    assert 6.0 == summary_of(meter).recovered_after


def test_the_worst_server_of_the_path_says_what_is_tolerated() -> None:
    """Failures that any server on the way is made to have are no trouble."""
    servers = {
        "server": Server(calls="leaf", failure_rate=0.08),
        "leaf": Server(),
        "aside": Server(failure_rate=0.9),
    }
    of = Scenario(servers=servers, duration=10.0)

    assert 0.0 == summary_of(measured({5}), of).recovered_after
    servers["server"] = Server(calls="leaf")
    assert (
        6.0 == summary_of(measured({5}), Scenario(servers=servers, duration=10.0)).recovered_after
    )


# --- the peak ------------------------------------------------------------------------------------


def requests(*counts: int, bucket: float = 1.0) -> Meter:
    """Return a meter of a run with so many requests in each bucket."""
    meter = Meter(len(counts) * bucket, bucket)
    for index, count in enumerate(counts):
        for _ in range(count):
            meter.request((index + 0.5) * bucket)
    return meter


def peak(meter: Meter, *failures: Failure, server: Server = HUNDRED) -> float:
    """Return the peak of that run over what the server can answer."""
    hurt = Server(
        latency=server.latency,
        concurrency=server.concurrency,
        slowdown=server.slowdown,
        failures=failures,
    )
    duration = meter.buckets * meter._bucket
    of = Scenario(servers={"server": hurt}, duration=duration, bucket=meter._bucket)
    return meter.summary(of, 0).peak_load


def test_the_peak_is_the_busiest_bucket_over_the_capacity() -> None:
    """A load of 1 is all that the last server can do."""
    assert 2.0 == peak(requests(100, 200, 50))


def test_the_peak_counts_from_the_end_of_the_trouble() -> None:
    """What a dead server was asked for is no load; what it meets when it is back is."""
    assert 0.5 == peak(requests(900, 900, 50, 20), Failure(end=2.0))


def test_of_trouble_without_an_end_all_counts() -> None:
    """Where nothing comes after the trouble, the peak is that of the run."""
    assert 9.0 == peak(requests(900, 300), Failure(end=2.0))
    assert 9.0 == peak(requests(900, 300), Failure(end=50.0))


def test_the_peak_is_a_rate() -> None:
    """The width of a bucket changes nothing."""
    wide, narrow = requests(400, 100, bucket=2.0), requests(100, 25, bucket=0.5)

    assert [2.0, 2.0] == [peak(wide), peak(narrow)]


def test_a_server_without_a_bound_has_no_peak() -> None:
    """There is nothing that a load could be compared to."""
    assert 0.0 == peak(requests(900), server=Server())


def test_a_server_that_slows_down_has_a_capacity() -> None:
    """It lies where each request adds as much work as it brings."""
    assert isclose(2.0, peak(requests(200), server=Server(slowdown=0.01)))
