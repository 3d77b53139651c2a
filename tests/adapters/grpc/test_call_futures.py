"""`future()` on sync channels: methods of the future, cancellation and threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextvars import ContextVar
from typing import Any

import pytest

import tarry
from tarry import Policy, Reason
from tarry.adapters.grpc import RetryInterceptor
from tarry.runtime.effects import effects
from tarry.testing import captured_events
from tests.adapters.grpc.fake_service import (
    CHARGE,
    SEPARATE_CONNECTION,
    FakeService,
    cancel_on_event,
    grpc,
    open_channel,
)

OK, CANCELLED, UNAVAILABLE = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAVAILABLE,
)


def test_with_call_returns_the_call_of_the_last_attempt(service: FakeService) -> None:
    """`with_call` returns the response and the call object of the attempt that succeeded."""
    service.steps = ["UNAVAILABLE", ("OK", "shop", "north")]

    with open_channel(service.target) as channel:
        response, call = channel.unary_unary(CHARGE).with_call(b"")

    assert b"paid" == response
    assert OK == call.code()
    assert ("shop", "north") in [tuple(pair) for pair in call.trailing_metadata()]


def test_future_is_returned_at_once(service: FakeService) -> None:
    """`future()` returns while the first attempt runs, and the future is active."""
    service.steps = ["hold"]

    with open_channel(service.target) as channel:
        future = channel.unary_unary(CHARGE).future(b"", timeout=60)
        service.hold_started.wait()
        with pytest.raises(grpc.FutureTimeoutError):
            future.result(timeout=0)

        assert [False, True, True] == [future.done(), future.running(), future.is_active()]
        assert future.time_remaining() > 0
        assert isinstance(future, grpc.Future)
        assert isinstance(future, grpc.Call)
        future.cancel()


def test_future_of_a_retried_call(service: FakeService) -> None:
    """A future is done after the last attempt, and its methods return that attempt's result."""
    service.steps = ["UNAVAILABLE", ("OK", "shop", "north")]
    done_futures: list[Any] = []
    done = threading.Event()

    with open_channel(service.target) as channel:
        future = channel.unary_unary(CHARGE).future(b"")
        future.add_done_callback(done_futures.append)
        future.add_done_callback(lambda _: done.set())
        done.wait()

        assert [future] == done_futures
        assert b"paid" == future.result()
        assert (None, None) == (future.exception(), future.traceback())
        assert (OK, "") == (future.code(), future.details())
        assert not future.cancelled()
        assert not future.cancel()
        assert not future.add_callback(done.set)
        assert [] == list(future.initial_metadata())
        assert ("shop", "north") in [tuple(pair) for pair in future.trailing_metadata()]


def test_future_of_a_failed_call(service: FakeService) -> None:
    """The methods of a failed future return the last error and its status."""
    service.steps = ["UNAVAILABLE"] * 9
    done = threading.Event()

    with open_channel(service.target) as channel:
        future = channel.unary_unary(CHARGE).future(b"")
        if future.add_callback(done.set):
            done.wait()
        error = future.exception()

        assert (UNAVAILABLE, "not now") == (future.code(), future.details())
        assert error.__traceback__ is future.traceback()
        assert UNAVAILABLE == error.code()
        assert error.debug_error_string() == future.debug_error_string()
        assert not hasattr(future, "no_such_attribute")
    assert 4 == service.attempts


def test_future_that_cannot_connect() -> None:
    """A call that fails before `future()` returns is retried, too."""
    unreachable = tarry.Downstream("unreachable")
    reasons: set[Reason | None] = set()

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{reserved.getsockname()[1]}"
        with open_channel(target, policy=Policy(max_attempts=2), downstream=unreachable) as channel:
            for _ in range(50):
                error = channel.unary_unary(CHARGE).future(b"").exception()
                record = tarry.record_of(error)
                reasons.add(None if record is None else record.reason)

    assert {Reason.ATTEMPTS} == reasons


def test_future_with_an_open_breaker(service: FakeService) -> None:
    """With an open breaker, the exception of the future is `BreakerOpen`."""
    downstream = tarry.Downstream("payments", breaker=tarry.Breaker())
    downstream.force("open")

    with open_channel(service.target, downstream=downstream) as channel:
        future = channel.unary_unary(CHARGE).future(b"")

        assert isinstance(future.exception(), tarry.BreakerOpen)


def test_running_future_is_cancelled(service: FakeService) -> None:
    """A future that is cancelled during an attempt is neither retried nor counted as a failure."""
    service.steps = ["hold"]

    with captured_events() as events, open_channel(service.target) as channel:
        future = channel.unary_unary(CHARGE).future(b"")
        service.hold_started.wait()

        assert future.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            future.result()
        assert future.cancelled()
        assert CANCELLED == future.code()
    assert [tarry.AttemptStarted] == [type(event) for event in events]


