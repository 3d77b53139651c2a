"""Generators are retried until their first item; afterwards all calls are passed through."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest

import tarry
from tarry import Downstream
from tarry.testing import VirtualClock

retry = tarry.retry(on=ConnectionError)
both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])


class GeneratorLog:
    """Records the starts of a generator, and the values and errors that it receives."""

    def __init__(self, failures: int = 1) -> None:
        self.entries: list[object] = []
        self.failures = failures

    def begin(self) -> None:
        """Record a start, and fail as often as configured."""
        self.entries.append("begin")
        if self.failures:
            self.failures -= 1
            raise ConnectionError


def log_generator(log: GeneratorLog) -> Generator[str, str, str]:
    """Yield items; log each value and error that the caller sends."""
    log.begin()
    try:
        while True:
            try:
                sent = yield "item"
            except ValueError as error:
                log.entries.append(error)
                continue
            log.entries.append(sent)
            if sent == "stop":
                return "returned"
    finally:
        log.entries.append("closed")


async def async_log_generator(log: GeneratorLog) -> AsyncGenerator[str, str]:
    """Yield items; log each value and error that the caller sends."""
    log.begin()
    try:
        while True:
            try:
                sent = yield "item"
            except ValueError as error:
                log.entries.append(error)
                continue
            log.entries.append(sent)
            if sent == "stop":
                return
    finally:
        log.entries.append("closed")


# --- generators -----------------------------------------------------------------------------------


def test_nothing_runs_before_the_first_item_is_requested(clock: VirtualClock) -> None:
    """Calling a decorated generator function runs none of its body."""
    log = GeneratorLog()

    generator = retry(log_generator)(log)

    assert [] == log.entries
    assert "item" == next(generator)
    assert ["begin", "begin"] == log.entries
    generator.close()


def test_sent_values_and_return_value(clock: VirtualClock) -> None:
    """Sent values reach the generator, and its return value reaches the caller."""
    log = GeneratorLog()
    generator = retry(log_generator)(log)

    next(generator)
    assert "item" == generator.send("one")
    assert "item" == next(generator)
    with pytest.raises(StopIteration) as stopped:
        generator.send("stop")

    assert "returned" == stopped.value.value
    assert ["begin", "begin", "one", None, "stop", "closed"] == log.entries


def test_thrown_errors(clock: VirtualClock) -> None:
    """A thrown error reaches the generator as the same object."""
    log = GeneratorLog(failures=0)
    generator = retry(log_generator)(log)
    error = ValueError("thrown")

    next(generator)
    assert "item" == generator.throw(error)

    assert error is log.entries[-1]
    generator.close()


def test_thrown_error_that_is_not_caught(clock: VirtualClock) -> None:
    """A thrown error that the generator does not catch is raised, and not retried."""
    log = GeneratorLog(failures=0)
    generator = retry(log_generator)(log)
    next(generator)

    with pytest.raises(ConnectionError, match="thrown") as caught:
        generator.throw(ConnectionError("thrown"))

    assert None is caught.value.__context__
    assert not hasattr(caught.value, "__notes__")
    assert ["begin", "closed"] == log.entries


@pytest.mark.parametrize("kind", [KeyboardInterrupt, StopIteration])
def test_special_errors_behave_as_without_retries(
    kind: type[BaseException], clock: VirtualClock
) -> None:
    """KeyboardInterrupt and StopIteration behave as without retries."""
    error_types = []
    for function in (log_generator, retry(log_generator)):
        generator = function(GeneratorLog(failures=0))
        next(generator)
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
            generator.throw(kind())
        error_types.append(type(caught.value))

    assert error_types[0] is error_types[1]


def test_close_reaches_the_generator(clock: VirtualClock) -> None:
    """Closing the decorated generator closes the user's generator at once."""
    log = GeneratorLog(failures=0)
    generator = retry(log_generator)(log)
    next(generator)

    generator.close()

    assert ["begin", "closed"] == log.entries


def test_close_before_the_start(clock: VirtualClock) -> None:
    """A generator that is closed before its start never runs."""
    log = GeneratorLog(failures=0)

    retry(log_generator)(log).close()

    assert [] == log.entries


