"""One timer for many deadlines."""

from __future__ import annotations

import asyncio

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


def test_those_that_have_ended_are_not_kept() -> None:
    """However many requests there were, only those count that run."""

    async def main() -> int:
        told: list[str] = []
        deadlines = Deadlines(world.now)
        running = [deadlines.add(world.now() + 60, Who("running", told)) for _ in range(600)]
        for _ in range(20_000):
            deadlines.add(world.now() + 60, Who("ended", told))[WHO] = None
        most = len(deadlines)
        deadlines.close()
        assert all(each[WHO] is not None for each in running)
        return most

    assert 600 <= run(main()) <= 1_200
