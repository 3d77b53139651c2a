"""Response streams of sync channels, before and after the first message."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tarry
from tarry import Policy, Reason
from tests.adapters.grpc.fake_service import (
    CHARGE,
    WATCH,
    FakeService,
    cancel_on_event,
    give_up_reason,
    grpc,
    open_channel,
)

OK, CANCELLED, UNAVAILABLE = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAVAILABLE,
)


def test_stream_error_after_the_first_message(service: FakeService) -> None:
    """An error after the first message is raised at once, without a note."""
    service.steps, service.messages_before_step = ["UNAVAILABLE"], 1

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert b"one" == next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

    assert UNAVAILABLE == caught.value.code()
    assert tarry.record_of(caught.value) is None
    assert 1 == service.attempts


@pytest.mark.parametrize("headers", [[], [("shop", "north")]])
def test_initial_metadata_before_the_first_message(
    service: FakeService, headers: list[tuple[str, str]]
) -> None:
    """The initial metadata is available when the headers arrive, before the first message."""
    service.steps, service.headers = ["hold"], headers

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert headers == [tuple(pair) for pair in stream.initial_metadata()]
        stream.cancel()


@pytest.mark.parametrize("method", ["next", "initial_metadata"])
def test_stream_error_after_the_headers(service: FakeService, method: str) -> None:
    """An error after the headers is raised at once, without a note (gRFC A6)."""
    service.steps, service.headers = ["UNAVAILABLE"], [("shop", "north")]

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        if method == "initial_metadata":
            stream.initial_metadata()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

    assert UNAVAILABLE == caught.value.code()
    assert tarry.record_of(caught.value) is None
    assert 1 == service.attempts


def test_stream_error_long_after_empty_headers(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that fails some time after empty headers is not retried."""
    service.steps, service.headers = ["UNAVAILABLE"], []
    monkeypatch.setattr("tarry.adapters.grpc.call.MAX_TRAILERS_ONLY_DELAY_S", 0.0)

    with open_channel(service.target) as channel, pytest.raises(grpc.RpcError):
        next(channel.unary_stream(WATCH)(b""))

    assert 1 == service.attempts


def test_empty_stream_is_a_success(service: FakeService) -> None:
    """After a failed attempt, a stream that ends without messages is a success."""
    service.steps, service.messages = ["UNAVAILABLE"], []

    with open_channel(service.target) as channel:
        assert [] == list(channel.unary_stream(WATCH)(b""))
    assert 2 == service.attempts


def test_attempt_timeout_does_not_limit_a_stream(service: FakeService) -> None:
    """The attempt timeout applies to unary calls, but does not limit a whole stream."""
    with open_channel(service.target, policy=Policy(attempt_timeout=5)) as channel:
        channel.unary_unary(CHARGE)(b"")
        list(channel.unary_stream(WATCH)(b""))

    assert [False, True] == [remaining > 60 for remaining in service.remaining]


def test_stream_has_the_methods_of_a_call(service: FakeService) -> None:
    """The methods of a call return the status and metadata of the last attempt of a stream."""
    service.steps = ["UNAVAILABLE", ("OK", "shop", "north")]
    callback_called, done = threading.Event(), threading.Event()

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert stream.add_callback(callback_called.set)
        stream.add_done_callback(lambda _: done.set())
        assert b"one" == stream.next()
        assert [b"two"] == list(stream)
        callback_called.wait()
        done.wait()

        assert isinstance(stream, grpc.Call)
        assert OK == stream.code()
        assert ("shop", "north") in [tuple(pair) for pair in stream.trailing_metadata()]
        assert not stream.add_callback(callback_called.set)


def test_unread_stream_is_cancelled(service: FakeService) -> None:
    """Cancelling an unread stream calls its callbacks and releases its permit."""
    service.steps = ["hold"]
    callback_called = threading.Event()
    downstream = tarry.Downstream("payments", max_in_flight=1)

    with open_channel(service.target, downstream=downstream) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        stream.add_callback(callback_called.set)
        service.hold_started.wait()
        stream.cancel()
        callback_called.wait()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

        assert CANCELLED == caught.value.code()
        assert b"paid" == channel.unary_unary(CHARGE)(b"")


def test_failed_stream_calls_its_callbacks(service: FakeService) -> None:
    """The callbacks of a failed stream are called once, after the last attempt."""
    service.steps = ["UNAVAILABLE"] * 9
    attempts: list[int] = []

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        stream.add_callback(lambda: attempts.append(service.attempts))
        with pytest.raises(grpc.RpcError):
            next(stream)

    assert [4] == attempts


@pytest.mark.parametrize("event_type", [tarry.WillWait, tarry.AttemptStarted])
def test_waiting_stream_is_cancelled(service: FakeService, event_type: type[tarry.Event]) -> None:
    """A stream that is cancelled during a wait, or as an attempt starts, raises CANCELLED."""
    service.steps = ["UNAVAILABLE", *["hold"] * 9]
    calls: list[Any] = []
    call_created, remove = cancel_on_event(event_type, calls)

    with open_channel(service.target) as channel:
        calls.append(channel.unary_stream(WATCH)(b""))
        call_created.set()
        with pytest.raises(grpc.RpcError) as caught:
            next(calls[0])
        remove()

    assert CANCELLED == caught.value.code()
    assert "cancelled" in caught.value.details().lower()


def test_status_before_reading(service: FakeService) -> None:
    """The metadata or code, read first, is that of the last attempt, and no message is lost."""
    service.steps = ["UNAVAILABLE"]

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert [] == list(stream.initial_metadata())
        assert 2 == service.attempts
        assert [b"one", b"two"] == list(stream)
        assert (OK, "") == (stream.code(), stream.details())

        service.steps, service.messages = ["UNAVAILABLE"], []
        stream = channel.unary_stream(WATCH)(b"")
        assert OK == stream.code()
        assert [] == list(stream)


@pytest.mark.parametrize("method", ["code", "details", "trailing_metadata", "debug_error_string"])
def test_status_of_a_failed_stream_before_reading(service: FakeService, method: str) -> None:
    """Reading the status first makes all attempts; reading the stream raises with the record."""
    service.steps = ["UNAVAILABLE"] * 9

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        getattr(stream, method)()
        assert 4 == service.attempts
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

    assert Reason.ATTEMPTS == give_up_reason(caught.value)
    assert UNAVAILABLE == stream.code()


def test_concurrent_threads_share_the_attempts(service: FakeService) -> None:
    """Threads that read a stream or its code concurrently share its attempts."""
    service.steps, service.messages = ["UNAVAILABLE"], []
    codes: list[Any] = []
    message_lists: list[Any] = []

    with open_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        threads = [threading.Thread(target=lambda: codes.append(stream.code())) for _ in range(4)]
        threads.append(threading.Thread(target=lambda: message_lists.append(list(stream))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert 2 == service.attempts
    assert ([OK] * 4, [[]]) == (codes, message_lists)
