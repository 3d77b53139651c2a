"""Counting: totals, series, quantiles, recovery and the peak."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isclose, isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.verdict import Reason
from tarry.simulator.distributions import Fixed
from tarry.simulator.metrics import METRICS, MetricsRecorder, Summary, quantile
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge

HUNDRED = Server(latency=Fixed(0.01), concurrency=1)
"""It can answer a hundred requests a second."""


def scenario(
    *, trouble: float | None = None, duration: float = 10.0, bucket: float = 1.0, **server: Any
) -> Scenario:
    """Return a scenario whose trouble ends then."""
    failures = () if trouble is None else (Failure(end=trouble),)
    servers = {"server": Server(failures=failures, **server)}
    return Scenario(servers=servers, duration=duration, bucket=bucket)


def summary_of(recorder: MetricsRecorder, of: Scenario | None = None, crashes: int = 0) -> Summary:
    """Sum up."""
    return recorder.summarize(scenario() if of is None else of, crashes)


# --- totals and series ---------------------------------------------------------------------------


def test_nothing_comes_to_nothing() -> None:
    """A run without calls has counts of 0; what would be a share or a time is not known."""
    summary = summary_of(MetricsRecorder(10.0, 1.0))

    unknown = {name for name, value in summary.metrics().items() if isnan(value)}
    shares = {"success_rate", "attempts_per_call", "amplification", "peak_load"}
    assert shares | {"recovered", "recovered_after", "p50", "p99", "p999"} == unknown
    assert {0.0} == {summary.metrics()[name] for name in METRICS if name not in unknown}
    assert {} == summary.reasons


def test_each_event_is_counted_in_its_bucket() -> None:
    """Buckets begin with their moment and end before the next."""
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
    assert expected == summary_of(recorder).series


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
def test_the_run_is_cut_into_buckets(duration: float, bucket: float, expected: int) -> None:
    """There are as many as begin before the end, and rounding makes none more."""
    recorder = MetricsRecorder(duration, bucket)
    summary = summary_of(recorder)

    assert expected == recorder.bucket_count
    assert {expected} == {len(values) for values in summary.series.values()}
    assert bucket == summary.bucket


def test_what_rounding_puts_beyond_the_end_belongs_to_the_last_bucket() -> None:
    """No event is lost from the series because a sum of floats falls on the end."""
    recorder = MetricsRecorder(3.0 + 1e-10, 1.0)
    recorder.record_call(3.0 + 5e-11)

    summary = summary_of(recorder)

    assert (1, [0.0, 0.0, 1.0]) == (summary.calls, summary.series["calls"])


def test_the_numbers_of_a_run() -> None:
    """Every total and share follows from what was counted."""
    recorder = MetricsRecorder(10.0, 1.0)
    for now in (0.0, 1.0, 2.0, 3.0):
        recorder.record_call(now)
    for _ in range(5):
        recorder.record_request(4.0)
    recorder.attempts += 6
    for _ in range(9):
        recorder.record_failed_attempt(4.5)
    recorder.record_success(9.5, 2.0)
    recorder.record_success(9.5, 1.0)
    recorder.record_failed_call(6.0, Reason.LIMIT, 0)

    of = scenario(trouble=1.0, latency=Fixed(0.01), concurrency=1)
    summary = summary_of(recorder, of, crashes=3)

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
    """A summary says how often a call failed for which reason."""
    recorder = MetricsRecorder(10.0, 1.0)
    for reason in (Reason.LIMIT, Reason.ATTEMPTS, Reason.LIMIT):
        recorder.record_failed_call(1.0, reason, 1)

    assert [("attempts", 1), ("limit", 2)] == list(summary_of(recorder).reasons.items())


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
    """What is counted in all is what is counted bucket by bucket."""
    recorder = MetricsRecorder(10.0, bucket)
    more: dict[str, tuple[Any, ...]] = {
        "record_success": (1.0,),
        "record_failed_call": (Reason.ATTEMPTS, 1),
    }
    for name, now in events:
        getattr(recorder, name)(now, *more.get(name, ()))
    summary = summary_of(recorder, scenario(bucket=bucket))

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
    """It stands at its share of the way through them."""
    assert expected == quantile(values, q)


def test_of_nothing_there_is_no_quantile() -> None:
    """Where no call ended well, nobody knows how long one takes."""
    assert isnan(quantile([], 0.5))


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.floats(0, 1))
def test_so_many_do_not_exceed_a_quantile(values: list[float], q: float) -> None:
    """At least the share q of the values is at most the quantile, and fewer lie strictly below."""
    value = quantile(values, q)

    assert value in values
    assert sum(other <= value for other in values) >= q * len(values) - 1e-9
    assert sum(other < value for other in values) <= q * len(values) + 1e-9


# --- recovery ------------------------------------------------------------------------------------


def measured(bad: Iterable[int], failures: int = 50, calls: int = 100) -> MetricsRecorder:
    """Return a meter of ten seconds in which attempts failed in the bad ones."""
    recorder = MetricsRecorder(10.0, 1.0)
    for index in range(10):
        for _ in range(calls):
            recorder.record_call(index + 0.25)
            recorder.record_success(index + 0.5, 0.25)
        for _ in range(failures if index in bad else 0):
            recorder.record_failed_attempt(index + 0.5)
    return recorder


@pytest.mark.parametrize(
    ("bad", "trouble", "expected"),
    [
        pytest.param([], None, nan, id="no trouble"),
        pytest.param([4], None, nan, id="no trouble that the scenario asks for"),
        pytest.param([], 3.0, 0.0, id="trouble that nobody feels"),
        pytest.param([0, 1, 2], 3.0, 0.0, id="over with the trouble"),
        pytest.param([0, 1], 3.0, 0.0, id="over before the trouble is"),
        pytest.param([0, 1, 2, 3, 4], 3.0, 2.0, id="two seconds later"),
        pytest.param([0, 6], 3.0, 4.0, id="well in between does not count"),
        pytest.param([8], 3.0, 6.0, id="bad until shortly before the end"),
        pytest.param([9], 3.0, inf, id="bad at the end"),
        pytest.param([0, 1, 2, 9], 3.0, inf, id="bad again at the end"),
        pytest.param(range(10), 3.0, inf, id="never"),
        pytest.param([], 9.0, 0.0, id="trouble until shortly before the end"),
        pytest.param([], 9.5, inf, id="trouble until the end"),
        pytest.param([0, 1], 20.0, inf, id="trouble that outlasts the run"),
    ],
)
def test_recovery_is_the_end_of_the_last_bad_bucket(
    bad: Iterable[int], trouble: float | None, expected: float
) -> None:
    """It counts from the end of the trouble, and bad at the end means never."""
    summary = summary_of(measured(bad), scenario(trouble=trouble))

    recovered = nan if isnan(expected) else float(expected < inf)
    assert pytest.approx(expected, nan_ok=True) == summary.recovered_after
    assert pytest.approx(recovered, nan_ok=True) == summary.recovered


def test_trouble_is_that_of_surges_too() -> None:
    """A surge is over when it ends."""
    surge = Surge(start=1.0, end=4.0, rate=1.0)
    of = Scenario(servers={"server": Server()}, duration=10.0, clients=Clients(surges=(surge,)))

    assert 2.0 == summary_of(measured([2, 5]), of).recovered_after


@pytest.mark.parametrize(
    ("failures", "rate", "expected"),
    [
        pytest.param(15, 0.0, 0.0, id="5 % of 115, and 4 standard deviations of that"),
        pytest.param(16, 0.0, 5.0, id="more than chance"),
        pytest.param(62, 0.2, 0.0, id="25 % of 162, and 4 standard deviations of that"),
        pytest.param(63, 0.2, 5.0, id="more than the scenario and chance"),
    ],
)
def test_a_few_failures_are_tolerated(failures: int, rate: float, expected: float) -> None:
    """Five in a hundred are no trouble, nor what may be chance, nor what the scenario asks for."""
    of = scenario(trouble=1.0, failure_rate=rate)

    assert expected == summary_of(measured([5], failures), of).recovered_after


def test_calls_that_were_not_let_through_are_trouble() -> None:
    """A breaker that stands open is no recovery."""
    recorder = measured([])
    for _ in range(100):
        recorder.record_call(5.5)
        recorder.record_failed_call(5.5, Reason.BREAKER_OPEN, 0)

    assert 5.0 == summary_of(recorder, scenario(trouble=1.0)).recovered_after


def test_a_call_that_failed_is_not_trouble_on_top_of_its_attempts() -> None:
    """What its attempts came to is counted already."""
    recorder = measured([])
    for _ in range(100):
        recorder.record_call(5.5)
        recorder.record_failed_call(5.5, Reason.ATTEMPTS, 1)

    assert 0.0 == summary_of(recorder, scenario(trouble=1.0)).recovered_after


def test_failures_of_all_servers_on_the_path_are_usual() -> None:
    """What the servers on the way are made to fail adds up; those aside do not count."""
    trouble = (Failure(start=0.0, end=1.0),)

    def recovered_after(above: float, leaf: float) -> float:
        servers = {
            "server": Server(calls="leaf", failure_rate=above, failures=trouble),
            "leaf": Server(failure_rate=leaf),
            "aside": Server(failure_rate=0.9),
        }
        of = Scenario(servers=servers, duration=10.0)
        return summary_of(measured([5], failures=55), of).recovered_after

    assert [5.0, 5.0, 0.0] == [
        recovered_after(0.0, 0.0),
        recovered_after(0.1, 0.0),
        recovered_after(0.1, 0.1),
    ]


@pytest.mark.parametrize(("failures", "expected"), [(84, 0.0), (85, 5.0)])
def test_three_layers_fail_as_often_as_one_of_them_does(failures: int, expected: float) -> None:
    """Three times 10 % are 1 - 0.9 ** 3, neither 10 % nor 30 %."""
    servers = {
        "server": Server(calls="b", failure_rate=0.1, failures=(Failure(end=1.0),)),
        "b": Server(calls="c", failure_rate=0.1),
        "c": Server(failure_rate=0.1),
    }
    of = Scenario(servers=servers, duration=10.0)

    # What is tolerated lies 5 % and 4 standard deviations above 27.1 %.
    assert expected == summary_of(measured([5], failures), of).recovered_after


@pytest.mark.parametrize(("failures", "expected"), [(1, 0.0), (2, 5.0)])
def test_a_small_bucket_may_have_bad_luck(failures: int, expected: float) -> None:
    """One failure beside two successes may be chance, two are not."""
    of = scenario(trouble=1.0)

    assert expected == summary_of(measured([5], failures, calls=2), of).recovered_after


@pytest.mark.parametrize(("more", "expected"), [(10, 0.0), (11, inf)])
def test_calls_that_pile_up_are_trouble(more: int, expected: float) -> None:
    """Who neither fails nor answers has not recovered; a few may wait."""
    recorder = measured([])
    for _ in range(more):
        recorder.record_call(4.5)
    trouble = (Failure(start=3.0, end=4.0),)
    of = Scenario(servers={"server": Server(failures=trouble)}, duration=10.0)

    assert expected == summary_of(recorder, of).recovered_after


@pytest.mark.parametrize(("late", "expected"), [(20, 6.0), (21, 7.0)])
def test_trouble_from_the_start_is_held_against_the_end(late: int, expected: float) -> None:
    """Where there was no time before it, what waits at the end is what usually does."""
    recorder = measured([])
    for _ in range(10 + late):
        recorder.record_call(0.0)
    for _ in range(late):
        recorder.record_success(8.5, 8.0)
    for _ in range(20):
        recorder.record_call(0.0)
        recorder.record_success(7.5, 7.0)

    assert expected == summary_of(recorder, scenario(trouble=1.0)).recovered_after


def test_where_calls_wait_and_none_ends_well_nothing_has_recovered() -> None:
    """A system that hangs has no failures either."""
    recorder = MetricsRecorder(10.0, 1.0)
    recorder.record_call(0.5)

    assert inf == summary_of(recorder, scenario(trouble=1.0)).recovered_after
    recorder.record_success(8.5, 8.0)
    assert 0.0 == summary_of(recorder, scenario(trouble=1.0)).recovered_after


@pytest.mark.parametrize(("more", "expected"), [(90, 0.0), (91, 2.0)])
def test_as_many_may_wait_as_did_before(more: int, expected: float) -> None:
    """Twice what waited before the trouble, and a few, is as usual; all have come back later."""
    recorder = measured([])
    for _ in range(40):
        recorder.record_call(0.0)
    for _ in range(more - 40):
        recorder.record_call(4.5)
    for _ in range(more - 40):
        recorder.record_success(6.5, 2.0)
    trouble = (Failure(start=3.0, end=4.0),)
    of = Scenario(servers={"server": Server(failures=trouble)}, duration=10.0)

    assert expected == summary_of(recorder, of).recovered_after


# --- the peak ------------------------------------------------------------------------------------


def requests(*counts: int, bucket: float = 1.0) -> MetricsRecorder:
    """Return a meter of a run with so many requests in each bucket."""
    recorder = MetricsRecorder(len(counts) * bucket, bucket)
    for index, count in enumerate(counts):
        for _ in range(count):
            recorder.record_request((index + 0.5) * bucket)
    return recorder


def peak(recorder: MetricsRecorder, *failures: Failure, server: Server = HUNDRED) -> float:
    """Return the peak of that run over what the server can answer."""
    hurt = Server(
        latency=server.latency,
        concurrency=server.concurrency,
        slowdown=server.slowdown,
        failures=failures,
    )
    duration = recorder.bucket_count * recorder._bucket
    of = Scenario(servers={"server": hurt}, duration=duration, bucket=recorder._bucket)
    return recorder.summarize(of, 0).peak_load


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
    assert isnan(peak(requests(900), server=Server()))


def test_a_server_that_slows_down_has_a_capacity() -> None:
    """It lies where each request adds as much work as it brings."""
    assert isclose(2.0, peak(requests(200), server=Server(slowdown=0.01)))
