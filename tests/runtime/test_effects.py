"""Durations that the operating system cannot represent."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import trio

import tarry
from tarry import Hint, Kind, Outcome, Policy
from tarry.runtime.effects import effects

HUGE_S = 1e11
"""More than the operating system can wait for."""


def ask_for_huge_wait(error: Exception) -> Outcome:
    """Return the outcome of a response with a Retry-After of about 3,000 years."""
    return Outcome(Kind.TRANSIENT, Hint(HUGE_S))


class Loader:
    """A function that fails at its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def load(self) -> int:
        """Fail at the first call; return the number of the call afterwards."""
        self.calls += 1
        if self.calls == 1:
            raise OSError
        return self.calls


def test_huge_delay_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay that the system cannot represent is shortened to the longest possible delay."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if seconds > threading.TIMEOUT_MAX:
            raise OverflowError
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)

    assert 2 == tarry.call(Loader().load, on=ask_for_huge_wait, policy=Policy(max_hint=1e12))
    assert [threading.TIMEOUT_MAX] == slept


def test_huge_delay_can_be_cancelled_by_a_token() -> None:
    """A `CancelToken` ends a wait that the system cannot represent."""
    token = tarry.CancelToken()
    threading.Timer(0.02, token.cancel).start()

    with pytest.raises(tarry.Cancelled):
        tarry.call(Loader().load, on=ask_for_huge_wait, policy=Policy(max_hint=1e12), cancel=token)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_huge_delay_of_a_coroutine_can_be_cancelled(loop: str) -> None:
    """A coroutine that waits for a very long time can be cancelled."""
    loader = Loader()

    async def load() -> int:
        return loader.load()

    async def main() -> None:
        wait = tarry.retry(on=ask_for_huge_wait, policy=Policy(max_hint=1e12))(load)
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

    assert 1 == loader.calls


def test_huge_timeouts_of_plain_functions() -> None:
    """A very long timeout, deadline or hedging delay has no effect."""
    policy = Policy(total_budget=HUGE_S)
    result = tarry.call(lambda: 1, on=OSError, timeout=HUGE_S, deadline=HUGE_S, policy=policy)

    assert 1 == result
    assert 2 == tarry.hedge_sync(lambda: 2, after=HUGE_S)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_huge_timeouts_of_coroutines(loop: str) -> None:
    """A very long timeout, deadline or hedging delay of a coroutine has no effect."""

    async def load() -> int:
        await effects.async_sleep(0)
        return 1

    async def main() -> list[int]:
        results = [
            await tarry.acall(load, on=OSError, timeout=HUGE_S, deadline=HUGE_S),
            await tarry.hedge(load, after=HUGE_S),
        ]
        async for attempt in tarry.attempts(on=OSError, timeout=HUGE_S):
            with attempt:
                results.append(await load())
        return results

    assert [1, 1, 1] == (trio.run(main) if loop == "trio" else asyncio.run(main()))
