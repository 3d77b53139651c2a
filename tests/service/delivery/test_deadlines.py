"""One timer for many deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tarry.runtime.clocks import world
from tarry.service.delivery.deadlines import WHO, Deadlines
from tests.service.delivery.sending import run, until

pytestmark = pytest.mark.usefixtures("either_loop")


class Who:
    """Waits for its time."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told

    def late(self) -> None:
        """Note it, or fail."""
        self._told.append(self._name)
        if self._name == "odd":
            raise ValueError(self._name)


def test_each_is_told_when_its_time_has_come() -> None:
    """In the order of their times, whenever they were set; not who ended before, and once."""

    async def main() -> list[str]:
        told: list[str] = []
        deadlines, now = Deadlines(world.now), world.now()
        for name, after in (("third", 0.03), ("ended", 0.001), ("second", 0.02), ("first", 0.01)):
            deadline = deadlines.add(now + after, Who(name, told))
            if name == "ended":
                deadline[WHO] = None
        await until(lambda: len(told) == 3)
        assert 0 == len(deadlines)
        deadlines.add(world.now() - 1, Who("late already", told))
        await until(lambda: len(told) == 4)
        return told

    assert ["first", "second", "third", "late already"] == run(main())


def test_an_error_of_one_keeps_no_other_from_its_end() -> None:
    """Nor does it stop the timer."""

    async def main() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        told: list[str] = []
        deadlines, now = Deadlines(world.now), world.now()
        for name, after in (("odd", 0.0), ("even", 0.0), ("later", 0.01)):
            deadlines.add(now + after, Who(name, told))
        await until(lambda: len(told) == 3)
        return told

    assert ["odd", "even", "later"] == run(main())


def test_a_timer_that_fires_early_is_set_anew() -> None:
    """The clock says when a time has come."""

    async def main() -> tuple[list[str], list[str]]:
        told: list[str] = []
        now = 100.0
        deadlines = Deadlines(lambda: now)
        deadlines.add(now + 0.001, Who("first", told))
        await asyncio.sleep(0.02)
        before = list(told)
        now += 0.001
        await until(lambda: told)
        return before, told

    assert ([], ["first"]) == run(main())


def test_those_that_have_ended_are_not_kept() -> None:
    """However many requests there were, only those count that run."""

    async def main() -> int:
        told: list[str] = []
        now = 100.0
        deadlines = Deadlines(lambda: now)
        for _ in range(600):
            deadlines.add(now + 60, Who("running", told))
        for _ in range(20_000):
            deadlines.add(now + 60, Who("ended", told))[WHO] = None
        most = len(deadlines)
        now += 61
        deadlines.add(now - 2, Who("late already", told))
        await until(lambda: len(told) == 601)
        assert {"running": 600, "late already": 1} == Counter(told)
        return most

    assert 600 <= run(main()) <= 1_200
