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
from tarry.simulator.event_loop import World, seed_of

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
    world, diary = World(0), Diary()
    for number, when in enumerate(times):
        world.at(when, diary.note, number)

    world.run(inf)

    made = [(when, number) for number, when in enumerate(times)]
    assert sorted(made, key=lambda event: event[0]) == diary.lines


@given(st.lists(st.tuples(moments, st.lists(moments, max_size=3)), max_size=6))
def test_events_that_make_events(plan: list[tuple[float, list[float]]]) -> None:
    """What is made while the world runs takes its place by time, and after its elders in a tie."""
    world, diary, made = World(0), Diary(), 0
    expected: list[tuple[float, int]] = []

    def make(now: float, delays: list[float]) -> None:
        nonlocal made
        for delay in delays:
            world.at(now + delay, diary.note, made)
            expected.append((now + delay, made))
            made += 1

    for when, delays in plan:
        world.at(when, make, delays)
    world.run(inf)

    assert sorted(expected) == diary.lines


def test_an_event_of_the_present_moment_comes_after_all_that_were_there() -> None:
    """An event made for now happens in this run, when those of the moment are through."""
    world, diary = World(0), Diary()

    def make(now: float, about: object) -> None:
        diary.note(now, about)
        world.at(now, diary.note, "made in the moment")

    world.at(1.0, make, "first")
    world.at(2.0, diary.note, "later")
    world.at(1.0, diary.note, "second")
    world.run(5.0)

    expected = [(1.0, "first"), (1.0, "second"), (1.0, "made in the moment"), (2.0, "later")]
    assert expected == diary.lines


def test_run_stops_before_its_end_and_can_go_on() -> None:
    """What is due at the end itself has not happened, and happens when the world runs further."""
    world, diary = World(0), Diary()
    for when in (0.0, 1.0, 2.0):
        world.at(when, diary.note)

    world.run(0.0)
    assert [] == diary.lines
    world.run(1.0)
    assert [(0.0, None)] == diary.lines
    world.run(1.0)
    assert [(0.0, None)] == diary.lines
    world.run(2.5)
    assert [(0.0, None), (1.0, None), (2.0, None)] == diary.lines


def test_a_world_without_events_is_over_at_once() -> None:
    """Nothing to do is no reason to wait for the end."""
    world = World(0)

    world.run(inf)

    assert [] == world._times


@pytest.mark.parametrize("seed", [0, 7, -1, "", "7", seed_of(0, 0)], ids=repr)
def test_one_seed_is_one_run(seed: int | str) -> None:
    """Two worlds of one seed draw the same numbers, by dice and by sampler."""
    draws = []
    for world in (World(seed), World(seed)):
        draw, dice = world.sampler(Uniform(1.0, 2.0), "these"), world.dice("those")
        draws.append([draw(), dice.random(), draw(), dice.gauss(0, 1)])

    first, second = draws
    assert first == second


def test_trials_have_nothing_in_common() -> None:
    """No two of many seeds and trials begin with the same draw."""
    seeds = [seed_of(seed, trial) for seed, trial in product(range(30), range(30))]

    assert 900 == len(set(seeds))
    assert 900 == len({World(seed).dice("them").random() for seed in seeds})


def test_each_source_of_chance_has_dice_of_its_own() -> None:
    """What one source draws says nothing about another, and does not change what it draws."""
    world = World(0)
    one, other, again = world.dice("one"), world.dice("other"), world.dice("one")

    assert one.random() != other.random()
    other.random()
    assert [one.random() for _ in range(3)] == [again.random() for _ in range(4)][1:]


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("breaks", [True, False])
def test_a_run_leaves_the_garbage_collector_as_it_was(collecting: bool, breaks: bool) -> None:
    """It rests while a world runs, and goes on afterwards if it was on, error or not."""
    world, during = World(0), []

    def look(_now: float, _about: object) -> None:
        during.append(gc.isenabled())
        if breaks:
            raise LookupError

    world.at(0.0, look)
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(LookupError) if breaks else nullcontext():
            world.run(1.0)
        assert ([False], collecting) == (during, gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()


@given(st.tuples(st.integers(), st.integers(0)), st.tuples(st.integers(), st.integers(0)))
def test_every_trial_has_a_seed_of_its_own(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Only the same trial of the same seed has the same name."""
    assert (one == other) == (seed_of(*one) == seed_of(*other))
