"""Attempt blocks that are used in ways a `for` loop does not."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tarry
from tarry import Downstream
from tarry.testing import VirtualClock


class Cycle:
    """Holds itself, so that only the garbage collector ends it."""

    def __init__(self, *held: object) -> None:
        self.held = (self, *held)


class Collecting:
    """A limiter that collects garbage while the downstream's lock is held."""

    def acquire(self, now: float) -> float | None:
        """Let everything through."""
        gc.collect()
        return 0.0

    def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
        """Learn nothing."""

    def on_recovery(self, now: float) -> None:
        """Learn nothing."""


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leave_one(clock: VirtualClock, downstream: Downstream, form: str) -> None:
    """Begin an attempt, never enter it, and lose it in a cycle."""
    attempts = tarry.attempts(on=OSError, downstream=downstream)

    async def main() -> None:
        iterator = aiter(attempts)
        Cycle(iterator, await anext(iterator))

    if form == "plain":
        iterator = iter(attempts)
        Cycle(iterator, next(iterator))
    else:
        clock.run(main)


@pytest.mark.parametrize("form", ["plain", "async"])
def test_lost_block_gives_its_place_back(clock: VirtualClock, form: str) -> None:
    """A block that was begun, never entered and collected in a cycle gives its place back."""
    downstream = Downstream("payments", max_in_flight=1)
    leave_one(clock, downstream, form)
    with pytest.raises(tarry.LimitReached):
        tarry.call(lambda: None, on=OSError, downstream=downstream)

    gc.collect()

    assert "free" == tarry.call(lambda: "free", on=OSError, downstream=downstream)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("form", ["plain", "async"])
def test_block_lost_while_the_lock_is_held(clock: VirtualClock, form: str) -> None:
    """A block that is collected while its downstream's lock is held does not deadlock."""
    downstream = Downstream("payments", limiter=Collecting(), max_in_flight=2)
    leave_one(clock, downstream, form)

    assert "in" == tarry.call(lambda: "in", on=OSError, downstream=downstream)
    # The next who is let through finds what the finalizer left: both places are there again.
    attempts = [iter(tarry.attempts(on=OSError, downstream=downstream)) for _ in range(2)]
    assert [1, 1] == [next(iterator).number for iterator in attempts]
    assert 0 == len(downstream.abandoned_permits)


def test_block_is_entered_once() -> None:
    """To enter a block again, inside or after its body, is a mistake that is named."""
    block = next(iter(tarry.attempts(on=OSError)))

    with block, pytest.raises(tarry.ConfigurationError, match="entered once"):
        block.__enter__()
    with pytest.raises(tarry.ConfigurationError, match="entered once"), block:
        raise AssertionError


def test_second_entry_costs_no_place(clock: VirtualClock) -> None:
    """A block that was entered twice by mistake keeps no in-flight place."""
    downstream = Downstream("payments", max_in_flight=1)

    with pytest.raises(tarry.ConfigurationError):
        for attempt in tarry.attempts(on=OSError, downstream=downstream):
            with attempt, attempt:
                pass

    assert "free" == tarry.call(lambda: "free", on=OSError, downstream=downstream)


def test_async_block_is_entered_once(clock: VirtualClock) -> None:
    """To enter a block of a coroutine again is a mistake too, and its deadline is undone."""

    async def main() -> float | None:
        with pytest.raises(tarry.ConfigurationError, match="entered once"):
            async for attempt in tarry.attempts(on=OSError, timeout=3):
                with attempt, attempt:
                    pass
        return tarry.remaining()

    assert clock.run(main) is None
