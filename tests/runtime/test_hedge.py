"""Hedged calls of coroutine functions, on asyncio and trio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import tarry
from tarry import Downstream, GaveUp, HedgeFired, HedgeWon, Reason, Succeeded
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import async_sleep, elapsed_s

both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])


class FrameworkExit(BaseException):
    """A BaseException that a framework might raise."""


class Replica:
    """A function whose copy n has duration and result n of the plan; the last entry repeats."""

    def __init__(self, *plan: tuple[float, object]) -> None:
        self._plan = plan
        self.sent = 0
        self.cancelled: list[int] = []
        """The numbers of the cancelled copies."""

    async def read(self) -> object:
        """Run one copy."""
        self.sent += 1
        number = self.sent
        duration_s, result = self._plan[min(number, len(self._plan)) - 1]
        try:
            await async_sleep(duration_s)
        except BaseException:
            self.cancelled.append(number)
            raise
        if isinstance(result, BaseException):
            raise result
        return result


def run(clock: VirtualClock, loop: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function in virtual time."""
    return (clock.run if loop == "asyncio" else clock.run_trio)(main)


def call_hedged(clock: VirtualClock, loop: str, replica: Replica, **options: Any) -> Any:
    """Make one hedged call."""

    async def main() -> object:
        return await tarry.hedge(replica.read, **{"name": "op"} | options)

    return run(clock, loop, main)


# --- copies that are sent -------------------------------------------------------------------------


@both_loops
def test_fast_call_needs_no_copy(loop: str, clock: VirtualClock) -> None:
    """A fast call is sent once."""
    replica = Replica((0.05, "first"))

    assert "first" == call_hedged(clock, loop, replica, after=0.1)
    assert (1, 0.05) == (replica.sent, elapsed_s(clock))


@both_loops
def test_slow_call_gets_a_copy_and_the_loser_is_cancelled(loop: str, clock: VirtualClock) -> None:
    """The second copy wins, and the first is cancelled before the result is returned."""
    replica = Replica((10, "first"), (0.05, "second"))

    assert "second" == call_hedged(clock, loop, replica, after=0.1)
    assert (2, 0.15) == (replica.sent, elapsed_s(clock))
    assert [1] == replica.cancelled


@both_loops
def test_first_copy_may_win(loop: str, clock: VirtualClock) -> None:
    """The copy that finishes first wins, also if it is the first that was sent."""
    replica = Replica((0.12, "first"), (10, "second"))

    assert "first" == call_hedged(clock, loop, replica, after=0.1)
    assert [2] == replica.cancelled


@both_loops
def test_copies_are_sent_one_after_another(loop: str, clock: VirtualClock) -> None:
    replica = Replica((10, "first"), (10, "second"), (0.05, "third"))

    assert "third" == call_hedged(clock, loop, replica, after=0.1, max_attempts=3)
    assert 0.25 == elapsed_s(clock)
    assert [1, 2] == sorted(replica.cancelled)


@both_loops
def test_number_of_copies_is_limited(loop: str, clock: VirtualClock) -> None:
    """At most `max_attempts` copies are sent."""
    replica = Replica((10, "slow"))

    assert "slow" == call_hedged(clock, loop, replica, after=0.1, max_attempts=3)
    assert (3, 10) == (replica.sent, elapsed_s(clock))


@both_loops
def test_arguments_reach_every_copy(loop: str, clock: VirtualClock) -> None:
    seen = []

    async def read(table: str, key: int) -> int:
        seen.append((table, key))
        await async_sleep(1 / len(seen))
        return key

    assert 7 == run(clock, loop, lambda: tarry.hedge(read, "users", 7, after=0.1))
    assert [("users", 7)] * 2 == seen


@both_loops
def test_percentile_needs_a_hundred_calls(loop: str, clock: VirtualClock) -> None:
    """A percentile is not used before 100 calls; then it is the delay of the copy."""
    durations_s = [n / 100 for n in range(1, 101)]
    replica = Replica(
        *((duration_s, "sample") for duration_s in durations_s), (10, "slow"), (0.01, "copy")
    )
    downstream = Downstream("replicas")

    for _ in range(100):
        assert "sample" == call_hedged(clock, loop, replica, after="p95", downstream=downstream)
    before = elapsed_s(clock)
    result = call_hedged(clock, loop, replica, after="p95", downstream=downstream)

    assert ("copy", 102) == (result, replica.sent)
    assert 0.96 + 0.01 == pytest.approx(elapsed_s(clock) - before, abs=1e-5)


