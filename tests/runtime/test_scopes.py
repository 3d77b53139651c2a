"""Deadlines that are left in another order or context than they were entered."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextvars import Context, copy_context
from typing import Any

import pytest

import tarry
from tarry.testing import VirtualClock


@pytest.fixture(autouse=True)
def _no_deadline() -> None:
    assert tarry.remaining() is None


@tarry.retry(on=OSError, deadline=60)
def stream() -> Generator[float | None]:
    """Yield the remaining time twice inside a deadline."""
    with tarry.deadline(5):
        yield tarry.remaining()
        yield tarry.remaining()


def test_generator_removes_its_deadline_at_its_end(clock: VirtualClock) -> None:
    assert [5.0, 5.0] == [None if left is None else round(left, 6) for left in stream()]
    assert tarry.remaining() is None


def test_closed_generator_removes_its_deadline(clock: VirtualClock) -> None:
    generator = stream()
    next(generator)
    generator.close()

    assert tarry.remaining() is None


def test_failed_generator_removes_its_deadline(clock: VirtualClock) -> None:
    """An error thrown into a generator inside a deadline removes the deadline."""
    generator = stream()
    next(generator)
    with pytest.raises(LookupError):
        generator.throw(LookupError())

    assert tarry.remaining() is None


def yield_in_attempt(deadline: float) -> Generator[float | None]:
    """Yield the remaining time inside an attempt with a deadline."""
    for attempt in tarry.attempts(on=OSError, deadline=deadline):
        with attempt:
            yield tarry.remaining()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "out of order"])
def test_interleaved_generators(clock: VirtualClock, order: tuple[int, int]) -> None:
    """Two interleaved generators leave no deadline, in either order of closing."""
    generators = [yield_in_attempt(5), yield_in_attempt(3)]
    assert [5.0, 3.0] == [round(next(generator) or 0, 6) for generator in generators]

    for index in order:
        generators[index].close()

    assert tarry.remaining() is None


@pytest.mark.parametrize(("closed", "left"), [(0, 3.0), (1, 5.0)])
def test_closed_generator_removes_only_its_own_deadline(
    clock: VirtualClock, closed: int, left: float
) -> None:
    """Of two interleaved generators, the open one keeps its deadline."""
    generators = [yield_in_attempt(5), yield_in_attempt(3)]
    for generator in generators:
        next(generator)

    generators[closed].close()

    assert left == round(tarry.remaining() or 0, 6)
    generators[1 - closed].close()
    assert tarry.remaining() is None


def test_deadline_left_in_another_context(clock: VirtualClock) -> None:
    """A deadline entered in one context and left in another raises nothing."""
    context, manager = Context(), tarry.deadline(5)

    context.run(manager.__enter__)
    manager.__exit__(None, None, None)

    assert tarry.remaining() is None


def test_block_left_in_another_context(clock: VirtualClock) -> None:
    """A plain block entered in one context and left in another raises nothing."""
    context = Context()
    block = next(iter(tarry.attempts(on=OSError, deadline=5)))

    context.run(block.__enter__)
    assert False is block.__exit__(None, None, None)

    assert (True, None) == (block.is_last, tarry.remaining())


def active_timers(loop: Any) -> list[asyncio.TimerHandle]:
    """Return the timers of an event loop that are not cancelled."""
    return [timer for timer in loop._scheduled if not timer.cancelled()]


def test_async_block_left_in_another_context(clock: VirtualClock) -> None:
    """An async block that is left in another context raises nothing and cancels its timer."""

    async def main() -> tuple[bool | None, int, int, float | None]:
        loop = asyncio.get_running_loop()
        block = await anext(aiter(tarry.attempts(on=OSError, deadline=5, timeout=3)))
        Context().run(block.__enter__)
        before = len(active_timers(loop))
        assert False is copy_context().run(block.__exit__, None, None, None)
        return block.is_last, before, len(active_timers(loop)), tarry.remaining()

    assert (True, 1, 0, None) == clock.run(main)


class NeverReady:
    """An awaitable that never completes."""

    def __await__(self) -> Generator[None]:
        yield


@pytest.mark.parametrize("form", ["call", "block", "deadline"])
def test_coroutine_closed_from_another_context(clock: VirtualClock, form: str) -> None:
    """A coroutine closed from another context leaves no timer and no deadline."""

    async def wait() -> None:
        await NeverReady()

    async def in_block() -> None:
        async for attempt in tarry.attempts(on=OSError, deadline=5, timeout=3):
            with attempt:
                await NeverReady()

    async def in_deadline() -> None:
        with tarry.deadline(5):
            await tarry.acall(wait, on=OSError, timeout=3)

    async def main() -> tuple[int, int, float | None]:
        loop = asyncio.get_running_loop()
        coroutine = {
            "call": lambda: tarry.acall(wait, on=OSError, deadline=5, timeout=3),
            "block": in_block,
            "deadline": in_deadline,
        }[form]()
        Context().run(coroutine.send, None)
        before = len(active_timers(loop))
        coroutine.close()
        return before, len(active_timers(loop)), tarry.remaining()

    assert (1, 0, None) == clock.run(main)
