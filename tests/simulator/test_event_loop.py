"""Virtual time: order, ties, boundaries and dice."""

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

moments = st.integers(0, 6).map(lambda quarters: quarters / 4)


class Diary:
    """Writes down what happens, and when."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, object]] = []

    def note(self, now: float, about: object) -> None:
        """Write a line."""
        self.lines.append((now, about))


@given(st.lists(moments))
def test_events_come_by_their_time_and_ties_in_the_order_of_making(times: list[float]) -> None:
    """In whatever order they are made, events happen by time, those of a moment as made."""
    loop, diary = EventLoop(0), Diary()
    for number, when in enumerate(times):
        loop.schedule(when, diary.note, number)

    loop.run(inf)

    made = [(when, number) for number, when in enumerate(times)]
    assert sorted(made, key=lambda event: event[0]) == diary.lines


@given(st.lists(st.tuples(moments, st.lists(moments, max_size=3)), max_size=6))
def test_events_that_make_events(plan: list[tuple[float, list[float]]]) -> None:
    """What is made while the world runs takes its place by time, and after its elders in a tie."""
    loop, diary, made = EventLoop(0), Diary(), 0
    expected: list[tuple[float, int]] = []

    def make(now: float, delays: list[float]) -> None:
        nonlocal made
        for delay in delays:
            loop.schedule(now + delay, diary.note, made)
            expected.append((now + delay, made))
            made += 1

    for when, delays in plan:
        loop.schedule(when, make, delays)
    loop.run(inf)

    assert sorted(expected) == diary.lines


def test_an_event_of_the_present_moment_comes_after_all_that_were_there() -> None:
    """An event made for now happens in this run, when those of the moment are through."""
    loop, diary = EventLoop(0), Diary()

    def make(now: float, about: object) -> None:
        diary.note(now, about)
        loop.schedule(now, diary.note, "made in the moment")

    loop.schedule(1.0, make, "first")
    loop.schedule(2.0, diary.note, "later")
    loop.schedule(1.0, diary.note, "second")
    loop.run(5.0)

    expected = [(1.0, "first"), (1.0, "second"), (1.0, "made in the moment"), (2.0, "later")]
    assert expected == diary.lines


def test_run_stops_before_its_end_and_can_go_on() -> None:
    """What is due at the end itself has not happened, and happens when the world runs further."""
    loop, diary = EventLoop(0), Diary()
    for when in (0.0, 1.0, 2.0):
        loop.schedule(when, diary.note)

    loop.run(0.0)
    assert [] == diary.lines
    loop.run(1.0)
    assert [(0.0, None)] == diary.lines
    loop.run(1.0)
    assert [(0.0, None)] == diary.lines
    loop.run(2.5)
    assert [(0.0, None), (1.0, None), (2.0, None)] == diary.lines


def test_a_world_without_events_is_over_at_once() -> None:
    """Nothing to do is no reason to wait for the end."""
    loop = EventLoop(0)

    loop.run(inf)

    assert [] == loop._times


@pytest.mark.parametrize("seed", [0, 7, -1, "", "7", trial_seed(0, 0)], ids=repr)
def test_one_seed_is_one_run(seed: int | str) -> None:
    """Two worlds of one seed draw the same numbers, by dice and by sampler."""
    draws = []
    for loop in (EventLoop(seed), EventLoop(seed)):
        draw, source = loop.sampler(Uniform(1.0, 2.0), "these"), loop.random_source("those")
        draws.append([draw(), source.random(), draw(), source.gauss(0, 1)])

    first, second = draws
    assert first == second


def test_trials_have_nothing_in_common() -> None:
    """No two of many seeds and trials begin with the same draw."""
    seeds = [trial_seed(seed, trial) for seed, trial in product(range(30), range(30))]

    assert 900 == len(set(seeds))
    assert 900 == len({EventLoop(seed).random_source("them").random() for seed in seeds})


def test_each_source_of_chance_has_dice_of_its_own() -> None:
    """What one source draws says nothing about another, and does not change what it draws."""
    loop = EventLoop(0)
    one, other, again = (
        loop.random_source("one"),
        loop.random_source("other"),
        loop.random_source("one"),
    )

    assert one.random() != other.random()
    other.random()
    assert [one.random() for _ in range(3)] == [again.random() for _ in range(4)][1:]


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("breaks", [True, False])
def test_a_run_leaves_the_garbage_collector_as_it_was(collecting: bool, breaks: bool) -> None:
    """It rests while a world runs, and goes on afterwards if it was on, error or not."""
    loop, during = EventLoop(0), []

    def look(_now: float, _about: object) -> None:
        during.append(gc.isenabled())
        if breaks:
            raise LookupError

    loop.schedule(0.0, look)
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(LookupError) if breaks else nullcontext():
            loop.run(1.0)
        assert ([False], collecting) == (during, gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()


@given(st.tuples(st.integers(), st.integers(0)), st.tuples(st.integers(), st.integers(0)))
def test_every_trial_has_a_seed_of_its_own(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Only the same trial of the same seed has the same name."""
    assert (one == other) == (trial_seed(*one) == trial_seed(*other))
