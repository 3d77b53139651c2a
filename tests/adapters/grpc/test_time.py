"""Timeouts and deadlines of calls, by every way to call."""

from __future__ import annotations

import pytest

import tarry
from tarry import Policy, Reason
from tarry.adapters.grpc import RetryInterceptor
from tarry.runtime.clocks import system
from tests.adapters.grpc.service import (
    CHARGE,
    OWN_CONNECTION,
    PUSHBACK,
    Service,
    Way,
    failure,
    grpc,
    reason_of,
)

PAID = b"paid"


def test_the_timeout_covers_all_attempts(
    service: Service, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute of waiting, an attempt is left with what the caller's 100 seconds have."""
    real, slept = system.now, [0.0]

    async def asleep(seconds: float) -> None:
        slept[0] += seconds

    monkeypatch.setattr(system, "now", lambda: real() + slept[0])
    monkeypatch.setattr(system, "async_sleep", asleep)
    monkeypatch.setattr(system, "sleep", lambda seconds, _: slept.append(slept.pop() + seconds))
    service.steps = [("UNAVAILABLE", PUSHBACK, "60000")]

    assert PAID == way(service, {"timeout": 100}, {})
    assert [True, False] == [remaining > 50 for remaining in service.remaining]


def test_no_attempt_beyond_the_timeout(service: Service, way: Way) -> None:
    """A wait that the caller's time does not allow is not begun."""
    service.steps = [("UNAVAILABLE", PUSHBACK, "90000")]

    error = failure(way, service, call={"timeout": 60})

    assert grpc.StatusCode.UNAVAILABLE == error.code()
    assert Reason.DEADLINE == reason_of(error)


def test_no_time_at_all_is_left_to_grpc(service: Service, way: Way) -> None:
    """A timeout that is over gives the error that it gives without tarry."""
    error = failure(way, service, call={"timeout": -1})

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()


def test_the_ambient_deadline_is_sent(service: Service, way: Way) -> None:
    """The server learns how long the caller's caller waits."""
    way(service, {}, {})
    with tarry.deadline(100):
        way(service, {"timeout": 10_000}, {})

    assert [True, False] == [remaining > 1000 for remaining in service.remaining]


def test_a_deadline_that_has_passed(service: Service, way: Way) -> None:
    """Nothing is sent, and the error is tarry's."""
    with tarry.deadline(0), pytest.raises(tarry.DeadlineExceeded):
        way(service, {}, {})

    assert 0 == service.attempts


def test_time_that_runs_out_counts_against_the_server(service: Service, way: Way) -> None:
    """A call that took all its time is gRPC's error, and a failure of the dependency."""
    service.steps = ["hold"]
    breaker = tarry.Breaker(consecutive=1)
    downstream = tarry.Downstream("payments", breaker=breaker)

    error = failure(way, service, call={"timeout": 0.1}, downstream=downstream)

    assert grpc.StatusCode.DEADLINE_EXCEEDED == error.code()
    assert Reason.PERMANENT != reason_of(error)
    assert tarry.BreakerState.OPEN == downstream.state


def test_an_attempt_that_hangs_is_cut_off(service: Service) -> None:
    """The policy's timeout ends it, and the next one succeeds."""
    service.steps = ["hold"]
    policy = Policy(attempt_timeout=0.2, max_attempts=20)

    with grpc.insecure_channel(service.target, options=OWN_CONNECTION) as opened:
        retried = grpc.intercept_channel(opened, RetryInterceptor(policy=policy))
        assert b"paid" == retried.unary_unary(CHARGE)(b"")

    assert service.attempts > 1
