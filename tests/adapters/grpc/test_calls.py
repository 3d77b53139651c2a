"""One claim, every way to call: plain, by a future, as a stream, each without and with asyncio."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import tarry
from tarry import Kind, Policy, Reason
from tarry.adapters.grpc import RetryInterceptor
from tarry.testing import captured_events, scripted_random
from tests.adapters.grpc.service import (
    CHARGE,
    PUSHBACK,
    Service,
    Way,
    async_stream,
    channel,
    coroutine,
    failure,
    grpc,
    reason_of,
    waits,
)

PAID = b"paid"


def test_a_call_that_works_is_made_once(service: Service, way: Way) -> None:
    """Without a failure there is one attempt, and it says nothing of others."""
    assert PAID == way(service, {}, {})
    assert [None] == service.previous


def test_unavailable_is_retried(service: Service, way: Way) -> None:
    """Each attempt says how many were before it."""
    service.steps = ["UNAVAILABLE", "UNAVAILABLE"]

    with captured_events() as events:
        assert PAID == way(service, {}, {})

    assert [None, "1", "2"] == service.previous
    assert 2 == len(waits(events))
    assert isinstance(events[-1], tarry.Succeeded)
    assert service.target == events[-1].downstream
    assert events[-1].operation.startswith("shop.Payments/")


def test_the_log_names_the_code(
    service: Service, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines are short: the code, and what the server said; the code is a field, too."""
    service.steps = ["UNAVAILABLE"]

    way(service, {}, {})

    [wait] = [record for record in caplog.records if record.levelname == "WARNING"]
    operation = wait.__dict__["tarry"]["operation"]
    assert wait.getMessage().startswith(f"{operation}: UNAVAILABLE: not now; retry 1 of 3 in ")
    assert "UNAVAILABLE" == wait.__dict__["tarry"]["detail"]


def test_metadata_of_the_user_is_kept(service: Service, way: Way) -> None:
    """All attempts carry it, and a count that was passed on from elsewhere does not stay."""
    service.steps = ["UNAVAILABLE"]
    given = (("shop", "north"), ("grpc-previous-rpc-attempts", "7"))

    way(service, {"metadata": given}, {})

    assert ["north", "north"] == [sent["shop"] for sent in service.metadata]
    assert [None, "1"] == service.previous


def test_what_the_user_asks_of_a_call_reaches_each_attempt(service: Service, way: Way) -> None:
    """Credentials and waiting for the server are kept, and on plain channels the compression."""
    service.steps = ["UNAVAILABLE"]
    seen: list[Any] = []
    asked = {
        "credentials": grpc.access_token_call_credentials("secret"),
        "wait_for_ready": True,
        "compression": grpc.Compression.Gzip,
    }
    is_async = way in (coroutine, async_stream)
    if is_async:
        del asked["compression"]  # no interceptor of grpc.aio sees it

    class Plain:
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(details)
            # What has no encryption refuses credentials.
            return continuation(details._replace(credentials=None), request)

        intercept_unary_stream = intercept_unary_unary

    class Unary:
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await Plain().intercept_unary_unary(continuation, details, request)

    class Stream:
        async def intercept_unary_stream(
            self, continuation: Any, details: Any, request: Any
        ) -> Any:
            return await Plain().intercept_unary_unary(continuation, details, request)

    grpc.UnaryUnaryClientInterceptor.register(Plain)
    grpc.UnaryStreamClientInterceptor.register(Plain)
    grpc.aio.UnaryUnaryClientInterceptor.register(Unary)
    grpc.aio.UnaryStreamClientInterceptor.register(Stream)
    behind = (Unary(), Stream()) if is_async else (Plain(),)
    way(service, asked, {"behind": behind})

    assert [asked] * 2 == [{name: getattr(one, name) for name in asked} for one in seen]


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "CANCELLED", "DEADLINE_EXCEEDED"])
def test_other_codes_are_final(service: Service, way: Way, code: str) -> None:
    """The error is gRPC's own, with the reason on it; a server's word about time is a code, too."""
    service.steps = [code]

    error = failure(way, service, call={"timeout": 60})

    assert getattr(grpc.StatusCode, code) == error.code()
    assert "not now" == error.details()
    assert Reason.PERMANENT == reason_of(error)
    assert "the error is not retryable" in error.__notes__[0]
    assert 1 == service.attempts


def test_codes_of_the_policy(service: Service, way: Way) -> None:
    """The policy says which codes are retried."""
    service.steps = ["ABORTED"]

    assert PAID == way(service, {}, {"policy": Policy(retryable_codes=["ABORTED"])})
    assert 2 == service.attempts


def test_no_more_attempts_than_allowed(service: Service, way: Way) -> None:
    """The last error is raised, and a note says how many attempts were made."""
    service.steps = ["UNAVAILABLE"] * 9

    error = failure(way, service, policy=Policy(max_attempts=3))

    assert grpc.StatusCode.UNAVAILABLE == error.code()
    assert Reason.ATTEMPTS == reason_of(error)
    assert "gave up after 3 attempts" in error.__notes__[0]
    assert 3 == service.attempts


