"""Attempt blocks that are abandoned, garbage collected or entered twice."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tarry
from tarry import Downstream
from tarry.testing import VirtualClock


class Cycle:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self, *references: object) -> None:
        self.references = (self, *references)


class CollectingLimiter:
    """A limiter that collects garbage while the downstream's lock is held."""

    def acquire(self, now: float) -> float | None:
        """Admit every attempt."""
        gc.collect()
        return 0.0

    def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
        """Do nothing."""

    def on_recovery(self, now: float) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def abandon_attempt(clock: VirtualClock, downstream: Downstream, form: str) -> None:
    """Begin an attempt, never enter it, and drop it inside a reference cycle."""
    attempts = tarry.attempts(on=OSError, downstream=downstream)

    async def main() -> None:
        iterator = aiter(attempts)
        Cycle(iterator, await anext(iterator))

    if form == "sync":
        iterator = iter(attempts)
        Cycle(iterator, next(iterator))
    else:
        clock.run(main)


@pytest.mark.parametrize("form", ["sync", "async"])
def test_collected_block_releases_its_permit(clock: VirtualClock, form: str) -> None:
    """A block that was begun, never entered and garbage collected releases its permit."""
    downstream = Downstream("payments", max_in_flight=1)
    abandon_attempt(clock, downstream, form)
    with pytest.raises(tarry.LimitReached):
        tarry.call(lambda: None, on=OSError, downstream=downstream)

    gc.collect()

    assert "free" == tarry.call(lambda: "free", on=OSError, downstream=downstream)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("form", ["sync", "async"])
def test_block_collected_while_the_lock_is_held(clock: VirtualClock, form: str) -> None:
    """A block that is collected while its downstream's lock is held does not deadlock."""
    downstream = Downstream("payments", limiter=CollectingLimiter(), max_in_flight=2)
    abandon_attempt(clock, downstream, form)

    assert "done" == tarry.call(lambda: "done", on=OSError, downstream=downstream)
    # The next admission releases the permits of collected blocks: both slots are free again.
    attempts = [iter(tarry.attempts(on=OSError, downstream=downstream)) for _ in range(2)]
    assert [1, 1] == [next(iterator).number for iterator in attempts]
    assert 0 == len(downstream.abandoned_permits)


def test_block_is_entered_once() -> None:
    """Entering a block twice, inside or after its body, raises an error."""
    block = next(iter(tarry.attempts(on=OSError)))

    with block, pytest.raises(tarry.ConfigurationError, match="entered only once"):
        block.__enter__()
    with pytest.raises(tarry.ConfigurationError, match="entered only once"), block:
        raise AssertionError


def test_second_entry_releases_the_permit(clock: VirtualClock) -> None:
    """A block that was entered twice releases its permit."""
    downstream = Downstream("payments", max_in_flight=1)

    with pytest.raises(tarry.ConfigurationError):
        for attempt in tarry.attempts(on=OSError, downstream=downstream):
            with attempt, attempt:
                pass

    assert "free" == tarry.call(lambda: "free", on=OSError, downstream=downstream)


def test_async_block_is_entered_once(clock: VirtualClock) -> None:
    """Entering an async block twice raises an error, and its deadline is removed."""

    async def main() -> float | None:
        with pytest.raises(tarry.ConfigurationError, match="entered only once"):
            async for attempt in tarry.attempts(on=OSError, timeout=3):
                with attempt, attempt:
                    pass
        return tarry.remaining()

    assert clock.run(main) is None
