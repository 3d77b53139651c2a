"""The kinds of arrivals: at-once, poisson, closed and backlog."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isnan, sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.core.verdict import Reason, Stop
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Empirical, Exponential, Fixed, Uniform
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder, Summary
from tarry.simulator.node import OnCallEnd
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.simulate import ArrivalSource, simulate
from tests.simulator.harness import CallStartRecorder, summarize

RUN_S = 200.0


class TimedCalls:
    """Starts calls that end after a fixed time, and counts how many run at the same time."""

    def __init__(self, loop: EventLoop, seconds: float, *, max_calls: int | None = None) -> None:
        self.loop = loop
        self.seconds = seconds
        self.max_calls = max_calls
        self.running = 0
        self.max_running = 0
        self.started: list[tuple[float, int]] = []
        self.rejections = 0

    def __call__(self, now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        """Start a call, or reject it."""
        if self.max_calls is not None and self.running >= self.max_calls:
            self.rejections += 1
            stop = Stop(Reason.LIMIT)
            on_end(now, now, stop, 0)
            return stop
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        self.started.append((now, client))
        self.loop.schedule(now + self.seconds, lambda later, _: self.end(now, later, on_end))
        return None

    def end(self, started: float, now: float, on_end: OnCallEnd) -> None:
        """End a call with success."""
        self.running -= 1
        on_end(started, now, None, 1)


def start_times(clients: Clients, seed: int = 0, span: float = RUN_S) -> list[tuple[float, int]]:
    """Return the start and the client of each call, if no call ever ends."""
    loop, starts = EventLoop(seed), CallStartRecorder()
    recorder = MetricsRecorder(span, 1.0)
    ArrivalSource(clients, loop, recorder, starts).start()
    loop.run(span)
    assert len(starts.calls) == summarize(recorder).calls
    return [(call.started, call.client) for call in starts.calls]


def count_between(times: list[float], start: float, end: float) -> int:
    """Return how many of the times lie between start and end."""
    return sum(start <= now < end for now in times)


def approx_count(expected: float) -> object:
    """Return an expected count with a tolerance of five standard deviations."""
    return pytest.approx(expected, abs=5 * sqrt(expected))


# --- at once -------------------------------------------------------------------------------------


def test_at_once_starts_one_call_per_client() -> None:
    assert [(0.0, client) for client in range(5)] == start_times(
        Clients(arrivals="at-once", count=5)
    )


@pytest.mark.parametrize("stop", [None, Stop(Reason.ATTEMPTS), Stop(Reason.LIMIT)])
def test_end_of_a_call_is_recorded(stop: Stop | None) -> None:
    """A successful call is recorded with its duration, a failed one with its reason."""
    loop, starts, recorder = EventLoop(0), CallStartRecorder(), MetricsRecorder(10.0, 1.0)
    ArrivalSource(Clients(arrivals="at-once"), loop, recorder, starts).start()
    loop.run(1.0)

    starts.calls[0].on_end(0.0, 2.5, stop, 1)

    summary = summarize(recorder)
    if stop is None:
        assert (1, 2.5, {}) == (summary.series["succeeded"][2], summary.p50, summary.reasons)
    else:
        assert 1 == summary.series["failed"][2]
        assert isnan(summary.p50)
        assert {stop.reason.value: 1} == summary.reasons


# --- poisson -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_poisson_arrivals_have_the_rate(seed: int) -> None:
    """Calls arrive at the rate, and their clients have consecutive numbers."""
    calls = start_times(Clients(rate=50.0), seed)

    assert approx_count(50 * RUN_S) == len(calls)
    assert list(range(len(calls))) == [client for _, client in calls]


def test_poisson_gaps_are_exponential() -> None:
    """The gaps have their mean as standard deviation, the counts per second as variance."""
    times = [now for now, _ in start_times(Clients(rate=50.0))]
    gaps = [after - before for before, after in pairwise(times)]
    counts = Counter(int(now) for now in times)
    counts_per_second = [counts[second] for second in range(int(RUN_S))]

    assert pytest.approx(0.02, rel=0.1) == fmean(gaps)
    assert pytest.approx(0.02, rel=0.1) == sqrt(fmean((gap - 0.02) ** 2 for gap in gaps))
    assert pytest.approx(50, rel=0.5) == fmean((count - 50) ** 2 for count in counts_per_second)


@pytest.mark.parametrize("seed", [0, 1])
def test_surge_changes_the_rate_for_its_period(seed: int) -> None:
    """During a surge calls arrive at its rate, and before and after it at the normal rate."""
    surges = (Surge(start=20.0, end=40.0, rate=200.0), Surge(start=100.0, end=150.0, rate=5.0))
    times = [now for now, _ in start_times(Clients(rate=50.0, surges=surges), seed)]

    for start, end, rate in [
        (0, 20, 50),
        (20, 40, 200),
        (40, 100, 50),
        (100, 150, 5),
        (150, 200, 50),
    ]:
        assert approx_count(rate * (end - start)) == count_between(times, start, end)


def test_surge_with_rate_0_stops_calls() -> None:
    """With a rate of 0 no call starts before the surge ends."""
    surges = (Surge(start=50.0, end=150.0, rate=0.0),)
    times = [now for now, _ in start_times(Clients(rate=50.0, surges=surges))]

    assert 0 == count_between(times, 50, 150)
    assert approx_count(50 * 50) == count_between(times, 150, 200)


def test_surge_at_the_start() -> None:
    """A surge may start at 0, and another one may follow immediately."""
    surges = (Surge(start=0.0, end=50.0, rate=0.0), Surge(start=50.0, end=100.0, rate=100.0))
    times = [now for now, _ in start_times(Clients(rate=10.0, surges=surges))]

    assert 0 == count_between(times, 0, 50)
    assert approx_count(5_000) == count_between(times, 50, 100)
    assert approx_count(1_000) == count_between(times, 100, 200)


def test_poisson_does_not_wait_for_responses() -> None:
    """Poisson calls arrive at their rate although no earlier call has ended."""
    loop = EventLoop(0)
    calls = TimedCalls(loop, 1_000.0)
    ArrivalSource(Clients(rate=10.0), loop, MetricsRecorder(RUN_S, 1.0), calls).start()
    loop.run(RUN_S)

    assert calls.running == calls.max_running
    assert approx_count(10 * RUN_S) == calls.running


# --- closed --------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 6),
    think=st.integers(0, 8).map(lambda number: number / 4),
    seconds=st.integers(0, 8).map(lambda number: number / 4),
    max_calls=st.none() | st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_closed_never_has_more_calls_than_clients(
    count: int, think: float, seconds: float, max_calls: int | None, seed: int
) -> None:
    """A client makes one call at a time and thinks before the next, even after a rejection."""
    loop, recorder = EventLoop(seed), MetricsRecorder(20.0, 1.0)
    calls = TimedCalls(loop, seconds, max_calls=max_calls)
    clients = Clients(arrivals="closed", count=count, think=Fixed(think))
    ArrivalSource(clients, loop, recorder, calls).start()
    loop.run(20.0)

    assert calls.max_running <= count
    assert len(calls.started) + calls.rejections == summarize(recorder).calls
    assert summarize(recorder).succeeded == len(calls.started) - calls.running
    assert calls.rejections == summarize(recorder).failed
    for client in range(count):
        starts = [now for now, caller in calls.started if caller == client]
        assert all(later >= now + seconds + think for now, later in pairwise(starts))


def test_closed_rate_follows_from_duration_and_think_time() -> None:
    """With calls of 0.5 s and a think time of 1.5 s, each client makes a call every 2 s."""
    loop, recorder = EventLoop(0), MetricsRecorder(RUN_S, 1.0)
    calls = TimedCalls(loop, 0.5)
    ArrivalSource(
        Clients(arrivals="closed", count=10, think=Fixed(1.5)), loop, recorder, calls
    ).start()
    loop.run(RUN_S)

    assert 10 * RUN_S / 2 == len(calls.started)
    assert dict.fromkeys(range(10), 100) == Counter(caller for _, caller in calls.started)


@pytest.mark.parametrize("think", [Uniform(0.0, 2.0), Exponential(1.0)])
def test_think_time_may_vary(think: Uniform | Exponential) -> None:
    """The rate depends on the mean of the think time."""
    loop, recorder = EventLoop(0), MetricsRecorder(RUN_S, 1.0)
    calls = TimedCalls(loop, 1.0)
    ArrivalSource(Clients(arrivals="closed", count=20, think=think), loop, recorder, calls).start()
    loop.run(RUN_S)

    assert pytest.approx(20 * RUN_S / 2, rel=0.1) == len(calls.started)


def test_closed_clients_start_at_different_times() -> None:
    """Closed clients are not synchronised at the start."""
    first = start_times(Clients(arrivals="closed", count=1_000, think=Fixed(10.0)))

    assert pytest.approx(500, abs=80) == count_between([now for now, _ in first], 0, 5)
    assert 1_000 == count_between([now for now, _ in first], 0, 10)


def test_closed_clients_start_early_with_skewed_think_times() -> None:
    """A mean far above the median does not delay the first calls."""
    think = Empirical((0.001,) * 9_999 + (1e9,))
    first = start_times(Clients(arrivals="closed", count=20, think=think))

    assert 10 < count_between([now for now, _ in first], 0, 0.001)


def test_client_without_think_time_continues_at_once() -> None:
    """Without think time the next call starts when the last one ends."""
    loop, recorder = EventLoop(0), MetricsRecorder(10.0, 1.0)
    calls = TimedCalls(loop, 0.5)
    ArrivalSource(Clients(arrivals="closed", think=Fixed(0.0)), loop, recorder, calls).start()
    loop.run(10.0)

    assert [number / 2 for number in range(20)] == [now for now, _ in calls.started]


def test_rejected_client_without_think_time_polls() -> None:
    """A client without think time whose calls are rejected starts ten calls per second."""
    loop, recorder = EventLoop(0), MetricsRecorder(10.0, 1.0)
    starts = CallStartRecorder(lambda _: Stop(Reason.BREAKER_OPEN, 5.0))
    ArrivalSource(Clients(arrivals="closed", think=Fixed(0.0)), loop, recorder, starts).start()
    loop.run(10.0)

    assert pytest.approx(100, abs=1) == summarize(recorder).failed
    assert summarize(recorder).calls == summarize(recorder).failed


# --- backlog -------------------------------------------------------------------------------------


def test_backlog_starts_all_calls_at_once() -> None:
    """Without a limit, all calls of a backlog start at the beginning."""
    calls = start_times(Clients(arrivals="backlog", count=5))

    assert [(0.0, client) for client in range(1, 6)] == calls


def test_backlog_starts_a_call_when_another_ends() -> None:
    """When a call ends, the next one starts at the same time."""
    loop, recorder = EventLoop(0), MetricsRecorder(100.0, 1.0)
    calls = TimedCalls(loop, 1.0, max_calls=2)
    ArrivalSource(Clients(arrivals="backlog", count=6), loop, recorder, calls).start()
    loop.run(100.0)

    assert [0.0, 0.0, 1.0, 1.0, 2.0, 2.0] == [now for now, _ in calls.started]
    summary = summarize(recorder)
    assert (6, 2.0, 3.0) == (summary.succeeded, summary.p50, summary.p999)


def test_duration_of_a_backlog_call_includes_its_wait() -> None:
    """The duration of a call counts from the start of the run."""
    loop, recorder, starts = EventLoop(0), MetricsRecorder(100.0, 1.0), CallStartRecorder()
    ArrivalSource(Clients(arrivals="backlog", count=3), loop, recorder, starts).start()
    assert [3.0, 0.0] == summarize(recorder).series["calls"][:2]
    loop.run(5.0)

    starts.calls[0].on_end(4.0, 7.0, None, 1)

    assert (1, 7.0) == (summarize(recorder).succeeded, summarize(recorder).p50)


@pytest.mark.parametrize(
    ("retry_after", "expected"),
    [(None, 0.1), (0.05, 0.1), (3.0, 3.0)],
)
def test_backlog_polls_after_the_retry_after_time(
    retry_after: float | None, expected: float
) -> None:
    """A rejected backlog polls after `retry_after`, and at most ten times per second."""
    loop, times = EventLoop(0), []

    def reject(now: float) -> Stop | None:
        times.append(now)
        return Stop(Reason.BREAKER_OPEN, retry_after) if len(times) == 1 else None

    starts = CallStartRecorder(reject)
    ArrivalSource(
        Clients(arrivals="backlog", count=2), loop, MetricsRecorder(9.0, 1.0), starts
    ).start()
    loop.run(9.0)

    assert [0.0, expected, expected] == times


def test_backlog_tries_every_instance() -> None:
    """A rejected backlog tries each instance, and polls after the shortest `retry_after`."""
    loop, start_attempts = EventLoop(0), []
    waits = {0: 5.0, 1: 2.0, 2: 3.0}

    def start_call(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        start_attempts.append((now, client % 3))
        stop = Stop(Reason.BREAKER_OPEN, waits[client % 3])
        on_end(now, now, stop, 0)
        return stop

    clients = Clients(arrivals="backlog", count=9, instances=3)
    ArrivalSource(clients, loop, MetricsRecorder(9.0, 1.0), start_call).start()
    loop.run(3.0)

    assert [0, 1, 2] == sorted(instance for now, instance in start_attempts if now == 0.0)
    assert [0.0] * 3 + [2.0] * 3 == [now for now, _ in start_attempts]


@pytest.mark.parametrize("reason", [Reason.BREAKER_OPEN, Reason.LIMIT, Reason.BUDGET_EMPTY])
def test_deferred_call_returns_to_the_backlog(reason: Reason) -> None:
    """A call stopped by breaker, limit or budget is started again, even if no other call runs."""
    loop, recorder, starts = EventLoop(0), MetricsRecorder(100.0, 1.0), CallStartRecorder()
    ArrivalSource(Clients(arrivals="backlog", count=2), loop, recorder, starts).start()
    loop.run(1.0)
    for call in tuple(starts.calls):
        call.on_end(0.0, 2.0, Stop(reason, 3.0), 1)
    loop.run(50.0)

    assert [0.0, 0.0, 5.0, 5.0] == [call.started for call in starts.calls]
    assert (0, 0) == (summarize(recorder).failed, summarize(recorder).succeeded)


@pytest.mark.parametrize("reason", [Reason.ATTEMPTS, Reason.TOTAL_BUDGET, Reason.PERMANENT])
def test_failed_call_leaves_the_backlog(reason: Reason) -> None:
    """A failed call is not started again, and the next one starts."""
    loop, recorder, starts = EventLoop(0), MetricsRecorder(100.0, 1.0), CallStartRecorder()
    ArrivalSource(Clients(arrivals="backlog", count=2), loop, recorder, starts).start()
    loop.run(1.0)
    for call in tuple(starts.calls):
        call.on_end(0.0, 2.0, Stop(reason), 1)
    loop.run(50.0)

    assert 2 == len(starts.calls)
    assert {reason.value: 2} == summarize(recorder).reasons


@given(
    max_calls=st.integers(1, 5),
    count=st.integers(1, 20),
    call_ends=st.lists(st.sampled_from(["ok", "failed", "deferred"]), max_size=40),
)
def test_each_backlog_call_is_counted_once(
    max_calls: int, count: int, call_ends: list[str]
) -> None:
    """Each call of a backlog is counted exactly once, even if it is deferred several times."""
    loop, recorder = EventLoop(0), MetricsRecorder(1_000.0, 1.0)
    running, remaining_ends = 0, iter(call_ends)
    tally: Counter[str] = Counter()

    def start_call(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        nonlocal running
        if running >= max_calls:
            stop = Stop(Reason.LIMIT)
            on_end(now, now, stop, 0)
            return stop
        running += 1
        loop.schedule(now + 1.0, end, on_end)
        return None

    def end(now: float, on_end: OnCallEnd) -> None:
        nonlocal running
        running -= 1
        call_end = next(remaining_ends, "ok")
        tally[call_end] += 1
        stops = {"failed": Stop(Reason.ATTEMPTS), "deferred": Stop(Reason.BREAKER_OPEN, 2.0)}
        on_end(now - 1.0, now, stops.get(call_end), 1)

    ArrivalSource(Clients(arrivals="backlog", count=count), loop, recorder, start_call).start()
    loop.run(1_000.0)

    assert (count, 0) == (tally["ok"] + tally["failed"], running)
    assert (tally["ok"], tally["failed"]) == (
        summarize(recorder).succeeded,
        summarize(recorder).failed,
    )
    assert count == summarize(recorder).calls


def test_instances_share_a_backlog() -> None:
    """Ten processes with a limit of one drain a backlog like one process with a limit of ten."""

    def run_backlog(instances: int, limit: int) -> Summary:
        defence = Defence(Policy(), limiter={"kind": "in-flight", "limit": limit})
        clients = Clients(arrivals="backlog", count=200, instances=instances, defence=defence)
        return simulate(
            Scenario(
                duration=60.0, clients=clients, servers={"server": Server(latency=Exponential(0.5))}
            )
        )

    ten_instances, one_instance = run_backlog(10, 1), run_backlog(1, 10)

    assert one_instance == ten_instances
    assert 200 == ten_instances.succeeded


def test_full_instance_does_not_block_the_backlog() -> None:
    """Calls start in each instance with free capacity while another one is full."""
    loop, started = EventLoop(0), []

    def start_call(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        if client % 3 == 0:
            stop = Stop(Reason.LIMIT)
            on_end(now, now, stop, 0)
            return stop
        started.append((now, client % 3))
        return None

    clients = Clients(arrivals="backlog", count=6, instances=3)
    ArrivalSource(clients, loop, MetricsRecorder(9.0, 1.0), start_call).start()
    loop.run(9.0)

    assert [(0.0, 1), (0.0, 2)] * 3 == started


DEFENCES = {
    "in flight": Defence(Policy(attempt_timeout=2.0), limiter={"kind": "in-flight", "limit": 3}),
    "AIMD": Defence(Policy(attempt_timeout=2.0), limiter={"kind": "aimd", "initial": 4}),
    "breaker": Defence(Policy(attempt_timeout=2.0), breaker={"min_calls": 5, "open_for": 1.0}),
    "budget": Defence(Policy(attempt_timeout=2.0), budget={"kind": "token", "capacity": 20}),
    "breaker and limiter": Defence(
        Policy(attempt_timeout=2.0),
        breaker={"min_calls": 5, "open_for": 1.0},
        limiter={"kind": "in-flight", "limit": 10},
    ),
    "hedging behind a breaker": Defence(
        hedging=Hedging(after=0.5),
        breaker={"min_calls": 5, "open_for": 1.0},
        limiter={"kind": "in-flight", "limit": 10},
    ),
}


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("defence", DEFENCES.values(), ids=DEFENCES.keys())
def test_backlog_drains_after_an_outage(defence: Defence, instances: int) -> None:
    """After an outage every call of the backlog ends, and none fails because it was deferred."""
    scenario = Scenario(
        duration=600.0,
        clients=Clients(arrivals="backlog", count=100, instances=instances, defence=defence),
        servers={"server": Server(latency=Exponential(0.05), failures=(Failure(end=5.0),))},
    )
    summary = simulate(scenario)

    assert (100, 0) == (summary.calls, summary.unfinished)
    assert summary.failed == sum(summary.reasons.values())
    assert set() == {"breaker-open", "limit", "budget-empty"} & summary.reasons.keys()
    assert summary.succeeded + summary.failures == summary.attempts or defence.hedging
