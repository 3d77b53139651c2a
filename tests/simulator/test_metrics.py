"""Metrics: totals, time series, quantiles, recovery and peak load."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isclose, isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.verdict import Reason
from tarry.simulator.distributions import Fixed
from tarry.simulator.metrics import METRICS, MetricsRecorder, quantile
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tests.simulator.harness import summarize

SERVER_100_PER_S = Server(latency=Fixed(0.01), concurrency=1)
"""A server with a capacity of a hundred requests per second."""


def make_scenario(
    *,
    disruption_end: float | None = None,
    duration: float = 10.0,
    bucket: float = 1.0,
    **server: Any,
) -> Scenario:
    """Return a scenario whose disruption ends at this time."""
    failures = () if disruption_end is None else (Failure(end=disruption_end),)
    servers = {"server": Server(failures=failures, **server)}
    return Scenario(servers=servers, duration=duration, bucket=bucket)


# --- totals and series ---------------------------------------------------------------------------


def test_run_without_calls() -> None:
    """A run without calls has counts of 0, and no value for shares and times."""
    summary = summarize(MetricsRecorder(10.0, 1.0))

    unknown = {name for name, value in summary.metrics().items() if isnan(value)}
    shares = {"success_rate", "attempts_per_call", "amplification", "peak_load"}
    assert shares | {"recovered", "recovered_after", "p50", "p99", "p999"} == unknown
    assert {0.0} == {summary.metrics()[name] for name in METRICS if name not in unknown}
    assert {} == summary.reasons


def test_each_event_is_counted_in_its_bucket() -> None:
    """A bucket includes its start and excludes its end."""
    recorder = MetricsRecorder(3.0, 1.0)
    recorder.record_call(0.0)
    recorder.record_call(0.999)
    recorder.record_call(1.0)
    recorder.record_request(1.5)
    recorder.record_success(2.0, 2.0)
    recorder.record_failed_call(2.999, Reason.ATTEMPTS, 1)
    recorder.record_in_progress(1, 7)

    expected = {
        "calls": [2.0, 1.0, 0.0],
        "requests": [0.0, 1.0, 0.0],
        "succeeded": [0.0, 0.0, 1.0],
        "failed": [0.0, 0.0, 1.0],
        "in_progress": [0.0, 7.0, 0.0],
    }
    assert expected == summarize(recorder).series


@pytest.mark.parametrize(
    ("duration", "bucket", "expected"),
    [
        (10.0, 1.0, 10),
        (10.0, 3.0, 4),
        (0.3, 0.1, 3),
        (0.7, 0.1, 7),
        (1.0, 5.0, 1),
        (1e-10, 1.0, 1),
        (60.0, 0.1, 600),
    ],
)
def test_number_of_buckets(duration: float, bucket: float, expected: int) -> None:
    """A run has a bucket for each bucket start before its end; rounding adds none."""
    recorder = MetricsRecorder(duration, bucket)
    summary = summarize(recorder)

    assert expected == recorder.bucket_count
    assert {expected} == {len(values) for values in summary.series.values()}
    assert bucket == summary.bucket


def test_event_at_the_end_is_in_the_last_bucket() -> None:
    """An event that rounding puts at the end of the run is counted in the last bucket."""
    recorder = MetricsRecorder(3.0 + 1e-10, 1.0)
    recorder.record_call(3.0 + 5e-11)

    summary = summarize(recorder)

    assert (1, [0.0, 0.0, 1.0]) == (summary.calls, summary.series["calls"])


def test_summary_of_a_run() -> None:
    """All totals and shares follow from the recorded events."""
    recorder = MetricsRecorder(10.0, 1.0)
    for now in (0.0, 1.0, 2.0, 3.0):
        recorder.record_call(now)
    for _ in range(5):
        recorder.record_request(4.0)
    recorder.attempt_count += 6
    for _ in range(9):
        recorder.record_failed_attempt(4.5)
    recorder.record_success(9.5, 2.0)
    recorder.record_success(9.5, 1.0)
    recorder.record_failed_call(6.0, Reason.LIMIT, 0)

    scenario = make_scenario(disruption_end=1.0, latency=Fixed(0.01), concurrency=1)
    summary = summarize(recorder, scenario, crashes=3)

    expected = {
        "calls": 4,
        "succeeded": 2,
        "failed": 1,
        "unfinished": 1,
        "attempts": 6,
        "requests": 5,
        "failures": 9,
        "crashes": 3,
        "success_rate": 0.5,
        "attempts_per_call": 1.5,
        "amplification": 1.25,
        "peak_load": 0.05,
        "recovered": 1.0,
        "recovered_after": 6.0,
        "p50": 2.0,
        "p99": 2.0,
        "p999": 2.0,
    }
    assert expected == summary.metrics()
    assert tuple(METRICS) == tuple(summary.metrics())


def test_reasons_are_counted_and_sorted() -> None:
    """A summary has the number of failed calls by reason."""
    recorder = MetricsRecorder(10.0, 1.0)
    for reason in (Reason.LIMIT, Reason.ATTEMPTS, Reason.LIMIT):
        recorder.record_failed_call(1.0, reason, 1)

    assert [("attempts", 1), ("limit", 2)] == list(summarize(recorder).reasons.items())


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(
                ["record_call", "record_request", "record_success", "record_failed_call"]
            ),
            st.floats(0, 9.99),
        ),
        max_size=60,
    ),
    bucket=st.sampled_from([0.1, 0.3, 1.0, 2.5, 7.0, 20.0]),
)
def test_series_sum_to_totals(events: list[tuple[str, float]], bucket: float) -> None:
    recorder = MetricsRecorder(10.0, bucket)
    arguments: dict[str, tuple[Any, ...]] = {
        "record_success": (1.0,),
        "record_failed_call": (Reason.ATTEMPTS, 1),
    }
    for name, now in events:
        getattr(recorder, name)(now, *arguments.get(name, ()))
    summary = summarize(recorder, make_scenario(bucket=bucket))

    totals = {name: float(getattr(summary, name)) for name in summary.series if name in METRICS}
    assert totals == {name: sum(summary.series[name]) for name in totals}
    assert {"calls", "requests", "succeeded", "failed"} == totals.keys()
    assert summary.calls == summary.succeeded + summary.failed + summary.unfinished
    assert summary.failed == sum(summary.reasons.values())


# --- quantiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
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
    """A quantile is the value at its share of the sorted values."""
    assert expected == quantile(values, q)


def test_quantile_of_no_values_is_nan() -> None:
    """Without successful calls the quantiles have no value."""
    assert isnan(quantile([], 0.5))


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.floats(0, 1))
def test_share_of_values_up_to_a_quantile(values: list[float], q: float) -> None:
    """At least the share q of the values is at most the quantile, and less is below it."""
    value = quantile(values, q)

    assert value in values
    assert sum(other <= value for other in values) >= q * len(values) - 1e-9
    assert sum(other < value for other in values) <= q * len(values) + 1e-9


# --- recovery ------------------------------------------------------------------------------------


def record_bad_buckets(bad: Iterable[int], failures: int = 50, calls: int = 100) -> MetricsRecorder:
    """Return the metrics of ten seconds in which attempts fail in the bad buckets."""
    recorder = MetricsRecorder(10.0, 1.0)
    for index in range(10):
        for _ in range(calls):
            recorder.record_call(index + 0.25)
            recorder.record_success(index + 0.5, 0.25)
        for _ in range(failures if index in bad else 0):
            recorder.record_failed_attempt(index + 0.5)
    return recorder


@pytest.mark.parametrize(
    ("bad", "disruption_end", "expected"),
    [
        pytest.param([], None, nan, id="no disruption"),
        pytest.param([4], None, nan, id="failures without a disruption"),
        pytest.param([], 3.0, 0.0, id="disruption without effect"),
        pytest.param([0, 1, 2], 3.0, 0.0, id="healthy when the disruption ends"),
        pytest.param([0, 1], 3.0, 0.0, id="healthy before the disruption ends"),
        pytest.param([0, 1, 2, 3, 4], 3.0, 2.0, id="bad for two seconds after the disruption"),
        pytest.param([0, 6], 3.0, 4.0, id="healthy buckets in between"),
        pytest.param([8], 3.0, 6.0, id="bad until shortly before the end"),
        pytest.param([9], 3.0, inf, id="bad at the end"),
        pytest.param([0, 1, 2, 9], 3.0, inf, id="bad again at the end"),
        pytest.param(range(10), 3.0, inf, id="always bad"),
        pytest.param([], 9.0, 0.0, id="disruption until shortly before the end"),
        pytest.param([], 9.5, inf, id="disruption until the end"),
        pytest.param([0, 1], 20.0, inf, id="disruption that outlasts the run"),
    ],
)
def test_recovery_is_the_end_of_the_last_bad_bucket(
    bad: Iterable[int], disruption_end: float | None, expected: float
) -> None:
    """Recovery counts from the end of the disruption; a bad last bucket means never."""
    summary = summarize(record_bad_buckets(bad), make_scenario(disruption_end=disruption_end))

    recovered = nan if isnan(expected) else float(expected < inf)
    assert pytest.approx(expected, nan_ok=True) == summary.recovered_after
    assert pytest.approx(recovered, nan_ok=True) == summary.recovered


def test_surge_is_a_disruption() -> None:
    surge = Surge(start=1.0, end=4.0, rate=1.0)
    scenario = Scenario(
        servers={"server": Server()}, duration=10.0, clients=Clients(surges=(surge,))
    )

    assert 2.0 == summarize(record_bad_buckets([2, 5]), scenario).recovered_after


@pytest.mark.parametrize(
    ("failures", "rate", "expected"),
    [
        pytest.param(15, 0.0, 0.0, id="within 5 % of 115 and 4 standard deviations"),
        pytest.param(16, 0.0, 5.0, id="above 5 % of 115 and 4 standard deviations"),
        pytest.param(62, 0.2, 0.0, id="within 25 % of 162 and 4 standard deviations"),
        pytest.param(63, 0.2, 5.0, id="above 25 % of 162 and 4 standard deviations"),
    ],
)
def test_a_few_failures_are_tolerated(failures: int, rate: float, expected: float) -> None:
    """A bucket may exceed the failure rate by 5 % of the attempts and 4 standard deviations."""
    scenario = make_scenario(disruption_end=1.0, failure_rate=rate)

    assert expected == summarize(record_bad_buckets([5], failures), scenario).recovered_after


def test_rejected_calls_are_unhealthy() -> None:
    """Calls that an open breaker rejects delay the recovery."""
    recorder = record_bad_buckets([])
    for _ in range(100):
        recorder.record_call(5.5)
        recorder.record_failed_call(5.5, Reason.BREAKER_OPEN, 0)

    assert 5.0 == summarize(recorder, make_scenario(disruption_end=1.0)).recovered_after


def test_failed_call_is_not_counted_in_addition_to_its_attempts() -> None:
    recorder = record_bad_buckets([])
    for _ in range(100):
        recorder.record_call(5.5)
        recorder.record_failed_call(5.5, Reason.ATTEMPTS, 1)

    assert 0.0 == summarize(recorder, make_scenario(disruption_end=1.0)).recovered_after


def test_failure_rates_of_the_path_are_tolerated() -> None:
    """The failure rates of all servers on the path are tolerated, and no others."""
    failures = (Failure(start=0.0, end=1.0),)

    def recovered_after(above: float, leaf: float) -> float:
        servers = {
            "server": Server(calls="leaf", failure_rate=above, failures=failures),
            "leaf": Server(failure_rate=leaf),
            "aside": Server(failure_rate=0.9),
        }
        scenario = Scenario(servers=servers, duration=10.0)
        return summarize(record_bad_buckets([5], failures=55), scenario).recovered_after

    assert [5.0, 5.0, 0.0] == [
        recovered_after(0.0, 0.0),
        recovered_after(0.1, 0.0),
        recovered_after(0.1, 0.1),
    ]


@pytest.mark.parametrize(("failures", "expected"), [(84, 0.0), (85, 5.0)])
def test_failure_rates_combine_as_independent(failures: int, expected: float) -> None:
    """Three failure rates of 10 % are 1 - 0.9 ** 3 together."""
    servers = {
        "server": Server(calls="b", failure_rate=0.1, failures=(Failure(end=1.0),)),
        "b": Server(calls="c", failure_rate=0.1),
        "c": Server(failure_rate=0.1),
    }
    scenario = Scenario(servers=servers, duration=10.0)

    # 27.1 % plus 5 % plus 4 standard deviations are tolerated.
    assert expected == summarize(record_bad_buckets([5], failures), scenario).recovered_after


@pytest.mark.parametrize(("failures", "expected"), [(1, 0.0), (2, 5.0)])
def test_small_bucket_tolerates_chance(failures: int, expected: float) -> None:
    """With two successes in a bucket, one failure is tolerated, and two are not."""
    scenario = make_scenario(disruption_end=1.0)

    assert (
        expected == summarize(record_bad_buckets([5], failures, calls=2), scenario).recovered_after
    )


@pytest.mark.parametrize(("waiting", "expected"), [(10, 0.0), (11, inf)])
def test_waiting_calls_are_unhealthy(waiting: int, expected: float) -> None:
    """A run in which more than 10 calls wait until its end has not recovered."""
    recorder = record_bad_buckets([])
    for _ in range(waiting):
        recorder.record_call(4.5)
    failures = (Failure(start=3.0, end=4.0),)
    scenario = Scenario(servers={"server": Server(failures=failures)}, duration=10.0)

    assert expected == summarize(recorder, scenario).recovered_after


def test_no_call_waits_at_the_end_of_the_disruption() -> None:
    """A breaker that is open when the disruption ends does not make the usual load unhealthy."""
    recorder = record_bad_buckets([])
    for _ in range(15):  # as many calls as before the disruption, but none when it ends
        recorder.record_call(0.5)
        recorder.record_success(3.5, 3.0)
        recorder.record_call(5.5)
    failures = (Failure(start=3.0, end=4.0),)
    scenario = Scenario(servers={"server": Server(failures=failures)}, duration=10.0)

    assert 0.0 == summarize(recorder, scenario).recovered_after


@pytest.mark.parametrize(("late", "expected"), [(20, 6.0), (21, 7.0)])
def test_disruption_from_the_start_is_compared_with_the_end(late: int, expected: float) -> None:
    """If the disruption starts with the run, the end of the run gives the usual waiting calls."""
    recorder = record_bad_buckets([])
    for _ in range(10 + late):
        recorder.record_call(0.0)
    for _ in range(late):
        recorder.record_success(8.5, 8.0)
    for _ in range(20):
        recorder.record_call(0.0)
        recorder.record_success(7.5, 7.0)

    assert expected == summarize(recorder, make_scenario(disruption_end=1.0)).recovered_after


def test_waiting_calls_without_success_are_not_recovered() -> None:
    """A run whose only call waits until the end has not recovered, although no attempt failed."""
    recorder = MetricsRecorder(10.0, 1.0)
    recorder.record_call(0.5)

    assert inf == summarize(recorder, make_scenario(disruption_end=1.0)).recovered_after
    recorder.record_success(8.5, 8.0)
    assert 0.0 == summarize(recorder, make_scenario(disruption_end=1.0)).recovered_after


@pytest.mark.parametrize(("waiting", "expected"), [(90, 0.0), (91, 2.0)])
def test_usual_number_of_waiting_calls_is_healthy(waiting: int, expected: float) -> None:
    """Up to twice the waiting calls from before the disruption, plus 10, is healthy."""
    recorder = record_bad_buckets([])
    for _ in range(40):
        recorder.record_call(0.0)
    for _ in range(waiting - 40):
        recorder.record_call(4.5)
    for _ in range(waiting - 40):
        recorder.record_success(6.5, 2.0)
    failures = (Failure(start=3.0, end=4.0),)
    scenario = Scenario(servers={"server": Server(failures=failures)}, duration=10.0)

    assert expected == summarize(recorder, scenario).recovered_after


# --- peak load -----------------------------------------------------------------------------------


def record_requests(*counts: int, bucket: float = 1.0) -> MetricsRecorder:
    """Return the metrics of a run with these requests in each bucket."""
    recorder = MetricsRecorder(len(counts) * bucket, bucket)
    for index, count in enumerate(counts):
        for _ in range(count):
            recorder.record_request((index + 0.5) * bucket)
    return recorder


def peak_load(
    recorder: MetricsRecorder, *failures: Failure, server: Server = SERVER_100_PER_S
) -> float:
    """Return the peak load of that run."""
    failing_server = Server(
        latency=server.latency,
        concurrency=server.concurrency,
        slowdown=server.slowdown,
        failures=failures,
    )
    duration = recorder.bucket_count * recorder._bucket_width
    scenario = Scenario(
        servers={"server": failing_server}, duration=duration, bucket=recorder._bucket_width
    )
    return recorder.summarize(scenario, 0).peak_load


def test_the_peak_is_the_busiest_bucket_over_the_capacity() -> None:
    """With 200 requests in the busiest second and a capacity of 100, the peak load is 2."""
    assert 2.0 == peak_load(record_requests(100, 200, 50))


def test_peak_counts_from_the_end_of_the_disruption() -> None:
    """Requests during the disruption do not count."""
    assert 0.5 == peak_load(record_requests(900, 900, 50, 20), Failure(end=2.0))


def test_peak_of_an_endless_disruption_is_that_of_the_run() -> None:
    """If the disruption lasts until the end, the peak is that of the whole run."""
    assert 9.0 == peak_load(record_requests(900, 300), Failure(end=2.0))
    assert 9.0 == peak_load(record_requests(900, 300), Failure(end=50.0))


def test_the_peak_is_a_rate() -> None:
    """The peak does not depend on the width of a bucket."""
    wide, narrow = record_requests(400, 100, bucket=2.0), record_requests(100, 25, bucket=0.5)

    assert [2.0, 2.0] == [peak_load(wide), peak_load(narrow)]


def test_unlimited_server_has_no_peak_load() -> None:
    """Without a capacity there is no peak load."""
    assert isnan(peak_load(record_requests(900), server=Server()))


def test_a_server_that_slows_down_has_a_capacity() -> None:
    """A slowdown limits the capacity to its inverse."""
    assert isclose(2.0, peak_load(record_requests(200), server=Server(slowdown=0.01)))
