"""Futures of sync channels: what users can do while the call is retried."""

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
from tarry.runtime.clocks import environment
from tarry.testing import captured_events
from tests.adapters.grpc.fake_service import (
    CHARGE,
    OWN_CONNECTION,
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


def test_with_call_returns_the_last_attempt(service: FakeService) -> None:
    """The call object beside the response is that of the attempt that succeeded."""
    service.steps = ["UNAVAILABLE", ("OK", "shop", "north")]

    with open_channel(service.target) as opened:
        response, call = opened.unary_unary(CHARGE).with_call(b"")

    assert b"paid" == response
    assert OK == call.code()
    assert ("shop", "north") in [tuple(pair) for pair in call.trailing_metadata()]


def test_future_is_returned_at_once(service: FakeService) -> None:
    """The caller gets the future while the first attempt runs."""
    service.steps = ["hold"]

    with open_channel(service.target) as opened:
        future = opened.unary_unary(CHARGE).future(b"", timeout=60)
        service.hold_started.wait()
        with pytest.raises(grpc.FutureTimeoutError):
            future.result(timeout=0)

        assert [False, True, True] == [future.done(), future.running(), future.is_active()]
        assert future.time_remaining() > 0
        assert isinstance(future, grpc.Future)
        assert isinstance(future, grpc.Call)
        future.cancel()


def test_retried_future(service: FakeService) -> None:
    """It is done when the last attempt is, and shows its status."""
    service.steps = ["UNAVAILABLE", ("OK", "shop", "north")]
    notified: list[Any] = []
    over = threading.Event()

    with open_channel(service.target) as opened:
        future = opened.unary_unary(CHARGE).future(b"")
        future.add_done_callback(notified.append)
        future.add_done_callback(lambda _: over.set())
        over.wait()

        assert [future] == notified
        assert b"paid" == future.result()
        assert (None, None) == (future.exception(), future.traceback())
        assert (OK, "") == (future.code(), future.details())
        assert not future.cancelled()
        assert not future.cancel()
        assert not future.add_callback(over.set)
        assert [] == list(future.initial_metadata())
        assert ("shop", "north") in [tuple(pair) for pair in future.trailing_metadata()]


def test_failed_future(service: FakeService) -> None:
    """All methods of the future return or raise the last error."""
    service.steps = ["UNAVAILABLE"] * 9
    over = threading.Event()

    with open_channel(service.target) as opened:
        future = opened.unary_unary(CHARGE).future(b"")
        if future.add_callback(over.set):
            over.wait()
        error = future.exception()

        assert (UNAVAILABLE, "not now") == (future.code(), future.details())
        assert error.__traceback__ is future.traceback()
        assert UNAVAILABLE == error.code()
        assert error.debug_error_string() == future.debug_error_string()
        assert not hasattr(future, "unheard_of")
    assert 4 == service.attempts


def test_future_that_cannot_connect() -> None:
    """A failure before the caller has the future is retried like any other."""
    unreachable = tarry.Downstream("unreachable")
    reasons: set[Reason | None] = set()

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{reserved.getsockname()[1]}"
        with open_channel(target, policy=Policy(max_attempts=2), downstream=unreachable) as opened:
            for _ in range(50):
                error = opened.unary_unary(CHARGE).future(b"").exception()
                record = tarry.record_of(error)
                reasons.add(None if record is None else record.reason)

    assert {Reason.ATTEMPTS} == reasons


def test_future_with_an_open_breaker(service: FakeService) -> None:
    """The result raises the breaker's error."""
    downstream = tarry.Downstream("payments", breaker=tarry.Breaker())
    downstream.force("open")

    with open_channel(service.target, downstream=downstream) as opened:
        future = opened.unary_unary(CHARGE).future(b"")

        assert isinstance(future.exception(), tarry.BreakerOpen)


def test_running_future_is_cancelled(service: FakeService) -> None:
    """It is neither retried nor counted as a failure."""
    service.steps = ["hold"]

    with captured_events() as events, open_channel(service.target) as opened:
        future = opened.unary_unary(CHARGE).future(b"")
        service.hold_started.wait()

        assert future.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            future.result()
        assert future.cancelled()
        assert CANCELLED == future.code()
    assert [tarry.AttemptStarted] == [type(event) for event in events]


@pytest.mark.parametrize("event_type", [tarry.WillWait, tarry.AttemptStarted])
def test_waiting_future_is_cancelled(service: FakeService, event_type: type[tarry.Event]) -> None:
    """The wait ends, and no further attempt runs."""
    service.steps = ["UNAVAILABLE", *["hold"] * 9]
    calls: list[Any] = []
    call_made, remove = cancel_on_event(event_type, calls)

    with open_channel(service.target) as opened:
        calls.append(opened.unary_unary(CHARGE).future(b""))
        call_made.set()
        with pytest.raises(grpc.FutureCancelledError):
            calls[0].result()
        remove()

        assert calls[0].cancelled()
        assert CANCELLED == calls[0].code()
        assert "cancelled" in calls[0].details().lower()


def test_cancel_does_not_wait(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling does not wait for the next attempt."""
    service.steps = ["UNAVAILABLE"]
    waiting = threading.Event()

    async def asleep(_seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(environment, "async_sleep", asleep)
    with open_channel(service.target) as opened:
        future = opened.unary_unary(CHARGE).future(b"")
        waiting.wait()
        assert future.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            future.result()

    assert 1 == service.attempts


def test_cancelling_one_future_leaves_others_running(service: FakeService) -> None:
    """Calls of a method share a configuration, but not the cancel token."""
    service.steps = ["hold", "UNAVAILABLE"]

    with open_channel(service.target) as opened:
        charge = opened.unary_unary(CHARGE)
        future = charge.future(b"")
        service.hold_started.wait()
        future.cancel()

        assert b"paid" == charge(b"")


def test_future_that_failed_at_once_does_not_block(service: FakeService) -> None:
    """Even if the first attempt has failed already, the waits are in the background."""
    service.steps = ["UNAVAILABLE"]

    class Ended:
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            call = continuation(details, request)
            call.exception()
            return call

    grpc.UnaryUnaryClientInterceptor.register(Ended)
    threads: list[int] = []
    remove = tarry.listen(lambda _: threads.append(threading.get_ident()))
    with grpc.insecure_channel(service.target) as opened:
        both = grpc.intercept_channel(opened, RetryInterceptor(), Ended())
        assert b"paid" == both.unary_unary(CHARGE).future(b"").result()
    remove()

    assert threading.get_ident() == threads[0]
    assert threading.get_ident() not in threads[1:]


@pytest.mark.parametrize("steps", [[], ["UNAVAILABLE"]])
def test_listeners_run_in_the_context_of_the_caller(service: FakeService, steps: list[Any]) -> None:
    """Context variables of the caller are visible, in whichever thread the future ends."""
    service.steps = steps
    trace: ContextVar[str] = ContextVar("trace", default="none")
    trace.set("the caller's")
    notified: set[str] = set()
    remove = tarry.listen(lambda _: notified.add(trace.get()))

    with open_channel(service.target) as opened:
        opened.unary_unary(CHARGE).future(b"").result()
    remove()

    assert {"the caller's"} == notified


def test_futures_wait_in_one_thread(service: FakeService) -> None:
    """However many calls have failed, one thread makes the waits."""
    service.steps = ["UNAVAILABLE"] * 20
    threads: set[threading.Thread] = set()

    def listener(event: tarry.Event) -> None:
        if isinstance(event, tarry.WillWait):
            threads.add(threading.current_thread())

    remove = tarry.listen(listener)
    many = Policy(max_attempts=30)
    with open_channel(
        service.target, policy=many, downstream=tarry.Downstream("payments")
    ) as opened:
        futures = [opened.unary_unary(CHARGE).future(b"") for _ in range(20)]
        assert [b"paid"] * 20 == [future.result() for future in futures]
    remove()

    assert 1 == len(threads)


def test_interceptors_and_callbacks_may_block(service: FakeService) -> None:
    """Interceptors behind ours, and callbacks, may make blocking calls."""
    service.steps = ["UNAVAILABLE"]
    ended: list[Any] = []
    over = threading.Event()

    def wait() -> str:
        left = iter([ConnectionError()])

        def fail_once() -> str:
            for error in left:
                raise error
            return "waited"

        return tarry.call(fail_once, on=ConnectionError)

    class Waits:
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            ended.append(wait())
            return continuation(details, request)

    def callback(_: Any) -> None:
        try:
            ended.append(wait())
        finally:
            over.set()

    grpc.UnaryUnaryClientInterceptor.register(Waits)
    with grpc.insecure_channel(service.target, options=OWN_CONNECTION) as opened:
        both = grpc.intercept_channel(opened, RetryInterceptor(), Waits())
        future = both.unary_unary(CHARGE).future(b"")
        future.add_done_callback(callback)
        assert b"paid" == future.result()
        over.wait()

    assert ["waited"] * 3 == ended


def test_future_with_a_raising_limiter(service: FakeService) -> None:
    """An error of the user's limiter ends the future."""

    class Broken:
        def acquire(self, now: float) -> float:
            return 0.0

        def on_recovery(self, now: float) -> None:
            pass

        def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
            raise LookupError("a bug")

    downstream = tarry.Downstream("payments", limiter=Broken())
    with open_channel(service.target, downstream=downstream) as opened:
        assert isinstance(opened.unary_unary(CHARGE).future(b"").exception(), LookupError)