def test_throttling_has_the_slower_delay(service: Service, way: Way) -> None:
    """RESOURCE_EXHAUSTED waits from `throttled_delay` on."""
    service.steps = ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]

    with captured_events() as events:
        way(service, {}, {"policy": Policy(jitter="none", throttled_delay=3, initial_delay=0.1)})

    assert [3, 0.2] == waits(events)
    failed = [event.kind for event in events if isinstance(event, tarry.AttemptFailed)]
    assert [Kind.THROTTLED, Kind.TRANSIENT] == failed


def test_pushback_is_exact(service: Service, way: Way) -> None:
    """The wait is what the server says, and backoff starts over."""
    service.steps = [("UNAVAILABLE", PUSHBACK, "7000"), "UNAVAILABLE"]

    with captured_events() as events:
        way(service, {}, {"policy": Policy(jitter="none", initial_delay=0.1)})

    assert [7, 0.1] == waits(events)


def test_negative_pushback_means_never(service: Service, way: Way) -> None:
    """The server's no ends the call."""
    service.steps = [("UNAVAILABLE", PUSHBACK, "-1")]

    assert Reason.OVERLOADED == reason_of(failure(way, service))
    assert 1 == service.attempts


def test_retry_info_is_a_floor(service: Service, way: Way) -> None:
    """The status details ask for a time, and jitter goes on top of it."""
    details = import_module("google.rpc.error_details_pb2").RetryInfo()
    details.retry_delay.seconds = 5
    status = import_module("google.rpc.status_pb2").Status(code=14)
    status.details.add().Pack(details)
    service.steps = [("UNAVAILABLE", "grpc-status-details-bin", status.SerializeToString())]

    with captured_events() as events, scripted_random([0.5]):
        way(service, {}, {})

    assert [5.25] == waits(events)


def test_an_open_breaker_sends_nothing(service: Service, way: Way) -> None:
    """The second call is refused with an error that says when to come back."""
    service.steps = ["UNAVAILABLE"] * 9
    downstream = tarry.Downstream("payments", breaker=tarry.Breaker(consecutive=2))

    error = failure(way, service, downstream=downstream)
    with pytest.raises(tarry.BreakerOpen) as caught:
        way(service, {}, {"downstream": downstream})

    assert Reason.BREAKER_OPEN == reason_of(error)
    assert caught.value.retry_after is not None
    assert 2 == service.attempts


@pytest.mark.parametrize("repeatable", [False, lambda method: "shop.Payments" not in method])
def test_what_may_not_be_repeated(service: Service, way: Way, repeatable: Any) -> None:
    """The server may have done it before it failed, so that there is one attempt."""
    service.steps = ["UNAVAILABLE"]

    error = failure(way, service, repeatable=repeatable)

    assert Reason.UNSAFE == reason_of(error)
    assert "the operation is not safe to repeat" in error.__notes__[0]
    assert 1 == service.attempts


def test_loops_around_do_not_multiply(service: Service, way: Way) -> None:
    """A retry around a channel that retries passes the error on."""
    service.steps = ["UNAVAILABLE"] * 99

    with pytest.raises(grpc.RpcError):
        tarry.call(way, service, {}, {}, on=grpc.RpcError)

    assert 4 == service.attempts


def test_two_interceptors_do_not_multiply(service: Service) -> None:
    """The outer of two passes on what the inner has given up on."""
    service.steps = ["UNAVAILABLE"] * 99

    with channel(service.target) as inner, pytest.raises(grpc.RpcError):
        grpc.intercept_channel(inner, RetryInterceptor()).unary_unary(CHARGE)(b"")

    assert 4 == service.attempts


@pytest.mark.parametrize("by_future", [False, True])
def test_errors_of_other_interceptors_pass(service: Service, by_future: bool) -> None:
    """What is no error of gRPC's is raised as it is, and not retried."""
    raised: list[ValueError] = []

    class Broken:
        def intercept_unary_unary(self, *_: Any) -> Any:
            raised.append(ValueError("broken"))
            raise raised[-1]

    grpc.UnaryUnaryClientInterceptor.register(Broken)
    opened = grpc.insecure_channel(service.target)
    with opened, pytest.raises(ValueError, match="broken") as caught:
        charge = grpc.intercept_channel(opened, RetryInterceptor(), Broken()).unary_unary(CHARGE)
        charge.future(b"").result() if by_future else charge(b"")

    assert raised == [caught.value]
    assert Reason.PERMANENT == reason_of(caught.value)


def test_a_limit_delays_an_attempt(service: Service, way: Way) -> None:
    """A first attempt that has to wait for its turn is sent when it has come."""

    class Turns:
        def acquire(self, now: float) -> float:
            return 1.0

        def on_recovery(self, now: float) -> None:
            pass

        def release(self, outcome: tarry.Outcome | None, duration: float, now: float) -> None:
            pass

    downstream = tarry.Downstream("payments", limiter=Turns())

    assert PAID == way(service, {}, {"downstream": downstream})