def test_close_that_is_ignored(clock: VirtualClock) -> None:
    """A generator that yields when it is closed raises RuntimeError, as without retries."""

    @retry
    def yield_when_closed() -> Generator[int]:
        try:
            yield 1
        finally:
            yield 2

    generator = yield_when_closed()
    next(generator)

    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        generator.close()


def test_error_after_the_first_item_is_not_retried(clock: VirtualClock) -> None:
    starts = 0

    @retry
    def stream() -> Generator[int]:
        nonlocal starts
        starts += 1
        yield 1
        raise ConnectionError

    items = []
    with pytest.raises(ConnectionError):
        for item in stream():
            items.append(item)  # noqa: PERF402 - the error comes in between

    assert ([1], 1) == (items, starts)


def test_generator_without_items(clock: VirtualClock) -> None:
    """A generator that ends without an item is a success with a return value."""
    calls = 0

    @retry
    def empty() -> Generator[int, None, str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError
        return "returned"
        yield

    def outer() -> Generator[int, None, str]:
        return (yield from empty())

    with pytest.raises(StopIteration) as stopped:
        next(outer())

    assert "returned" == stopped.value.value


def test_permit_is_released_after_the_first_item(clock: VirtualClock) -> None:
    """A generator holds no permit after its first item, which ends the call."""
    payments = Downstream("payments", max_in_flight=1)
    decorated = tarry.retry(on=ConnectionError, downstream=payments)(log_generator)
    first, second = decorated(GeneratorLog(failures=0)), decorated(GeneratorLog(failures=0))

    assert ("item", "item") == (next(first), next(second))
    first.close()
    second.close()


# --- async generators -----------------------------------------------------------------------------


@both_loops
def test_async_sent_values_and_end(loop: str, clock: VirtualClock) -> None:
    """Sent values reach an async generator, and StopAsyncIteration reaches the caller."""
    log = GeneratorLog()

    async def main() -> None:
        generator = retry(async_log_generator)(log)
        assert [] == log.entries
        assert "item" == await anext(generator)
        assert "item" == await generator.asend("one")
        with pytest.raises(StopAsyncIteration):
            await generator.asend("stop")

    (clock.run if loop == "asyncio" else clock.run_trio)(main)

    assert ["begin", "begin", "one", "stop", "closed"] == log.entries


@both_loops
def test_async_thrown_errors(loop: str, clock: VirtualClock) -> None:
    """A thrown error reaches an async generator, and is raised if not caught."""
    log = GeneratorLog(failures=0)
    error = ValueError("thrown")

    async def main() -> None:
        generator = retry(async_log_generator)(log)
        await anext(generator)
        assert "item" == await generator.athrow(error)
        with pytest.raises(ConnectionError, match="second") as caught:
            await generator.athrow(ConnectionError("second"))
        assert not hasattr(caught.value, "__notes__")

    (clock.run if loop == "asyncio" else clock.run_trio)(main)

    assert ["begin", error, "closed"] == log.entries


@both_loops
def test_async_close(loop: str, clock: VirtualClock) -> None:
    """Closing the decorated async generator closes the user's generator at once."""
    log = GeneratorLog(failures=0)

    async def main() -> None:
        generator = retry(async_log_generator)(log)
        await anext(generator)
        await generator.aclose()
        assert ["begin", "closed"] == log.entries

    (clock.run if loop == "asyncio" else clock.run_trio)(main)


@both_loops
def test_async_error_after_the_first_item_is_not_retried(loop: str, clock: VirtualClock) -> None:
    starts = 0

    @retry
    async def stream() -> AsyncGenerator[int]:
        nonlocal starts
        starts += 1
        yield 1
        raise ConnectionError

    async def main() -> None:
        items = []
        with pytest.raises(ConnectionError):
            async for item in stream():
                items.append(item)  # noqa: PERF401 - the error comes in between
        assert ([1], 1) == (items, starts)

    (clock.run if loop == "asyncio" else clock.run_trio)(main)


@both_loops
def test_async_generator_without_items(loop: str, clock: VirtualClock) -> None:
    calls = 0

    @retry
    async def empty() -> AsyncGenerator[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError
        return
        yield

    async def main() -> list[int]:
        return [item async for item in empty()]

    assert [] == (clock.run if loop == "asyncio" else clock.run_trio)(main)
    assert 2 == calls
