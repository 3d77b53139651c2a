"""Timeouts and deadlines of calls, with each call style."""

from __future__ import annotations

import pytest

import tarry
from tarry import Policy, Reason
from tarry.adapters.grpc import RetryInterceptor
from tarry.runtime.clocks import environment
from tests.adapters.grpc.fake_service import (
    CHARGE,
    OWN_CONNECTION,
    PUSHBACK,
    CallStyle,
    FakeService,
    failing_call,
    grpc,
    reason_of,
)

PAID = b"paid"


def test_timeout_covers_all_attempts(
    service: FakeService, call_style: CallStyle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After waits of 60 s, an attempt has the rest of the caller's 100 s."""
    real, slept = environment.now, [0.0]

    async def asleep(seconds: float) -> None:
        slept[0] += seconds

    monkeypatch.setattr(environment, "now", lambda: real() + slept[0])
    monkeypatch.setattr(environment, "async_sleep", asleep)
    monkeypatch.setattr(
        environment, "blocking_sleep", lambda seconds, _: slept.append(slept.pop() + seconds)
    )
    service.steps = [("UNAVAILABLE", PUSHBACK, "60000")]

    assert PAID == call_style(service, {"timeout": 100}, {})
    assert [True, False] == [remaining > 50 for remaining in service.remaining]


def test_no_attempt_after_the_timeout(service: FakeService, call_style: CallStyle) -> None:
    """A wait that exceeds the caller's timeout is not started."""
    service.steps = [("UNAVAILABLE", PUSHBACK, "90000")]

    error = failing_call(call_style, service, call={"timeout": 60})

    assert grpc.StatusCode.UNAVAILABLE == error.code()
    assert Reason.DEADLINE == reason_of(error)


def test_timeout_of_zero(service: FakeService, call_style: CallStyle) -> None:
    """A timeout that is over raises the same error as without tarry."""
    error = failing_call(call_style, service, call={"timeout": -1})

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()


def test_deadline_is_sent(service: FakeService, call_style: CallStyle) -> None:
    """The server gets the deadline of `tarry.deadline`."""
    call_style(service, {}, {})
    with tarry.deadline(100):
        call_style(service, {"timeout": 10_000}, {})

    assert [True, False] == [remaining > 1000 for remaining in service.remaining]


def test_deadline_in_the_past(service: FakeService, call_style: CallStyle) -> None:
    """Nothing is sent, and the error is tarry's."""
    with tarry.deadline(0), pytest.raises(tarry.DeadlineExceeded):
        call_style(service, {}, {})

    assert 0 == service.attempts


def test_timeout_is_a_server_failure(service: FakeService, call_style: CallStyle) -> None:
    """A call that exceeds its timeout raises gRPC's error and counts as a failure."""
    service.steps = ["hold"]
    breaker = tarry.Breaker(consecutive=1)
    downstream = tarry.Downstream("payments", breaker=breaker)

    error = failing_call(call_style, service, call={"timeout": 0.1}, downstream=downstream)

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()
    assert Reason.PERMANENT != reason_of(error)
    assert tarry.BreakerState.OPEN == downstream.state


def test_attempt_timeout(service: FakeService) -> None:
    """The policy's timeout ends an attempt that hangs, and the next one succeeds."""
    service.steps = ["hold"]
    policy = Policy(attempt_timeout=0.2, max_attempts=20)

    with grpc.insecure_channel(service.target, options=OWN_CONNECTION) as opened:
        retried = grpc.intercept_channel(opened, RetryInterceptor(policy=policy))
        assert b"paid" == retried.unary_unary(CHARGE)(b"")

    assert service.attempts > 1