@both_loops
def test_percentile_is_kept_per_function(loop: str, clock: VirtualClock) -> None:
    """Without a downstream, latency is measured per function."""
    sent = 0

    async def read() -> int:
        nonlocal sent
        sent += 1
        await async_sleep(10 if sent == 101 else 0.01)
        return sent

    async def main() -> None:
        for _ in range(101):
            await tarry.hedge(read, after="p90")

    run(clock, loop, main)

    assert 102 == sent


@both_loops
def test_max_extra_load_limits_copies(loop: str, clock: VirtualClock) -> None:
    """Copies never add more load than `max_extra_load`."""
    downstream = Downstream("replicas")
    quick, slow = Replica((0.01, "quick")), Replica((10, "slow"))

    for _ in range(200):
        call_hedged(clock, loop, quick, max_extra_load=0.05, downstream=downstream)
    for _ in range(200):
        call_hedged(clock, loop, slow, max_extra_load=0.05, downstream=downstream)

    copies = quick.sent + slow.sent - 400
    assert 0 < copies <= 20


# --- copies that are not sent ---------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize(
    "downstream",
    [
        lambda: Downstream("replicas", budget=tarry.TokenBudget(capacity=1)),
        lambda: Downstream("replicas", max_in_flight=1),
    ],
    ids=["empty budget", "in-flight limit"],
)
def test_rejected_copy_does_not_fail_the_call(
    loop: str, downstream: Callable[[], Downstream], clock: VirtualClock
) -> None:
    """A copy that the budget or a limit rejects is not sent, and the first call continues."""
    replica = Replica((1, "first"), (0.01, "second"))

    assert "first" == call_hedged(clock, loop, replica, after=0.1, downstream=downstream())
    assert 1 == replica.sent


@both_loops
def test_copies_cost_tokens(loop: str, clock: VirtualClock) -> None:
    """A copy costs the same from the retry budget as a retry."""
    downstream = Downstream("replicas", budget=tarry.TokenBudget("aws-2020"))
    replica = Replica((10, ConnectionError("first")))

    with pytest.raises(ConnectionError, match="first"):
        call_hedged(clock, loop, replica, after=0.1, downstream=downstream)

    assert 495 == downstream.balance


@both_loops
def test_rate_limit_delays_copies(loop: str, clock: VirtualClock) -> None:
    downstream = Downstream("replicas", limiter=tarry.AdaptiveRate())
    throttled = tarry.Outcome(tarry.Kind.THROTTLED)
    replica = Replica((0, ConnectionError()), (0.5, "second"))

    # After the first throttle, the limiter allows one attempt in two seconds.
    assert "second" == call_hedged(
        clock, loop, replica, after=50, on=lambda _: throttled, downstream=downstream
    )
    assert 2.5 == elapsed_s(clock)


@both_loops
def test_open_breaker_rejects_the_call(loop: str, clock: VirtualClock) -> None:
    """An open breaker rejects the call before anything is sent."""
    downstream = Downstream("replicas", breaker=tarry.Breaker())
    downstream.force("open")
    replica = Replica((1, "first"))

    with pytest.raises(tarry.BreakerOpen) as caught:
        call_hedged(clock, loop, replica, after=0.1, downstream=downstream)

    assert "replicas" == caught.value.downstream
    assert 0 == replica.sent


@both_loops
def test_cause_of_a_breaker_error(loop: str, clock: VirtualClock) -> None:
    """The cause of a breaker error is the failure that opened the breaker."""
    downstream = Downstream("replicas", breaker=tarry.Breaker(consecutive=1))
    replica = Replica((0.1, ConnectionError("refused")))
    with pytest.raises(ConnectionError):
        call_hedged(clock, loop, replica, after=50, on=ConnectionError, downstream=downstream)

    with pytest.raises(tarry.BreakerOpen) as caught:
        call_hedged(clock, loop, replica, after=50, on=ConnectionError, downstream=downstream)

    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "refused" == str(caught.value.__cause__)


# --- errors ---------------------------------------------------------------------------------------


@both_loops
def test_error_that_on_does_not_match_ends_the_call(loop: str, clock: VirtualClock) -> None:
    """An error that `on` does not match ends the call, and the other copy is cancelled."""
    replica = Replica((10, "first"), (0.1, ValueError("bad input")))

    with pytest.raises(ValueError, match="bad input") as caught:
        call_hedged(clock, loop, replica, after=0.1, on=ConnectionError)

    assert [1] == replica.cancelled
    assert ["tarry: op gave up after 2 attempts: the error is not retryable"] == (
        caught.value.__notes__
    )