@pytest.mark.parametrize("event_type", [tarry.WillWait, tarry.AttemptStarted])
def test_waiting_future_is_cancelled(service: FakeService, event_type: type[tarry.Event]) -> None:
    """A future that is cancelled during a wait, or as an attempt starts, ends as cancelled."""
    service.steps = ["UNAVAILABLE", *["hold"] * 9]
    calls: list[Any] = []
    call_created, remove = cancel_on_event(event_type, calls)

    with open_channel(service.target) as channel:
        calls.append(channel.unary_unary(CHARGE).future(b""))
        call_created.set()
        with pytest.raises(grpc.FutureCancelledError):
            calls[0].result()
        remove()

        assert calls[0].cancelled()
        assert CANCELLED == calls[0].code()
        assert "cancelled" in calls[0].details().lower()


def test_cancel_ends_a_wait(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling a future ends its wait, and no further attempt is made."""
    service.steps = ["UNAVAILABLE"]
    waiting = threading.Event()

    async def async_sleep(_seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(effects, "async_sleep", async_sleep)
    with open_channel(service.target) as channel:
        future = channel.unary_unary(CHARGE).future(b"")
        waiting.wait()
        assert future.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            future.result()

    assert 1 == service.attempts


def test_cancelling_one_future_does_not_cancel_others(service: FakeService) -> None:
    """Cancelling one call of a method does not cancel another call of the same method."""
    service.steps = ["hold", "UNAVAILABLE"]

    with open_channel(service.target) as channel:
        charge = channel.unary_unary(CHARGE)
        future = charge.future(b"")
        service.hold_started.wait()
        future.cancel()

        assert b"paid" == charge(b"")


def test_future_that_failed_at_once_does_not_block(service: FakeService) -> None:
    """If the first attempt fails before `future()` returns, a background thread makes the retry."""
    service.steps = ["UNAVAILABLE"]

    class WaitingInterceptor:
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            call = continuation(details, request)
            call.exception()
            return call

    grpc.UnaryUnaryClientInterceptor.register(WaitingInterceptor)
    threads: list[int] = []
    remove = tarry.listen(lambda _: threads.append(threading.get_ident()))
    with grpc.insecure_channel(service.target) as channel:
        intercepted = grpc.intercept_channel(channel, RetryInterceptor(), WaitingInterceptor())
        assert b"paid" == intercepted.unary_unary(CHARGE).future(b"").result()
    remove()

    assert threading.get_ident() == threads[0]
    assert threading.get_ident() not in threads[1:]


@pytest.mark.parametrize("steps", [[], ["UNAVAILABLE"]])
def test_listeners_run_in_the_context_of_the_caller(service: FakeService, steps: list[Any]) -> None:
    """Listeners see the context variables of the caller, in whichever thread the future ends."""
    service.steps = steps
    trace: ContextVar[str] = ContextVar("trace", default="none")
    trace.set("caller")
    values: set[str] = set()
    remove = tarry.listen(lambda _: values.add(trace.get()))

    with open_channel(service.target) as channel:
        channel.unary_unary(CHARGE).future(b"").result()
    remove()

    assert {"caller"} == values


def test_futures_wait_in_one_thread(service: FakeService) -> None:
    service.steps = ["UNAVAILABLE"] * 20
    threads: set[threading.Thread] = set()

    def listener(event: tarry.Event) -> None:
        if isinstance(event, tarry.WillWait):
            threads.add(threading.current_thread())

    remove = tarry.listen(listener)
    policy = Policy(max_attempts=30)
    with open_channel(
        service.target, policy=policy, downstream=tarry.Downstream("payments")
    ) as channel:
        futures = [channel.unary_unary(CHARGE).future(b"") for _ in range(20)]
        assert [b"paid"] * 20 == [future.result() for future in futures]
    remove()

    assert 1 == len(threads)


def test_interceptors_and_callbacks_may_block(service: FakeService) -> None:
    """Inner interceptors and done callbacks of a future may make calls that wait."""
    service.steps = ["UNAVAILABLE"]
    results: list[Any] = []
    callback_ended = threading.Event()

    def call_with_a_wait() -> str:
        errors = iter([ConnectionError()])

        def fail_once() -> str:
            for error in errors:
                raise error
            return "waited"

        return tarry.call(fail_once, on=ConnectionError)

    class CallingInterceptor:
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            results.append(call_with_a_wait())
            return continuation(details, request)

    def callback(_: Any) -> None:
        try:
            results.append(call_with_a_wait())
        finally:
            callback_ended.set()

    grpc.UnaryUnaryClientInterceptor.register(CallingInterceptor)
    with grpc.insecure_channel(service.target, options=SEPARATE_CONNECTION) as channel:
        intercepted = grpc.intercept_channel(channel, RetryInterceptor(), CallingInterceptor())
        future = intercepted.unary_unary(CHARGE).future(b"")
        future.add_done_callback(callback)
        assert b"paid" == future.result()
        callback_ended.wait()

    assert ["waited"] * 3 == results


def test_future_with_a_raising_limiter(service: FakeService) -> None:
    """An error that the limiter raises is the exception of the future."""

    class RaisingLimiter:
        def acquire(self, now: float) -> float:
            return 0.0

        def on_recovery(self, now: float) -> None:
            pass

        def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
            raise LookupError("a bug")

    downstream = tarry.Downstream("payments", limiter=RaisingLimiter())
    with open_channel(service.target, downstream=downstream) as channel:
        assert isinstance(channel.unary_unary(CHARGE).future(b"").exception(), LookupError)
