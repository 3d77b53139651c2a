"""The client interceptors, with each call style."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import tarry
from tarry import Kind, Policy, Reason
from tarry.adapters.grpc import RetryInterceptor
from tarry.testing import captured_events, scripted_random
from tests.adapters.grpc.fake_service import (
    CHARGE,
    PUSHBACK_KEY,
    CallStyle,
    FakeService,
    call_async_stream,
    call_coroutine,
    give_up_reason,
    grpc,
    make_failing_call,
    open_channel,
    retry_delays,
)

PAID = b"paid"


def test_successful_call_has_one_attempt(service: FakeService, call_style: CallStyle) -> None:
    """A call that succeeds at once makes one attempt, which reports no previous attempts."""
    assert PAID == call_style(service, {}, {})
    assert [None] == service.previous_attempts


def test_unavailable_is_retried(service: FakeService, call_style: CallStyle) -> None:
    """UNAVAILABLE is retried, and each attempt reports the number of previous attempts."""
    service.steps = ["UNAVAILABLE", "UNAVAILABLE"]

    with captured_events() as events:
        assert PAID == call_style(service, {}, {})

    assert [None, "1", "2"] == service.previous_attempts
    assert 2 == len(retry_delays(events))
    assert isinstance(events[-1], tarry.Succeeded)
    assert service.target == events[-1].downstream
    assert events[-1].operation.startswith("shop.Payments/")


def test_log_contains_the_code(
    service: FakeService, call_style: CallStyle, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line of a retry has the code and the details; the code is also a field."""
    service.steps = ["UNAVAILABLE"]

    call_style(service, {}, {})

    [log_record] = [record for record in caplog.records if record.levelname == "WARNING"]
    operation = log_record.__dict__["tarry"]["operation"]
    assert log_record.getMessage().startswith(
        f"{operation}: UNAVAILABLE: not now; retry 1 of 3 in "
    )
    assert "UNAVAILABLE" == log_record.__dict__["tarry"]["detail"]


def test_user_metadata_is_kept(service: FakeService, call_style: CallStyle) -> None:
    """All attempts have the metadata of the user, except for an attempt count."""
    service.steps = ["UNAVAILABLE"]
    user_metadata = (("shop", "north"), ("grpc-previous-rpc-attempts", "7"))

    call_style(service, {"metadata": user_metadata}, {})

    assert ["north", "north"] == [sent["shop"] for sent in service.metadata]
    assert [None, "1"] == service.previous_attempts


def test_call_options_reach_each_attempt(service: FakeService, call_style: CallStyle) -> None:
    """Each attempt has the credentials, wait_for_ready and, on sync channels, the compression."""
    service.steps = ["UNAVAILABLE"]
    seen: list[Any] = []
    options = {
        "credentials": grpc.access_token_call_credentials("secret"),
        "wait_for_ready": True,
        "compression": grpc.Compression.Gzip,
    }
    is_async = call_style in (call_coroutine, call_async_stream)
    if is_async:
        del options["compression"]  # interceptors of grpc.aio do not get the compression

    class SyncRecorder:
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(details)
            # An insecure channel rejects call credentials.
            return continuation(details._replace(credentials=None), request)

        intercept_unary_stream = intercept_unary_unary

    class AsyncUnaryRecorder:
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await SyncRecorder().intercept_unary_unary(continuation, details, request)

    class AsyncStreamRecorder:
        async def intercept_unary_stream(
            self, continuation: Any, details: Any, request: Any
        ) -> Any:
            return await SyncRecorder().intercept_unary_unary(continuation, details, request)

    grpc.UnaryUnaryClientInterceptor.register(SyncRecorder)
    grpc.UnaryStreamClientInterceptor.register(SyncRecorder)
    grpc.aio.UnaryUnaryClientInterceptor.register(AsyncUnaryRecorder)
    grpc.aio.UnaryStreamClientInterceptor.register(AsyncStreamRecorder)
    inner_interceptors = (
        (AsyncUnaryRecorder(), AsyncStreamRecorder()) if is_async else (SyncRecorder(),)
    )
    call_style(service, options, {"inner_interceptors": inner_interceptors})

    assert [options] * 2 == [{name: getattr(details, name) for name in options} for details in seen]


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "CANCELLED", "DEADLINE_EXCEEDED"])
def test_other_codes_are_not_retried(
    service: FakeService, call_style: CallStyle, code: str
) -> None:
    """Another code, even DEADLINE_EXCEEDED of the server, raises the gRPC error with a record."""
    service.steps = [code]

    error = make_failing_call(call_style, service, call={"timeout": 60})

    assert getattr(grpc.StatusCode, code) == error.code()
    assert "not now" == error.details()
    assert Reason.PERMANENT == give_up_reason(error)
    assert "the error is not retryable" in error.__notes__[0]
    assert 1 == service.attempts


def test_retryable_codes_of_the_policy(service: FakeService, call_style: CallStyle) -> None:
    service.steps = ["ABORTED"]

    assert PAID == call_style(service, {}, {"policy": Policy(retryable_codes=["ABORTED"])})
    assert 2 == service.attempts


def test_max_attempts_of_the_policy(service: FakeService, call_style: CallStyle) -> None:
    """After `max_attempts` the last error is raised, with a note about the number of attempts."""
    service.steps = ["UNAVAILABLE"] * 9

    error = make_failing_call(call_style, service, policy=Policy(max_attempts=3))

    assert grpc.StatusCode.UNAVAILABLE == error.code()
    assert Reason.ATTEMPTS == give_up_reason(error)
    assert "gave up after 3 attempts" in error.__notes__[0]
    assert 3 == service.attempts


