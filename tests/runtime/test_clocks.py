"""Durations that the operating system cannot represent."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import trio

import tarry
from tarry import Hint, Kind, Outcome, Policy
from tarry.runtime.clocks import environment

HUGE = 1e11
"""Seconds: more than the system can wait for."""


def on(error: Exception) -> Outcome:
    """Return the outcome for a server that asks for a wait of 3,000 years."""
    return Outcome(Kind.TRANSIENT, Hint(HUGE))


class Once:
    """Fails at the first call."""

    def __init__(self) -> None:
        self.calls = 0

    def load(self) -> int:
        """Fail once, then return."""
        self.calls += 1
        if self.calls == 1:
            raise OSError
        return self.calls


def test_huge_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay that the system cannot represent is shortened to the longest it can."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if seconds > threading.TIMEOUT_MAX:
            raise OverflowError
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)

    assert 2 == tarry.call(Once().load, on=on, policy=Policy(max_hint=1e12))
    assert [threading.TIMEOUT_MAX] == slept


def test_huge_delay_with_a_cancel_token() -> None:
    """A wait that the system cannot represent can be cancelled."""
    token = tarry.CancelToken()
    threading.Timer(0.02, token.cancel).start()

    with pytest.raises(tarry.Cancelled):
        tarry.call(Once().load, on=on, policy=Policy(max_hint=1e12), cancel=token)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_huge_delay_of_a_coroutine(loop: str) -> None:
    """A coroutine that waits for a very long time can be cancelled."""
    once = Once()

    async def load() -> int:
        return once.load()

    async def main() -> None:
        wait = tarry.retry(on=on, policy=Policy(max_hint=1e12))(load)
        if loop == "trio":
            with trio.fail_after(0.02):
                await wait()
        else:
            async with asyncio.timeout(0.02):
                await wait()

    with pytest.raises((TimeoutError, trio.TooSlowError)):
        if loop == "trio":
            trio.run(main)
        else:
            asyncio.run(main())

    assert 1 == once.calls


def test_huge_timeouts_of_plain_code() -> None:
    """A very long timeout, deadline or hedging delay has no effect."""
    policy = Policy(total_budget=HUGE)
    answer = tarry.call(lambda: 1, on=OSError, timeout=HUGE, deadline=HUGE, policy=policy)

    assert 1 == answer
    assert 2 == tarry.hedge_sync(lambda: 2, after=HUGE)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_huge_timeouts_of_coroutines(loop: str) -> None:
    """A very long timeout, deadline or hedging delay of a coroutine has no effect."""

    async def load() -> int:
        await environment.async_sleep(0)
        return 1

    async def main() -> list[int]:
        answers = [
            await tarry.acall(load, on=OSError, timeout=HUGE, deadline=HUGE),
            await tarry.hedge(load, after=HUGE),
        ]
        async for attempt in tarry.attempts(on=OSError, timeout=HUGE):
            with attempt:
                answers.append(await load())
        return answers

    assert [1, 1, 1] == (trio.run(main) if loop == "trio" else asyncio.run(main()))
