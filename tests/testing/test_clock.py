"""Tests for the virtual clock, which waits of synchronous code, asyncio and trio advance."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import tarry
from tarry import Downstream
from tarry.testing import VirtualClock, scripted_random
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver, async_sleep, elapsed_s

both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])
DAY_S = 86_400.0


def run(clock: VirtualClock, loop: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function in virtual time."""
    return (clock.run if loop == "asyncio" else clock.run_trio)(main)


def test_only_waits_advance_the_clock() -> None:
    """Real time does not advance the virtual clock."""
    with VirtualClock() as clock:
        time.sleep(0.002)

        assert 0 == clock.elapsed


def test_advance() -> None:
    """`advance` changes the time for all code that reads the clock."""
    with VirtualClock() as clock, tarry.deadline(10):
        before = clock.now()
        clock.advance(4)

        assert 4 == pytest.approx(clock.elapsed)
        assert before + 4 == clock.now()
        assert 6 == pytest.approx(tarry.remaining())


def test_clock_cannot_be_set_back() -> None:
    """`advance` rejects a negative number of seconds."""
    with pytest.raises(tarry.ConfigurationError, match="seconds must be at least 0"):
        VirtualClock().advance(-1)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_waits_of_days_return_at_once(driver: Driver) -> None:
    policy = tarry.Policy(
        initial_delay=DAY_S, max_delay=DAY_S, backoff="fixed", jitter="none", max_attempts=8
    )
    with VirtualClock() as clock:
        dependency = Dependency(clock, *[FAIL] * 7, OK)
        driver.run(clock, dependency, policy=policy)

    assert [day * DAY_S for day in range(8)] == dependency.starts
    assert 7 * DAY_S == elapsed_s(clock)


def test_real_clock_is_restored() -> None:
    """After the block the real clock is restored, and the virtual clock keeps its time."""
    with VirtualClock() as clock:
        clock.advance(1000)
    with tarry.deadline(1000):
        remaining = tarry.remaining()

    assert remaining is not None
    assert 990 < remaining <= 1000
    assert 1000 == pytest.approx(clock.elapsed)


def test_real_clock_is_restored_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), VirtualClock() as clock:
        clock.advance(1000)
        raise ValueError("inside")

    with tarry.deadline(5), VirtualClock():
        remaining = tarry.remaining()

    assert remaining is not None
    assert 0 < remaining <= 5


def test_breaker_on_virtual_time() -> None:
    """An open breaker admits a call when `advance` reaches the end of its open period."""
    breaker = tarry.Breaker(consecutive=1, open_for=30, spread=0, probes=1)
    payments = Downstream("payments", breaker=breaker)
    with VirtualClock() as clock:
        with pytest.raises(ConnectionError):
            tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, downstream=payments)
        clock.advance(29)
        with pytest.raises(tarry.BreakerOpen):
            tarry.call(Dependency(clock, OK).call, on=ConnectionError, downstream=payments)
        clock.advance(1)

        assert "done" == tarry.call(
            Dependency(clock, OK).call, on=ConnectionError, downstream=payments
        )


# --- event loops ----------------------------------------------------------------------------------


@both_loops
def test_sleeps_of_the_loop_are_virtual(loop: str) -> None:
    """`asyncio.sleep` and `trio.sleep` take virtual time."""
    with VirtualClock() as clock:
        run(clock, loop, lambda: async_sleep(DAY_S))

        assert DAY_S == elapsed_s(clock)


@both_loops
def test_result_and_error(loop: str) -> None:
    """`run` returns the result of its coroutine, or raises its error."""

    async def return_seven() -> int:
        return 7

    async def fail() -> None:
        raise ValueError("inside")

    with VirtualClock() as clock:
        assert 7 == run(clock, loop, return_seven)
        with pytest.raises(ValueError, match="inside"):
            run(clock, loop, fail)