def test_throttled_attempt_has_a_longer_delay(service: FakeService, call_style: CallStyle) -> None:
    """After RESOURCE_EXHAUSTED the delay starts at `throttled_delay`."""
    service.steps = ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]

    with captured_events() as events:
        call_style(
            service, {}, {"policy": Policy(jitter="none", throttled_delay=3, initial_delay=0.1)}
        )

    assert [3, 0.2] == retry_delays(events)
    kinds = [event.kind for event in events if isinstance(event, tarry.AttemptFailed)]
    assert [Kind.THROTTLED, Kind.TRANSIENT] == kinds


def test_pushback_is_the_delay(service: FakeService, call_style: CallStyle) -> None:
    """The delay is the pushback of the server without jitter, and backoff starts again."""
    service.steps = [("UNAVAILABLE", PUSHBACK_KEY, "7000"), "UNAVAILABLE"]

    with captured_events() as events:
        call_style(service, {}, {"policy": Policy(jitter="none", initial_delay=0.1)})

    assert [7, 0.1] == retry_delays(events)


def test_negative_pushback_ends_the_call(service: FakeService, call_style: CallStyle) -> None:
    service.steps = [("UNAVAILABLE", PUSHBACK_KEY, "-1")]

    assert Reason.OVERLOADED == give_up_reason(make_failing_call(call_style, service))
    assert 1 == service.attempts


def test_retry_info_is_a_minimum(service: FakeService, call_style: CallStyle) -> None:
    """RetryInfo in the status details is the minimum of the delay, to which jitter is added."""
    details = import_module("google.rpc.error_details_pb2").RetryInfo()
    details.retry_delay.seconds = 5
    status = import_module("google.rpc.status_pb2").Status(code=14)
    status.details.add().Pack(details)
    service.steps = [("UNAVAILABLE", "grpc-status-details-bin", status.SerializeToString())]

    with captured_events() as events, scripted_random([0.5]):
        call_style(service, {}, {})

    assert [5.25] == retry_delays(events)


def test_open_breaker_sends_nothing(service: FakeService, call_style: CallStyle) -> None:
    """With an open breaker, a call raises `BreakerOpen` with a `retry_after` and sends nothing."""
    service.steps = ["UNAVAILABLE"] * 9
    downstream = tarry.Downstream("payments", breaker=tarry.Breaker(consecutive=2))

    error = make_failing_call(call_style, service, downstream=downstream)
    with pytest.raises(tarry.BreakerOpen) as caught:
        call_style(service, {}, {"downstream": downstream})

    assert Reason.BREAKER_OPEN == give_up_reason(error)
    assert caught.value.retry_after is not None
    assert 2 == service.attempts


@pytest.mark.parametrize("repeatable", [False, lambda method: "shop.Payments" not in method])
def test_call_that_is_not_repeatable_is_not_retried(
    service: FakeService, call_style: CallStyle, repeatable: Any
) -> None:
    """A call that is not repeatable has one attempt, as the server may have executed it."""
    service.steps = ["UNAVAILABLE"]

    error = make_failing_call(call_style, service, repeatable=repeatable)

    assert Reason.NOT_REPEATABLE == give_up_reason(error)
    assert "the operation is not repeatable" in error.__notes__[0]
    assert 1 == service.attempts


def test_outer_retry_does_not_multiply_attempts(
    service: FakeService, call_style: CallStyle
) -> None:
    """An outer retry does not repeat a call that the interceptor gave up."""
    service.steps = ["UNAVAILABLE"] * 99

    with pytest.raises(grpc.RpcError):
        tarry.call(call_style, service, {}, {}, on=grpc.RpcError)

    assert 4 == service.attempts


def test_two_interceptors_do_not_multiply_attempts(service: FakeService) -> None:
    """The outer of two interceptors does not repeat a call that the inner gave up."""
    service.steps = ["UNAVAILABLE"] * 99

    with open_channel(service.target) as inner, pytest.raises(grpc.RpcError):
        grpc.intercept_channel(inner, RetryInterceptor()).unary_unary(CHARGE)(b"")

    assert 4 == service.attempts


@pytest.mark.parametrize("use_future", [False, True])
def test_errors_of_other_interceptors_are_not_retried(
    service: FakeService, use_future: bool
) -> None:
    """An error of another interceptor that is not an RpcError is raised unchanged."""
    raised: list[ValueError] = []

    class RaisingInterceptor:
        def intercept_unary_unary(self, *_: Any) -> Any:
            raised.append(ValueError("broken"))
            raise raised[-1]

    grpc.UnaryUnaryClientInterceptor.register(RaisingInterceptor)
    channel = grpc.insecure_channel(service.target)
    with channel, pytest.raises(ValueError, match="broken") as caught:
        charge = grpc.intercept_channel(
            channel, RetryInterceptor(), RaisingInterceptor()
        ).unary_unary(CHARGE)
        charge.future(b"").result() if use_future else charge(b"")

    assert raised == [caught.value]
    assert Reason.PERMANENT == give_up_reason(caught.value)


def test_limiter_delays_the_first_attempt(service: FakeService, call_style: CallStyle) -> None:
    class DelayingLimiter:
        def acquire(self, now: float) -> float:
            return 1.0

        def on_recovery(self, now: float) -> None:
            pass

        def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
            pass

    downstream = tarry.Downstream("payments", limiter=DelayingLimiter())

    assert PAID == call_style(service, {}, {"downstream": downstream})
