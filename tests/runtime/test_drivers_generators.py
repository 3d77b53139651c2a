"""Generators are retried until their first item; from then on everything passes through."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest

import tarry
from tarry import Downstream
from tarry.testing import VirtualClock

retry = tarry.retry(on=ConnectionError)
both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])


class Log:
    """What happens inside a generator, in order."""

    def __init__(self, failures: int = 1) -> None:
        self.entries: list[object] = []
        self.failures = failures

    def begin(self) -> None:
        """Fail as often as was asked for."""
        self.entries.append("begin")
        if self.failures:
            self.failures -= 1
            raise ConnectionError


def plain(log: Log) -> Generator[str, str, str]:
    """Tell everything that is done to it."""
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


async def later(log: Log) -> AsyncGenerator[str, str]:
    """Tell everything that is done to it."""
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


# --- plain ----------------------------------------------------------------------------------------


def test_nothing_happens_before_the_first_item_is_asked_for(clock: VirtualClock) -> None:
    """Calling a decorated generator function runs none of its body."""
    log = Log()

    generator = retry(plain)(log)

    assert [] == log.entries
    assert "item" == next(generator)
    assert ["begin", "begin"] == log.entries
    generator.close()


def test_sent_values_and_return_value(clock: VirtualClock) -> None:
    """What is sent arrives, and what is returned comes back."""
    log = Log()
    generator = retry(plain)(log)

    next(generator)
    assert "item" == generator.send("one")
    assert "item" == next(generator)
    with pytest.raises(StopIteration) as ended:
        generator.send("stop")

    assert "returned" == ended.value.value
    assert ["begin", "begin", "one", None, "stop", "closed"] == log.entries


def test_thrown_errors(clock: VirtualClock) -> None:
    """An error that is thrown in arrives as the same object."""
    log = Log(failures=0)
    generator = retry(plain)(log)
    error = ValueError("thrown")

    next(generator)
    assert "item" == generator.throw(error)

    assert error is log.entries[-1]
    generator.close()


def test_thrown_error_that_is_not_caught(clock: VirtualClock) -> None:
    """An error that the generator does not catch comes out as it is, and is not retried."""
    log = Log(failures=0)
    generator = retry(plain)(log)
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
    """KeyboardInterrupt and StopIteration do what they do to a generator without retries."""
    ends = []
    for function in (plain, retry(plain)):
        generator = function(Log(failures=0))
        next(generator)
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
            generator.throw(kind())
        ends.append(type(caught.value))

    assert ends[0] is ends[1]


def test_close(clock: VirtualClock) -> None:
    """Closing the decorated generator closes the user's, at once."""
    log = Log(failures=0)
    generator = retry(plain)(log)
    next(generator)

    generator.close()

    assert ["begin", "closed"] == log.entries


def test_close_before_the_start(clock: VirtualClock) -> None:
    """A generator that is closed before its start never ran."""
    log = Log(failures=0)

    retry(plain)(log).close()

    assert [] == log.entries


def test_close_that_is_ignored(clock: VirtualClock) -> None:
    """A generator that yields when it is closed is a RuntimeError, as without retries."""

    @retry
    def stubborn() -> Generator[int]:
        try:
            yield 1
        finally:
            yield 2

    generator = stubborn()
    next(generator)

    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        generator.close()


def test_error_after_the_first_item_is_the_callers(clock: VirtualClock) -> None:
    """A generator that fails later is not begun again: its items cannot be taken back."""
    begun = 0

    @retry
    def stream() -> Generator[int]:
        nonlocal begun
        begun += 1
        yield 1
        raise ConnectionError

    items = []
    with pytest.raises(ConnectionError):
        for item in stream():
            items.append(item)  # noqa: PERF402 - the error comes in between

    assert ([1], 1) == (items, begun)


def test_generator_without_items(clock: VirtualClock) -> None:
    """A generator that ends without an item is a success, and its return value arrives."""
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

    with pytest.raises(StopIteration) as ended:
        next(outer())

    assert "returned" == ended.value.value


def test_place_is_free_after_the_first_item(clock: VirtualClock) -> None:
    """A generator that is being read holds no place: its call is over with the first item."""
    payments = Downstream("payments", max_in_flight=1)
    decorated = tarry.retry(on=ConnectionError, downstream=payments)(plain)
    first, second = decorated(Log(failures=0)), decorated(Log(failures=0))

    assert ("item", "item") == (next(first), next(second))
    first.close()
    second.close()


# --- async ----------------------------------------------------------------------------------------


@both_loops
def test_async_sent_values(loop: str, clock: VirtualClock) -> None:
    """What is sent to an async generator arrives, and its end comes through."""
    log = Log()

    async def main() -> None:
        generator = retry(later)(log)
        assert [] == log.entries
        assert "item" == await anext(generator)
        assert "item" == await generator.asend("one")
        with pytest.raises(StopAsyncIteration):
            await generator.asend("stop")

    (clock.run if loop == "asyncio" else clock.run_trio)(main)

    assert ["begin", "begin", "one", "stop", "closed"] == log.entries


@both_loops
def test_async_thrown_errors(loop: str, clock: VirtualClock) -> None:
    """An error that is thrown into an async generator arrives, or comes out as it is."""
    log = Log(failures=0)
    error = ValueError("thrown")

    async def main() -> None:
        generator = retry(later)(log)
        await anext(generator)
        assert "item" == await generator.athrow(error)
        with pytest.raises(ConnectionError, match="second") as caught:
            await generator.athrow(ConnectionError("second"))
        assert not hasattr(caught.value, "__notes__")

    (clock.run if loop == "asyncio" else clock.run_trio)(main)

    assert ["begin", error, "closed"] == log.entries


@both_loops
def test_async_close(loop: str, clock: VirtualClock) -> None:
    """Closing the decorated async generator closes the user's, at once."""
    log = Log(failures=0)

    async def main() -> None:
        generator = retry(later)(log)
        await anext(generator)
        await generator.aclose()
        assert ["begin", "closed"] == log.entries

    (clock.run if loop == "asyncio" else clock.run_trio)(main)


@both_loops
def test_async_error_after_the_first_item_is_the_callers(loop: str, clock: VirtualClock) -> None:
    """An async generator that fails later is not begun again."""
    begun = 0

    @retry
    async def stream() -> AsyncGenerator[int]:
        nonlocal begun
        begun += 1
        yield 1
        raise ConnectionError

    async def main() -> None:
        items = []
        with pytest.raises(ConnectionError):
            async for item in stream():
                items.append(item)  # noqa: PERF401 - the error comes in between
        assert ([1], 1) == (items, begun)

    (clock.run if loop == "asyncio" else clock.run_trio)(main)


@both_loops
def test_async_generator_without_items(loop: str, clock: VirtualClock) -> None:
    """An async generator that ends without an item is a success."""
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
