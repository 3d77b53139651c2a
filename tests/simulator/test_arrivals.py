"""When calls begin: at once, by chance, one after the other, or from a backlog."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.core.verdict import Reason, Stop
from tarry.policyfile.defence import Defence
from tarry.simulator.arrivals import ArrivalSource
from tarry.simulator.distributions import Empirical, Exponential, Fixed, Uniform
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder, Summary
from tarry.simulator.node import OnCallEnd
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.simulate import simulate
from tests.simulator.harness import CallStartRecorder

SPAN = 200.0


class Takes:
    """Begins calls that end after a while, and knows how many run at a time."""

    def __init__(self, loop: EventLoop, seconds: float, *, room: int | None = None) -> None:
        self.loop = loop
        self.seconds = seconds
        self.room = room
        self.running = 0
        self.most = 0
        self.begun: list[tuple[float, int]] = []
        self.refusals = 0

    def __call__(self, now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        """Begin a call, or refuse it."""
        if self.room is not None and self.running >= self.room:
            self.refusals += 1
            stop = Stop(Reason.LIMIT)
            on_end(now, now, stop, 0)
            return stop
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.append((now, client))
        self.loop.schedule(now + self.seconds, lambda later, _: self.end(now, later, on_end))
        return None

    def end(self, begun: float, now: float, on_end: OnCallEnd) -> None:
        """End a call well."""
        self.running -= 1
        on_end(begun, now, None, 1)


def began(clients: Clients, seed: int = 0, span: float = SPAN) -> list[tuple[float, int]]:
    """Return when calls begin, and of which client, if none of them ever ends."""
    loop, starts = EventLoop(seed), CallStartRecorder()
    recorder = MetricsRecorder(span, 1.0)
    ArrivalSource(clients, loop, recorder, starts).start()
    loop.run(span)
    assert len(starts.calls) == sum(recorder._calls)
    return [(begun.now, begun.client) for begun in starts.calls]


def in_window(times: list[float], start: float, end: float) -> int:
    """Count what lies within."""
    return sum(start <= now < end for now in times)


def about(expected: float) -> object:
    """Allow for five standard deviations of chance."""
    return pytest.approx(expected, abs=5 * sqrt(expected))


# --- at once -------------------------------------------------------------------------------------


def test_at_once_is_one_call_of_each_at_the_start() -> None:
    """Every client makes one call, and no other."""
    assert [(0.0, client) for client in range(5)] == began(Clients(arrivals="at-once", count=5))


@pytest.mark.parametrize("stop", [None, Stop(Reason.ATTEMPTS), Stop(Reason.LIMIT)])
def test_an_end_is_counted_with_its_reason(stop: Stop | None) -> None:
    """A call that ends well has its time, one that fails its reason."""
    loop, starts, recorder = EventLoop(0), CallStartRecorder(), MetricsRecorder(10.0, 1.0)
    ArrivalSource(Clients(arrivals="at-once"), loop, recorder, starts).start()
    loop.run(1.0)

    starts.calls[0].on_end(0.0, 2.5, stop, 1)

    if stop is None:
        assert (1, [2.5], {}) == (
            recorder._succeeded[2],
            list(recorder._durations),
            recorder._reasons,
        )
    else:
        assert (1, [], {stop.reason.value: 1}) == (
            recorder._failed[2],
            list(recorder._durations),
            recorder._reasons,
        )


# --- poisson -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_poisson_comes_at_its_rate(seed: int) -> None:
    """Calls come as often as the rate says, by clients one after the other."""
    calls = began(Clients(rate=50.0), seed)

    assert about(50 * SPAN) == len(calls)
    assert list(range(len(calls))) == [client for _, client in calls]


def test_poisson_has_no_memory() -> None:
    """The pauses vary as much as they last, and their counts in a second as their mean."""
    times = [now for now, _ in began(Clients(rate=50.0))]
    pauses = [after - before for before, after in pairwise(times)]
    counts = Counter(int(now) for now in times)
    seconds = [counts[second] for second in range(int(SPAN))]

    assert pytest.approx(0.02, rel=0.1) == fmean(pauses)
    assert pytest.approx(0.02, rel=0.1) == sqrt(fmean((pause - 0.02) ** 2 for pause in pauses))
    assert pytest.approx(50, rel=0.5) == fmean((count - 50) ** 2 for count in seconds)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_surge_is_another_rate_for_a_while(seed: int) -> None:
    """Before and after it, all is as usual."""
    surges = (Surge(start=20.0, end=40.0, rate=200.0), Surge(start=100.0, end=150.0, rate=5.0))
    times = [now for now, _ in began(Clients(rate=50.0, surges=surges), seed)]

    for start, end, rate in [
        (0, 20, 50),
        (20, 40, 200),
        (40, 100, 50),
        (100, 150, 5),
        (150, 200, 50),
    ]:
        assert about(rate * (end - start)) == in_window(times, start, end)


def test_a_surge_of_nothing_is_silence() -> None:
    """A rate of 0 lets nobody call until it is over."""
    surges = (Surge(start=50.0, end=150.0, rate=0.0),)
    times = [now for now, _ in began(Clients(rate=50.0, surges=surges))]

    assert 0 == in_window(times, 50, 150)
    assert about(50 * 50) == in_window(times, 150, 200)


def test_a_surge_from_the_start() -> None:
    """A surge may hold from the first moment, and another follow at once."""
    surges = (Surge(start=0.0, end=50.0, rate=0.0), Surge(start=50.0, end=100.0, rate=100.0))
    times = [now for now, _ in began(Clients(rate=10.0, surges=surges))]

    assert 0 == in_window(times, 0, 50)
    assert about(5_000) == in_window(times, 50, 100)
    assert about(1_000) == in_window(times, 100, 200)


def test_poisson_does_not_wait_for_answers() -> None:
    """Calls come whatever becomes of those before."""
    loop = EventLoop(0)
    takes = Takes(loop, 1_000.0)
    ArrivalSource(Clients(rate=10.0), loop, MetricsRecorder(SPAN, 1.0), takes).start()
    loop.run(SPAN)

    assert takes.running == takes.most
    assert about(10 * SPAN) == takes.running


# --- closed --------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 6),
    think=st.integers(0, 8).map(lambda number: number / 4),
    seconds=st.integers(0, 8).map(lambda number: number / 4),
    room=st.none() | st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_closed_never_has_more_calls_than_clients(
    count: int, think: float, seconds: float, room: int | None, seed: int
) -> None:
    """Each client makes one call at a time, thinks, and makes the next, refused or not."""
    loop, recorder = EventLoop(seed), MetricsRecorder(20.0, 1.0)
    takes = Takes(loop, seconds, room=room)
    clients = Clients(arrivals="closed", count=count, think=Fixed(think))
    ArrivalSource(clients, loop, recorder, takes).start()
    loop.run(20.0)

    assert takes.most <= count
    assert len(takes.begun) + takes.refusals == sum(recorder._calls)
    assert sum(recorder._succeeded) == len(takes.begun) - takes.running
    assert takes.refusals == sum(recorder._failed)
    for client in range(count):
        mine = [now for now, who in takes.begun if who == client]
        assert all(later >= now + seconds + think for now, later in pairwise(mine))


def test_closed_makes_as_many_calls_as_its_pauses_allow() -> None:
    """Each client makes a call in the time of one call and one thought."""
    loop, recorder = EventLoop(0), MetricsRecorder(SPAN, 1.0)
    takes = Takes(loop, 0.5)
    ArrivalSource(
        Clients(arrivals="closed", count=10, think=Fixed(1.5)), loop, recorder, takes
    ).start()
    loop.run(SPAN)

    assert 10 * SPAN / 2 == len(takes.begun)
    assert dict.fromkeys(range(10), 100) == Counter(who for _, who in takes.begun)


@pytest.mark.parametrize("think", [Uniform(0.0, 2.0), Exponential(1.0)])
def test_thoughts_may_vary(think: Uniform | Exponential) -> None:
    """The mean of the pause is what counts."""
    loop, recorder = EventLoop(0), MetricsRecorder(SPAN, 1.0)
    takes = Takes(loop, 1.0)
    ArrivalSource(Clients(arrivals="closed", count=20, think=think), loop, recorder, takes).start()
    loop.run(SPAN)

    assert pytest.approx(20 * SPAN / 2, rel=0.1) == len(takes.begun)


def test_closed_begins_anywhere_in_its_pause() -> None:
    """Clients do not start in step."""
    first = began(Clients(arrivals="closed", count=1_000, think=Fixed(10.0)))

    assert pytest.approx(500, abs=80) == in_window([now for now, _ in first], 0, 5)
    assert 1_000 == in_window([now for now, _ in first], 0, 10)


def test_closed_begins_soon_where_hardly_any_pause_is_long() -> None:
    """A mean far above what is usual does not keep the clients from their first call."""
    think = Empirical((0.001,) * 9_999 + (1e9,))
    first = began(Clients(arrivals="closed", count=20, think=think))

    assert 10 < in_window([now for now, _ in first], 0, 0.001)


def test_who_never_thinks_goes_on_at_once() -> None:
    """Without a pause the next call begins with the end of the last."""
    loop, recorder = EventLoop(0), MetricsRecorder(10.0, 1.0)
    takes = Takes(loop, 0.5)
    ArrivalSource(Clients(arrivals="closed", think=Fixed(0.0)), loop, recorder, takes).start()
    loop.run(10.0)

    assert [number / 2 for number in range(20)] == [now for now, _ in takes.begun]


def test_who_is_refused_and_never_thinks_does_not_stop_the_time() -> None:
    """Somebody who asks again and again for nothing asks ten times a second."""
    loop, recorder = EventLoop(0), MetricsRecorder(10.0, 1.0)
    starts = CallStartRecorder(lambda _: Stop(Reason.BREAKER_OPEN, 5.0))
    ArrivalSource(Clients(arrivals="closed", think=Fixed(0.0)), loop, recorder, starts).start()
    loop.run(10.0)

    assert pytest.approx(100, abs=1) == sum(recorder._failed)
    assert sum(recorder._calls) == sum(recorder._failed)


# --- backlog -------------------------------------------------------------------------------------


def test_a_backlog_begins_all_it_may() -> None:
    """Where nothing holds it back, all calls begin at the start."""
    calls = began(Clients(arrivals="backlog", count=5))

    assert [(0.0, client) for client in range(1, 6)] == calls


def test_a_backlog_refills_as_calls_end() -> None:
    """Each end makes room for the next, in the same moment."""
    loop, recorder = EventLoop(0), MetricsRecorder(100.0, 1.0)
    takes = Takes(loop, 1.0, room=2)
    ArrivalSource(Clients(arrivals="backlog", count=6), loop, recorder, takes).start()
    loop.run(100.0)

    assert [0.0, 0.0, 1.0, 1.0, 2.0, 2.0] == [now for now, _ in takes.begun]
    assert [1.0, 1.0, 2.0, 2.0, 3.0, 3.0] == list(recorder._durations)


def test_the_time_of_a_call_in_a_backlog_counts_from_the_start() -> None:
    """What waits in a backlog has begun: its wait is part of its time."""
    loop, recorder, starts = EventLoop(0), MetricsRecorder(100.0, 1.0), CallStartRecorder()
    ArrivalSource(Clients(arrivals="backlog", count=3), loop, recorder, starts).start()
    assert [3, 0] == recorder._calls[:2]
    loop.run(5.0)

    starts.calls[0].on_end(4.0, 7.0, None, 1)

    assert [7.0] == list(recorder._durations)


@pytest.mark.parametrize(
    ("retry_after", "expected"),
    [(None, 0.1), (0.05, 0.1), (3.0, 3.0)],
)
def test_a_backlog_looks_again_when_it_is_told_to(
    retry_after: float | None, expected: float
) -> None:
    """It asks again after the time that it was told, else ten times a second."""
    loop, asked = EventLoop(0), []

    def refuse(now: float) -> Stop | None:
        asked.append(now)
        return Stop(Reason.BREAKER_OPEN, retry_after) if len(asked) == 1 else None

    starts = CallStartRecorder(refuse)
    ArrivalSource(
        Clients(arrivals="backlog", count=2), loop, MetricsRecorder(9.0, 1.0), starts
    ).start()
    loop.run(9.0)

    assert [0.0, expected, expected] == asked


def test_a_backlog_asks_every_instance_and_comes_back_for_the_first_that_may() -> None:
    """One process that is held back does not hold back the others."""
    loop, asked = EventLoop(0), []
    waits = {0: 5.0, 1: 2.0, 2: 3.0}

    def begin(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        asked.append((now, client % 3))
        stop = Stop(Reason.BREAKER_OPEN, waits[client % 3])
        on_end(now, now, stop, 0)
        return stop

    clients = Clients(arrivals="backlog", count=9, instances=3)
    ArrivalSource(clients, loop, MetricsRecorder(9.0, 1.0), begin).start()
    loop.run(3.0)

    assert [0, 1, 2] == sorted(instance for now, instance in asked if now == 0.0)
    assert [0.0] * 3 + [2.0] * 3 == [now for now, _ in asked]


@pytest.mark.parametrize("reason", [Reason.BREAKER_OPEN, Reason.LIMIT, Reason.BUDGET_EMPTY])
def test_a_call_that_is_held_back_on_its_way_goes_back_into_the_backlog(reason: Reason) -> None:
    """It has not failed: it is begun again, also when no other call runs that would wake it."""
    loop, recorder, starts = EventLoop(0), MetricsRecorder(100.0, 1.0), CallStartRecorder()
    ArrivalSource(Clients(arrivals="backlog", count=2), loop, recorder, starts).start()
    loop.run(1.0)
    for begun in tuple(starts.calls):
        begun.on_end(0.0, 2.0, Stop(reason, 3.0), 1)
    loop.run(50.0)

    assert [0.0, 0.0, 5.0, 5.0] == [begun.now for begun in starts.calls]
    assert (0, 0) == (sum(recorder._failed), sum(recorder._succeeded))


@pytest.mark.parametrize("reason", [Reason.ATTEMPTS, Reason.TOTAL_BUDGET, Reason.PERMANENT])
def test_a_call_that_fails_leaves_the_backlog(reason: Reason) -> None:
    """What was tried and failed is over, and makes room."""
    loop, recorder, starts = EventLoop(0), MetricsRecorder(100.0, 1.0), CallStartRecorder()
    ArrivalSource(Clients(arrivals="backlog", count=2), loop, recorder, starts).start()
    loop.run(1.0)
    for begun in tuple(starts.calls):
        begun.on_end(0.0, 2.0, Stop(reason), 1)
    loop.run(50.0)

    assert 2 == len(starts.calls)
    assert {reason.value: 2} == recorder._reasons


@given(
    room=st.integers(1, 5),
    count=st.integers(1, 20),
    fates=st.lists(st.sampled_from(["ok", "failed", "held"]), max_size=40),
)
def test_no_call_of_a_backlog_is_lost_or_made_twice(
    room: int, count: int, fates: list[str]
) -> None:
    """Whatever becomes of its calls, each is counted once when all is done."""
    loop, recorder = EventLoop(0), MetricsRecorder(1_000.0, 1.0)
    running, ends = 0, iter(fates)
    tally: Counter[str] = Counter()

    def begin(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        nonlocal running
        if running >= room:
            stop = Stop(Reason.LIMIT)
            on_end(now, now, stop, 0)
            return stop
        running += 1
        loop.schedule(now + 1.0, end, on_end)
        return None

    def end(now: float, on_end: OnCallEnd) -> None:
        nonlocal running
        running -= 1
        fate = next(ends, "ok")
        tally[fate] += 1
        stops = {"failed": Stop(Reason.ATTEMPTS), "held": Stop(Reason.BREAKER_OPEN, 2.0)}
        on_end(now - 1.0, now, stops.get(fate), 1)

    ArrivalSource(Clients(arrivals="backlog", count=count), loop, recorder, begin).start()
    loop.run(1_000.0)

    assert (count, 0) == (tally["ok"] + tally["failed"], running)
    assert (tally["ok"], tally["failed"]) == (sum(recorder._succeeded), sum(recorder._failed))
    assert count == sum(recorder._calls)


def test_instances_share_a_backlog() -> None:
    """Ten processes that each have room for one drain it as one does that has room for ten."""

    def drained(instances: int, limit: int) -> Summary:
        defence = Defence(Policy(), limiter={"kind": "in-flight", "limit": limit})
        clients = Clients(arrivals="backlog", count=200, instances=instances, defence=defence)
        return simulate(
            Scenario(
                duration=60.0, clients=clients, servers={"server": Server(latency=Exponential(0.5))}
            )
        )

    many, one = drained(10, 1), drained(1, 10)

    assert one == many
    assert 200 == many.succeeded


def test_one_full_instance_does_not_hold_a_backlog_back() -> None:
    """Calls begin at every instance that has room, also while another has none."""
    loop, begun = EventLoop(0), []

    def begin(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        if client % 3 == 0:
            stop = Stop(Reason.LIMIT)
            on_end(now, now, stop, 0)
            return stop
        begun.append((now, client % 3))
        return None

    clients = Clients(arrivals="backlog", count=6, instances=3)
    ArrivalSource(clients, loop, MetricsRecorder(9.0, 1.0), begin).start()
    loop.run(9.0)

    assert [(0.0, 1), (0.0, 2)] * 3 == begun


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
def test_a_backlog_drains_behind_a_defence(defence: Defence, instances: int) -> None:
    """After an outage every call of the backlog is made, however it was held back."""
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
