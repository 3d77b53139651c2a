"""Attempt blocks: their results, `async with`, and blocks that are abandoned or entered twice."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tarry
from tarry import Downstream
from tarry.testing import VirtualClock
from tests.runtime.drivers import FAIL, OK, Dependency, Step


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


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_async_with_is_retried(clock: VirtualClock, loop: str) -> None:
    """The body of `async with attempt:` is retried after errors, timeouts and rejected results."""
    slow, stale, fresh = Step(duration_s=5), Step("stale"), Step("fresh")
    dependency = Dependency(clock, FAIL, slow, stale, fresh)

    async def main() -> object:
        result: object = None
        async for attempt in tarry.attempts(
            on=ConnectionError, until=lambda result: result == "fresh", timeout=1
        ):
            async with attempt as entered:
                assert entered is attempt
                result = await dependency.acall()
                attempt.set_result(result)
        return result

    assert "fresh" == (clock.run if loop == "asyncio" else clock.run_trio)(main)
    assert 4 == len(dependency.starts)


def test_async_with_raises_the_last_error(clock: VirtualClock) -> None:
    async def main() -> None:
        async for attempt in tarry.attempts(on=ConnectionError, attempts=2):
            async with attempt:
                raise ConnectionError("refused")

    with pytest.raises(ConnectionError, match="refused") as caught:
        clock.run(main)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert 2 == record.attempts


def test_until_of_a_block_needs_a_result(clock: VirtualClock) -> None:
    """A block with `until` that sets no result raises an error, and its permit is released."""
    downstream = Downstream("payments", max_in_flight=1)

    with pytest.raises(tarry.ConfigurationError, match=r"call attempt\.set_result"):
        for attempt in tarry.attempts(until=bool, downstream=downstream):
            with attempt:
                pass

    assert "free" == tarry.call(lambda: "free", on=OSError, downstream=downstream)


def test_each_attempt_sets_its_own_result(clock: VirtualClock) -> None:
    """`until` does not see the result of an earlier attempt, and None is a result."""
    results = iter(["stale", None])
    seen: list[object] = []

    def is_none(result: object) -> bool:
        seen.append(result)
        return result is None

    for attempt in tarry.attempts(until=is_none):
        with attempt:
            attempt.set_result(next(results))

    assert ["stale", None] == seen


def test_result_without_until_is_accepted(clock: VirtualClock) -> None:
    """Without `until`, every result that a block sets is accepted."""
    dependency = Dependency(clock, OK)

    for attempt in tarry.attempts(on=ConnectionError):
        with attempt:
            dependency.call()
            attempt.set_result(None)

    assert [0] == dependency.starts


def test_rejected_result_that_is_caught_ends_the_loop(clock: VirtualClock) -> None:
    """A loop whose body catches `ResultNotAccepted` makes no further attempt."""
    caught = []

    for attempt in tarry.attempts(until=bool, attempts=2):
        try:
            with attempt:
                attempt.set_result("")
        except tarry.ResultNotAccepted as error:
            caught.append(error.result)

    assert [""] == caught
