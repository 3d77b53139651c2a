"""Bounds of a shutdown: tasks that ignore cancellations, and a process that does not end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from tarry.service.shutdown import GRACE_S, ShutdownWatchdog, cancel_and_wait, run_bounded
from tests.service.engine.harness import run


@pytest.fixture(autouse=True)
def run_async() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run coroutine functions on virtual time."""
    return run


async def ignore_cancellations(count: float) -> None:
    """Run until this coroutine was cancelled more than `count` times."""
    while True:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            count -= 1
            if count < 0:
                raise


async def test_an_ignored_cancellation_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """A task that ignores two cancellations ends after the third."""
    task = asyncio.ensure_future(ignore_cancellations(2))
    await asyncio.sleep(0)
    await cancel_and_wait([task])
    assert task.cancelled()
    assert [] == caplog.messages


async def test_a_task_that_never_ends_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the task that is still running after several cancellations."""
    task = asyncio.ensure_future(ignore_cancellations(10))
    future = asyncio.get_running_loop().create_future()
    await asyncio.sleep(0)
    await cancel_and_wait([task, future])
    assert (False, True) == (task.done(), future.cancelled())
    for _ in range(10):
        task.cancel()
        await asyncio.sleep(0)
    assert ["shutdown continues without tasks that do not end: ignore_cancellations"] == (
        caplog.messages
    )


async def test_a_step_that_hangs_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """A step is cancelled after its timeout, and False is returned."""
    assert not await run_bounded(ignore_cancellations(0), 3.0)
    assert ["shutdown step took longer than 3.0 s: ignore_cancellations"] == caplog.messages


async def test_a_step_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An error of a step does not prevent the next steps."""

    async def fail() -> None:
        raise OSError("connection lost")

    assert await run_bounded(fail(), 3.0)
    assert await run_bounded(asyncio.sleep(1.0), 3.0)
    [record] = caplog.records
    assert "shutdown step failed: " in record.getMessage()
    assert record.exc_info is not None
    assert "connection lost" == str(record.exc_info[1])


@pytest.mark.parametrize("has_loop", [True, False])
async def test_the_watchdog_ends_the_process(
    has_loop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After its timeout, the watchdog logs the running tasks, and exits with its code."""
    sleeps: list[float] = []
    codes: list[int] = []

    exited = asyncio.Event()
    loop = asyncio.get_running_loop()

    def exit_process(code: int) -> None:
        codes.append(code)
        loop.call_soon_threadsafe(exited.set)

    watchdog = ShutdownWatchdog(GRACE_S, 4, exit_process=exit_process, sleep=sleeps.append)
    watchdog.loop = loop if has_loop else None
    task = asyncio.ensure_future(ignore_cancellations(0))
    watchdog.start()
    watchdog.start()
    await exited.wait()
    task.cancel()
    assert [4] == codes
    assert GRACE_S == pytest.approx(sum(sleeps))
    [message] = caplog.messages
    assert "shutdown not complete after 5 s, exiting" in message
    assert ("ignore_cancellations" if has_loop else "Abandoned: threads") in message


def test_the_watchdog_does_not_wait_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends although its log blocks."""
    monkeypatch.setattr("tarry.service.shutdown._MAX_LOG_S", 0.01)
    exited, unblocked = threading.Event(), threading.Event()
    watchdog = ShutdownWatchdog(
        0.0, 4, exit_process=lambda _code: exited.set(), sleep=lambda _seconds: None
    )
    monkeypatch.setattr(watchdog, "_log_abandoned", unblocked.wait)

    watchdog.start()
    exited.wait()
    unblocked.set()
