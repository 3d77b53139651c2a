"""Timeouts and deadlines of calls, with each call style."""

from __future__ import annotations

import pytest

import tarry
from tarry import Policy, Reason
from tarry.adapters.grpc import RetryInterceptor
from tarry.runtime.effects import effects
from tests.adapters.grpc.fake_service import (
    CHARGE,
    PUSHBACK_KEY,
    SEPARATE_CONNECTION,
    CallStyle,
    FakeService,
    give_up_reason,
    grpc,
    make_failing_call,
)

PAID = b"paid"


def test_timeout_covers_all_attempts(
    service: FakeService, call_style: CallStyle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wait of 60 s, the second attempt has the rest of the caller's timeout of 100 s."""
    real_now, slept_s = effects.now, [0.0]

    async def async_sleep(seconds: float) -> None:
        slept_s[0] += seconds

    monkeypatch.setattr(effects, "now", lambda: real_now() + slept_s[0])
    monkeypatch.setattr(effects, "async_sleep", async_sleep)
    monkeypatch.setattr(
        effects, "blocking_sleep", lambda seconds, _: slept_s.append(slept_s.pop() + seconds)
    )
    service.steps = [("UNAVAILABLE", PUSHBACK_KEY, "60000")]

    assert PAID == call_style(service, {"timeout": 100}, {})
    assert [True, False] == [remaining > 50 for remaining in service.remaining]


def test_no_attempt_after_the_timeout(service: FakeService, call_style: CallStyle) -> None:
    """A wait that exceeds the caller's timeout is not started."""
    service.steps = [("UNAVAILABLE", PUSHBACK_KEY, "90000")]

    error = make_failing_call(call_style, service, call={"timeout": 60})

    assert grpc.StatusCode.UNAVAILABLE == error.code()
    assert Reason.DEADLINE == give_up_reason(error)


def test_negative_timeout(service: FakeService, call_style: CallStyle) -> None:
    """A negative timeout raises DEADLINE_EXCEEDED, as without the interceptor."""
    error = make_failing_call(call_style, service, call={"timeout": -1})

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()


def test_deadline_is_sent(service: FakeService, call_style: CallStyle) -> None:
    """The server gets the deadline of `tarry.deadline` if it is shorter than the timeout."""
    call_style(service, {}, {})
    with tarry.deadline(100):
        call_style(service, {"timeout": 10_000}, {})

    assert [True, False] == [remaining > 1000 for remaining in service.remaining]


def test_deadline_in_the_past(service: FakeService, call_style: CallStyle) -> None:
    """A call whose deadline has passed sends nothing and raises `tarry.DeadlineExceeded`."""
    with tarry.deadline(0), pytest.raises(tarry.DeadlineExceeded):
        call_style(service, {}, {})

    assert 0 == service.attempts


def test_timeout_counts_as_a_failure(service: FakeService, call_style: CallStyle) -> None:
    """A call that exceeds its timeout raises the error of gRPC, and the breaker counts it."""
    service.steps = ["hold"]
    breaker = tarry.Breaker(consecutive=1)
    downstream = tarry.Downstream("payments", breaker=breaker)

    error = make_failing_call(call_style, service, call={"timeout": 0.1}, downstream=downstream)

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()
    assert Reason.PERMANENT != give_up_reason(error)
    assert tarry.BreakerState.OPEN == downstream.state


def test_attempt_timeout_ends_one_attempt(service: FakeService) -> None:
    """The attempt timeout of the policy ends an attempt that hangs, and a later one succeeds."""
    service.steps = ["hold"]
    policy = Policy(attempt_timeout=0.2, max_attempts=20)

    with grpc.insecure_channel(service.target, options=SEPARATE_CONNECTION) as channel:
        retry_channel = grpc.intercept_channel(channel, RetryInterceptor(policy=policy))
        assert b"paid" == retry_channel.unary_unary(CHARGE)(b"")

    assert service.attempts > 1
