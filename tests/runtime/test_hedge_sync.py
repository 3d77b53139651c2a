"""Hedged calls of plain functions, and arguments that hedged calls reject.

Copies run in real threads, so the waits are real and short.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import tarry
from tarry import Downstream, HedgeFired, HedgeWon, Reason, Succeeded
from tarry.testing import VirtualClock, captured_events

LONG_S = 10.0
"""Longer than a test takes: a hedging delay that never elapses, or the limit of a hanging test."""
SHORT_S = 0.02


class Replica:
    """A function whose copy n returns or raises result n; the first copy waits for `release`."""

    def __init__(self, *results: object) -> None:
        self._results = results
        self._lock = threading.Lock()
        self.sent = 0
        self.release = threading.Event()
        self.threads: list[threading.Thread] = []

    def read(self) -> object:
        """Run one copy."""
        with self._lock:
            self.sent += 1
            number = self.sent
            self.threads.append(threading.current_thread())
        if number == 1:
            self.release.wait(LONG_S)
        result = self._results[min(number, len(self._results)) - 1]
        if isinstance(result, BaseException):
            raise result
        return result

    def finish(self) -> None:
        """Release the first copy and wait for all threads."""
        self.release.set()
        for thread in self.threads:
            thread.join(LONG_S)


def test_keyword_arguments() -> None:
    """The function gets `kwargs` as its keyword arguments."""

    def read(key: str, *, name: str = "") -> tuple[str, str]:
        return key, name

    assert ("key", "n") == tarry.hedge_sync(read, "key", kwargs={"name": "n"}, after=LONG_S)


def test_fast_call_needs_no_copy() -> None:
    """A fast call is sent once."""
    replica = Replica("first")
    replica.release.set()

    assert "first" == tarry.hedge_sync(replica.read, after=LONG_S)
    assert 1 == replica.sent


def test_slow_call_gets_a_copy() -> None:
    """The second copy wins, and the call does not wait for the first copy."""
    replica = Replica("first", "second")

    with captured_events() as events:
        assert "second" == tarry.hedge_sync(replica.read, after=SHORT_S, name="op")

    assert replica.threads[0].is_alive()
    replica.finish()
    assert [
        HedgeFired("op", None, 2),
        HedgeWon("op", None, 2),
        Succeeded("op", None, 2),
    ] == events


def test_permits_of_losers_are_released() -> None:
    """A copy that still runs after another has won uses no in-flight slot."""
    downstream = Downstream("replicas", max_in_flight=2)
    replica = Replica("first", "second", "third")
    tarry.hedge_sync(replica.read, after=SHORT_S, downstream=downstream)

    assert "third" == tarry.hedge_sync(replica.read, after=LONG_S, downstream=downstream)
    replica.finish()


def test_arguments_reach_the_function() -> None:
    def read(table: str, key: int) -> str:
        return f"{table}/{key}"

    assert "users/7" == tarry.hedge_sync(read, "users", 7, after=LONG_S)


def test_error_that_on_does_not_match_ends_the_call() -> None:
    replica = Replica("first", ValueError("bad input"))

    with pytest.raises(ValueError, match="bad input"):
        tarry.hedge_sync(replica.read, after=SHORT_S)

    replica.finish()


def test_error_that_on_matches_sends_the_next_copy_at_once() -> None:
    replica = Replica(ConnectionError(), "second")
    replica.release.set()

    assert "second" == tarry.hedge_sync(replica.read, after=LONG_S, on=ConnectionError)


def test_last_error_is_raised_when_every_copy_fails() -> None:
    replica = Replica(ConnectionError("first"), ConnectionError("second"))
    replica.release.set()

    with pytest.raises(ConnectionError, match="second") as caught:
        tarry.hedge_sync(replica.read, after=LONG_S, on=ConnectionError, name="op")

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (2, Reason.ATTEMPTS) == (record.attempts, record.reason)
    assert ["tarry: op gave up after 2 attempts: no attempts left"] == caught.value.__notes__


def test_base_exception_of_a_copy() -> None:
    """KeyboardInterrupt in a copy is raised by the call."""
    replica = Replica(KeyboardInterrupt())
    replica.release.set()

    with pytest.raises(KeyboardInterrupt):
        tarry.hedge_sync(replica.read, after=LONG_S, on=Exception)


def test_open_breaker_rejects_the_call() -> None:
    """An open breaker rejects the call before a thread is started."""
    downstream = Downstream("replicas", breaker=tarry.Breaker())
    downstream.force("open")
    replica = Replica("first")

    with pytest.raises(tarry.BreakerOpen):
        tarry.hedge_sync(replica.read, after=LONG_S, downstream=downstream)

    assert 0 == replica.sent


def test_percentile_sends_no_copy_without_samples() -> None:
    """Before 100 calls the percentile is unknown, and no copy is sent."""
    assert 1 == tarry.hedge_sync(lambda: 1, after="p50")


def test_call_ends_at_the_deadline() -> None:
    replica = Replica("first")

    with tarry.deadline(SHORT_S), pytest.raises(tarry.DeadlineExceeded):
        tarry.hedge_sync(replica.read, after=LONG_S)

    replica.finish()


def test_copies_see_the_deadline() -> None:
    """Inside the thread of a copy, `remaining` returns the time to the deadline."""
    with tarry.deadline(LONG_S):
        left = tarry.hedge_sync(tarry.remaining, after=LONG_S)

    assert left is not None
    assert 0 < left <= LONG_S


# --- invalid arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "after or max_extra_load must be given"),
        ({"after": "95"}, "after must be seconds or a percentile"),
        ({"after": "p0"}, "after must be seconds or a percentile"),
        ({"after": "p100"}, "after must be seconds or a percentile"),
        ({"after": -1}, "after must be at least 0"),
        ({"max_extra_load": 0}, "max_extra_load must be greater than 0"),
        ({"max_extra_load": 5}, "max_extra_load must be greater than 0 and at most 1"),
        ({"after": 1, "max_attempts": 1}, "max_attempts must be at least 2"),
        ({"after": 1, "on": KeyboardInterrupt}, "on must name subclasses of Exception"),
        ({"after": 1, "on": "ConnectionError"}, "on must be an exception type"),
        ({"after": 1, "downstream": "replicas"}, "downstream must be"),
        ({"after": 1, "policy": tarry.Policy()}, "but not both"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    """The error for an invalid argument names it, and no copy is sent."""
    calls = []

    async def read() -> None:
        calls.append(1)

    with pytest.raises(tarry.ConfigurationError, match=message):
        tarry.hedge_sync(lambda: calls.append(1), **options)
    with pytest.raises(tarry.ConfigurationError, match=message):
        asyncio.run(tarry.hedge(read, **options))

    assert [] == calls


def test_hedging_of_a_retried_function_is_rejected() -> None:
    """`retry(hedging=...)` is rejected: a call is retried or hedged, not both."""
    with pytest.raises(tarry.ConfigurationError, match="but not both"):
        tarry.retry(on=ConnectionError, hedging="p95")  # type: ignore[arg-type]


def test_coroutine_function_is_rejected(clock: VirtualClock) -> None:
    """The error of `hedge_sync` for a coroutine function names `hedge`."""

    async def read() -> None: ...

    invalid: Callable[[], Any] = read
    with pytest.raises(tarry.ConfigurationTypeError, match=r"tarry\.hedge\("):
        tarry.hedge_sync(invalid, after=1)