@both_loops
def test_error_that_on_matches_sends_the_next_copy_at_once(loop: str, clock: VirtualClock) -> None:
    replica = Replica((0.05, ConnectionError()), (0.01, "second"))

    assert "second" == call_hedged(clock, loop, replica, after=5, on=ConnectionError)
    assert 0.06 == elapsed_s(clock)


@both_loops
def test_error_of_one_copy_waits_for_the_other(loop: str, clock: VirtualClock) -> None:
    """While another copy runs, an error that `on` matches does not end the call."""
    replica = Replica((1, "first"), (0.1, ConnectionError()))

    assert "first" == call_hedged(clock, loop, replica, after=0.1, on=ConnectionError)
    assert 1 == elapsed_s(clock)


@both_loops
def test_last_error_is_raised_when_every_copy_fails(loop: str, clock: VirtualClock) -> None:
    replica = Replica((0.05, ConnectionError("first")), (0.05, ConnectionError("second")))

    with pytest.raises(ConnectionError, match="second") as caught:
        call_hedged(clock, loop, replica, after=5, on=ConnectionError)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert ("op", 2, Reason.ATTEMPTS) == (record.operation, record.attempts, record.reason)
    assert ["tarry: op gave up after 2 attempts: no attempts left"] == caught.value.__notes__


@both_loops
def test_failed_hedge_is_not_retried_by_an_outer_loop(loop: str, clock: VirtualClock) -> None:
    """A retry loop around a hedged call does not retry its final error."""
    replica = Replica((0.05, ConnectionError()))

    async def main() -> None:
        await tarry.acall(
            lambda: tarry.hedge(replica.read, after=5, on=ConnectionError), on=ConnectionError
        )

    with pytest.raises(ConnectionError):
        run(clock, loop, main)

    assert 2 == replica.sent


@both_loops
def test_record_survives_a_hedge(loop: str, clock: VirtualClock) -> None:
    """A hedge between two retry loops keeps the record, so the outer loop does not retry."""
    sent = 0

    @tarry.retry(on=ConnectionError, attempts=2)
    async def leaf() -> None:
        nonlocal sent
        sent += 1
        raise ConnectionError

    async def main() -> None:
        await tarry.acall(lambda: tarry.hedge(leaf, after=50), on=ConnectionError)

    with pytest.raises(ConnectionError):
        run(clock, loop, main)

    assert 2 == sent


# --- cancellation and deadlines -------------------------------------------------------------------


