"""The event loop: the order of events, the end of a run, and random sources."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.simulator.distributions import Uniform
from tarry.simulator.event_loop import EventLoop, trial_seed

times_in_quarters = st.integers(0, 6).map(lambda quarters: quarters / 4)


class EventRecorder:
    """Records events and their times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, object]] = []

    def record(self, now: float, argument: object) -> None:
        """Record an event."""
        self.events.append((now, argument))


@given(st.lists(times_in_quarters))
def test_events_run_by_time_and_then_by_scheduling_order(times: list[float]) -> None:
    loop, recorder = EventLoop(0), EventRecorder()
    for number, when in enumerate(times):
        loop.schedule(when, recorder.record, number)

    loop.run(inf)

    scheduled = [(when, number) for number, when in enumerate(times)]
    assert sorted(scheduled, key=lambda event: event[0]) == recorder.events


@given(st.lists(st.tuples(times_in_quarters, st.lists(times_in_quarters, max_size=3)), max_size=6))
def test_events_can_schedule_events(plan: list[tuple[float, list[float]]]) -> None:
    """An event that is scheduled during the run is ordered by its time."""
    loop, recorder, scheduled = EventLoop(0), EventRecorder(), 0
    expected: list[tuple[float, int]] = []

    def schedule_more(now: float, delays: list[float]) -> None:
        nonlocal scheduled
        for delay in delays:
            loop.schedule(now + delay, recorder.record, scheduled)
            expected.append((now + delay, scheduled))
            scheduled += 1

    for when, delays in plan:
        loop.schedule(when, schedule_more, delays)
    loop.run(inf)

    assert sorted(expected) == recorder.events


def test_event_for_the_current_time_runs_last_at_that_time() -> None:
    """An event scheduled for the current time runs after the other events of that time."""
    loop, recorder = EventLoop(0), EventRecorder()

    def record_and_schedule(now: float, argument: object) -> None:
        recorder.record(now, argument)
        loop.schedule(now, recorder.record, "scheduled by an event")

    loop.schedule(1.0, record_and_schedule, "first")
    loop.schedule(2.0, recorder.record, "later")
    loop.schedule(1.0, recorder.record, "second")
    loop.run(5.0)

    expected = [(1.0, "first"), (1.0, "second"), (1.0, "scheduled by an event"), (2.0, "later")]
    assert expected == recorder.events


def test_run_excludes_its_end_and_can_continue() -> None:
    """`run(end)` runs the events before `end`; an event at `end` runs in the next `run`."""
    loop, recorder = EventLoop(0), EventRecorder()
    for when in (0.0, 1.0, 2.0):
        loop.schedule(when, recorder.record)

    loop.run(0.0)
    assert [] == recorder.events
    loop.run(1.0)
    assert [(0.0, None)] == recorder.events
    loop.run(1.0)
    assert [(0.0, None)] == recorder.events
    loop.run(2.5)
    assert [(0.0, None), (1.0, None), (2.0, None)] == recorder.events


def test_run_without_events_returns_at_once() -> None:
    loop = EventLoop(0)

    loop.run(inf)

    assert [] == loop._times


@pytest.mark.parametrize("seed", [0, 7, -1, "", "7", trial_seed(0, 0)], ids=repr)
def test_same_seed_gives_same_draws(seed: int | str) -> None:
    """Two loops with the same seed draw the same numbers."""
    draws = []
    for loop in (EventLoop(seed), EventLoop(seed)):
        draw, source = loop.sampler(Uniform(1.0, 2.0), "latency"), loop.random_source("jitter")
        draws.append([draw(), source.random(), draw(), source.gauss(0, 1)])

    first, second = draws
    assert first == second


def test_trials_draw_different_numbers() -> None:
    """No two pairs of seed and trial start with the same draw."""
    seeds = [trial_seed(seed, trial) for seed, trial in product(range(30), range(30))]

    assert 900 == len(set(seeds))
    assert 900 == len({EventLoop(seed).random_source("arrivals").random() for seed in seeds})


def test_random_sources_are_independent() -> None:
    """Draws from a source do not affect others; sources with one name draw the same numbers."""
    loop = EventLoop(0)
    first, second, same_name = (
        loop.random_source("first"),
        loop.random_source("second"),
        loop.random_source("first"),
    )

    assert first.random() != second.random()
    second.random()
    assert [first.random() for _ in range(3)] == [same_name.random() for _ in range(4)][1:]


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_run_restores_the_garbage_collector(collecting: bool, raises: bool) -> None:
    """Garbage collection is off during a run and restored afterwards, also after an error."""
    loop, during = EventLoop(0), []

    def record_gc_state(_now: float, _argument: object) -> None:
        during.append(gc.isenabled())
        if raises:
            raise LookupError

    loop.schedule(0.0, record_gc_state)
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(LookupError) if raises else nullcontext():
            loop.run(1.0)
        assert ([False], collecting) == (during, gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()


@given(st.tuples(st.integers(), st.integers(0)), st.tuples(st.integers(), st.integers(0)))
def test_every_trial_has_its_own_seed(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Trial seeds are equal only for the same seed and the same trial."""
    assert (first == second) == (trial_seed(*first) == trial_seed(*second))