@both_loops
def test_tasks_wake_in_order(loop: str) -> None:
    """When all tasks wait, the clock jumps to the next timer, and tasks wake in order."""
    woken: list[tuple[int, float]] = []

    with VirtualClock() as clock:

        async def sleeper(seconds: int) -> None:
            await async_sleep(seconds)
            woken.append((seconds, elapsed_s(clock)))

        async def on_asyncio() -> None:
            await asyncio.gather(sleeper(3), sleeper(1), sleeper(2))

        async def on_trio() -> None:
            async with trio.open_nursery() as nursery:
                for seconds in (3, 1, 2):
                    nursery.start_soon(sleeper, seconds)

        run(clock, loop, on_asyncio if loop == "asyncio" else on_trio)

    assert [(1, 1), (2, 2), (3, 3)] == woken


@both_loops
def test_now_inside_a_loop(loop: str) -> None:
    """Inside a running loop `now` and `elapsed` advance by the same time."""
    with VirtualClock() as clock:
        before = clock.now()

        async def main() -> tuple[float, float]:
            await async_sleep(5)
            return clock.now() - before, clock.elapsed

        assert (pytest.approx(5), pytest.approx(5)) == run(clock, loop, main)


@both_loops
def test_advance_inside_a_loop(loop: str) -> None:
    """`advance` inside a running loop adds to the time that later sleeps take."""
    with VirtualClock() as clock, tarry.deadline(10):

        async def main() -> float | None:
            clock.advance(4)
            await async_sleep(1)
            return tarry.remaining()

        assert pytest.approx(5) == run(clock, loop, main)
        assert pytest.approx(5) == clock.elapsed


@both_loops
def test_successive_loops_share_the_time(loop: str) -> None:
    """Synchronous waits and successive loops advance the same clock."""
    with VirtualClock() as clock, scripted_random([0.5]):
        run(clock, loop, lambda: async_sleep(1))
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)
        run(clock, loop, lambda: async_sleep(1))

        assert 2.05 == elapsed_s(clock)


@both_loops
def test_timeouts_of_the_loop_are_virtual(loop: str) -> None:
    """Timeouts of asyncio and trio use virtual time."""

    async def on_asyncio() -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(10)

    async def on_trio() -> None:
        with trio.fail_after(5):
            await trio.sleep(10)

    with VirtualClock() as clock:
        with pytest.raises((TimeoutError, trio.TooSlowError)):
            run(clock, loop, on_asyncio if loop == "asyncio" else on_trio)

        assert 5 == elapsed_s(clock)


def test_asyncio_waits_for_threads() -> None:
    """A loop that only waits for a thread does not advance the clock."""
    release = threading.Event()

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        loop.call_soon(release.set)
        return await asyncio.to_thread(release.wait, 10)

    with VirtualClock() as clock:
        assert clock.run(main)
        assert 0 == clock.elapsed


def test_asyncio_can_be_woken_by_a_socket() -> None:
    """Real sockets work inside a loop in virtual time."""

    async def main() -> bytes:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            data = await reader.read()
            writer.close()
            await writer.wait_closed()
            return data

    with VirtualClock() as clock:
        assert b"hello" == clock.run(main)


@both_loops
def test_arguments_of_main(loop: str) -> None:
    """`run` and `run_trio` pass further arguments to the coroutine function."""

    async def main(seconds: float, result: str) -> str:
        await async_sleep(seconds)
        return result

    with VirtualClock() as clock:
        run = clock.run if loop == "asyncio" else clock.run_trio
        assert "done" == run(main, 3.0, "done")
        assert 3 == elapsed_s(clock)


def test_run_trio_without_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without trio, `run_trio` raises an error that names the extra."""
    monkeypatch.setitem(sys.modules, "trio", None)

    with VirtualClock() as clock, pytest.raises(tarry.MissingExtra, match=r"tarry\[trio\]"):
        clock.run_trio(lambda: async_sleep(1))


@both_loops
@pytest.mark.timeout(5)
def test_loops_after_a_year_of_virtual_time(loop: str) -> None:
    """Event loops work after more than a year of virtual time."""
    with VirtualClock() as clock:
        clock.advance(400 * DAY_S)
        run(clock, loop, lambda: async_sleep(0.1))

        assert 400 * DAY_S + 0.1 == pytest.approx(clock.elapsed, abs=1e-6)