def cancel_after(
    clock: VirtualClock, loop: str, delay_s: float, call: Callable[[], Awaitable[Any]]
) -> None:
    """Run a call, cancel it after a delay, and check that it was cancelled."""

    async def on_asyncio() -> None:
        task = asyncio.ensure_future(call())
        asyncio.get_running_loop().call_later(delay_s, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    async def on_trio() -> None:
        with trio.move_on_after(delay_s) as scope:
            await call()
        assert scope.cancelled_caught

    run(clock, loop, on_asyncio if loop == "asyncio" else on_trio)


@both_loops
def test_cancelled_call_cancels_every_copy(loop: str, clock: VirtualClock) -> None:
    """A cancelled call cancels every copy, releases their permits and counts nothing."""
    downstream = Downstream(
        "replicas",
        breaker=tarry.Breaker(consecutive=1),
        budget=tarry.TokenBudget(),
        max_in_flight=2,
    )
    replica = Replica((10, "first"), (10, "second"), (0.01, "third"), (0.01, "fourth"))

    cancel_after(
        clock, loop, 0.5, lambda: tarry.hedge(replica.read, after=0.1, downstream=downstream)
    )

    assert [1, 2] == sorted(replica.cancelled)
    assert 0.5 == elapsed_s(clock)
    assert tarry.BreakerState.CLOSED == downstream.state
    assert "third" == call_hedged(clock, loop, replica, after=0.1, downstream=downstream)


@both_loops
def test_cancellation_is_not_recorded_as_latency(loop: str, clock: VirtualClock) -> None:
    """The duration of a cancelled call is not recorded as latency."""
    downstream = Downstream("replicas")
    replica = Replica((10, "slow"))

    cancel_after(
        clock, loop, 0.5, lambda: tarry.hedge(replica.read, after=1, downstream=downstream)
    )

    assert None is downstream.quantile(0.5)


@both_loops
@pytest.mark.parametrize("error_type", [FrameworkExit, KeyboardInterrupt])
def test_base_exception_of_a_copy(
    loop: str, error_type: type[BaseException], clock: VirtualClock
) -> None:
    """A BaseException of a copy is raised, and the other copy is cancelled."""
    replica = Replica((10, "first"), (0.1, error_type()))

    with pytest.raises(error_type):
        call_hedged(clock, loop, replica, after=0.1, on=Exception)

    assert [1] == replica.cancelled


@both_loops
def test_call_ends_at_the_deadline(loop: str, clock: VirtualClock) -> None:
    """A hedged call and its copies end at the deadline."""
    replica = Replica((10, "slow"))

    with tarry.deadline(1), pytest.raises(tarry.DeadlineExceeded) as caught:
        call_hedged(clock, loop, replica, after=0.1)

    assert "op: the deadline has passed" == str(caught.value)
    assert [1, 2] == sorted(replica.cancelled)
    assert 1 == elapsed_s(clock)


@both_loops
def test_deadline_that_has_passed(loop: str, clock: VirtualClock) -> None:
    """Nothing is sent after the deadline."""
    replica = Replica((0, "first"))

    with tarry.deadline(1):
        clock.advance(2)
        with pytest.raises(tarry.DeadlineExceeded):
            call_hedged(clock, loop, replica, after=0.1)

    assert 0 == replica.sent


@both_loops
def test_copies_see_the_deadline(loop: str, clock: VirtualClock) -> None:
    """Inside a copy, `remaining` returns the time to the deadline."""
    left: list[float | None] = []

    async def read() -> None:
        left.append(tarry.remaining())
        await async_sleep(0.5)

    with tarry.deadline(2):
        run(clock, loop, lambda: tarry.hedge(read, after=0.3))

    assert [pytest.approx(2), pytest.approx(1.7)] == left


# --- events ---------------------------------------------------------------------------------------


@both_loops
def test_events_of_a_copy_that_wins(loop: str, clock: VirtualClock) -> None:
    """A copy emits an event when it is sent and when it wins."""
    with captured_events() as events:
        call_hedged(clock, loop, Replica((10, 1), (0.1, 2)), after=0.1, downstream=Downstream("r"))

    assert [HedgeFired("op", "r", 2), HedgeWon("op", "r", 2), Succeeded("op", "r", 2)] == events


@both_loops
def test_events_of_giving_up(loop: str, clock: VirtualClock) -> None:
    """A hedged call that fails emits GaveUp with its reason."""
    with captured_events() as events, pytest.raises(ConnectionError) as caught:
        call_hedged(
            clock,
            loop,
            Replica((0, ConnectionError())),
            after=1,
            on=ConnectionError,
            downstream=Downstream("r"),
        )

    assert [
        HedgeFired("op", "r", 2),
        GaveUp(
            "op",
            "r",
            2,
            Reason.ATTEMPTS,
            0.0,
            None,
            None,
            caught.value,
            detail="ConnectionError",
        ),
    ] == events


# --- arguments ------------------------------------------------------------------------------------


@both_loops
def test_keyword_arguments(loop: str, clock: VirtualClock) -> None:
    """Each copy gets `kwargs` as its keyword arguments, also names that are options of `hedge`."""

    async def read(key: str, *, name: str = "") -> tuple[str, str]:
        return key, name

    async def main() -> object:
        return await tarry.hedge(read, "key", kwargs={"name": "n"}, after=1)

    assert ("key", "n") == run(clock, loop, main)


def test_keyword_arguments_must_be_a_mapping(clock: VirtualClock) -> None:
    """`kwargs` that is not a mapping is rejected."""
    invalid: Any = [("key", "k")]
    with pytest.raises(tarry.ConfigurationTypeError, match="kwargs must be a dict"):
        clock.run(lambda: tarry.hedge(Replica().read, kwargs=invalid, after=1))


@both_loops
def test_plain_function(loop: str, clock: VirtualClock) -> None:
    """The error for a plain function names `hedge_sync`, and no other copy is started."""
    calls: list[int] = []
    plain_function: Callable[[], Any] = lambda: calls.append(1)  # noqa: E731

    message = r"returned None.* use tarry\.hedge_sync"
    with pytest.raises(tarry.ConfigurationTypeError, match=message):
        run(clock, loop, lambda: tarry.hedge(plain_function, after=1, on=Exception))

    assert [1] == calls


@both_loops
def test_function_that_returns_an_awaitable(loop: str, clock: VirtualClock) -> None:
    """A lambda that returns a coroutine is hedged."""
    replica = Replica((10, "first"), (0.05, "second"))

    result = run(clock, loop, lambda: tarry.hedge(lambda: replica.read(), after=0.1))  # noqa: PLW0108 - a plain function

    assert "second" == result
