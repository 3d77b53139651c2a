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
    grpc,
    open_channel,
    reason_of,
)

OK, CANCELLED, UNAVAILABLE = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAVAILABLE,
)


def test_stream_error_after_the_first_message(service: FakeService) -> None:
    """An error after the first message is raised at once, without a note."""
    service.steps, service.fails_after = ["UNAVAILABLE"], 1

    with open_channel(service.target) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        assert b"one" == next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

    assert UNAVAILABLE == caught.value.code()
    assert tarry.record_of(caught.value) is None
    assert 1 == service.attempts


def test_empty_stream_is_a_success(service: FakeService) -> None:
    """A stream without messages is not retried."""
    service.steps, service.messages = ["UNAVAILABLE"], []

    with open_channel(service.target) as opened:
        assert [] == list(opened.unary_stream(WATCH)(b""))
    assert 2 == service.attempts


def test_attempt_timeout_does_not_end_a_stream(service: FakeService) -> None:
    """GRPC would apply the timeout to the whole stream."""
    with open_channel(service.target, policy=Policy(attempt_timeout=5)) as opened:
        opened.unary_unary(CHARGE)(b"")
        list(opened.unary_stream(WATCH)(b""))

    assert [False, True] == [remaining > 60 for remaining in service.remaining]


def test_stream_is_a_call(service: FakeService) -> None:
    """Metadata, status and callbacks are those of the last attempt."""
    service.steps = ["UNAVAILABLE", ("OK", "shop", "north")]
    over, done = threading.Event(), threading.Event()

    with open_channel(service.target) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        assert stream.add_callback(over.set)
        stream.add_done_callback(lambda _: done.set())
        assert b"one" == stream.next()
        assert [b"two"] == list(stream)
        over.wait()
        done.wait()

        assert isinstance(stream, grpc.Call)
        assert OK == stream.code()
        assert ("shop", "north") in [tuple(pair) for pair in stream.trailing_metadata()]
        assert not stream.add_callback(over.set)


def test_unread_stream_is_cancelled(service: FakeService) -> None:
    """Its callbacks are called, and its permit is released."""
    service.steps = ["hold"]
    over = threading.Event()
    downstream = tarry.Downstream("payments", max_in_flight=1)

    with open_channel(service.target, downstream=downstream) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        stream.add_callback(over.set)
        service.hold_started.wait()
        stream.cancel()
        over.wait()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

        assert CANCELLED == caught.value.code()
        assert b"paid" == opened.unary_unary(CHARGE)(b"")


def test_failed_stream_calls_its_callbacks(service: FakeService) -> None:
    """Callbacks are called once, after the last attempt."""
    service.steps = ["UNAVAILABLE"] * 9
    notified: list[int] = []

    with open_channel(service.target) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        stream.add_callback(lambda: notified.append(service.attempts))
        with pytest.raises(grpc.RpcError):
            next(stream)

    assert [4] == notified


@pytest.mark.parametrize("event_type", [tarry.WillWait, tarry.AttemptStarted])
def test_waiting_stream_is_cancelled(service: FakeService, event_type: type[tarry.Event]) -> None:
    """The reader gets the code of a cancelled stream."""
    service.steps = ["UNAVAILABLE", *["hold"] * 9]
    calls: list[Any] = []
    call_made, remove = cancel_on_event(event_type, calls)

    with open_channel(service.target) as opened:
        calls.append(opened.unary_stream(WATCH)(b""))
        call_made.set()
        with pytest.raises(grpc.RpcError) as caught:
            next(calls[0])
        remove()

    assert CANCELLED == caught.value.code()
    assert "cancelled" in caught.value.details().lower()


def test_code_before_reading(service: FakeService) -> None:
    """The code, read first, is that of the last attempt, and no message is lost."""
    service.steps = ["UNAVAILABLE"]

    with open_channel(service.target) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        assert [] == list(stream.initial_metadata())
        assert 2 == service.attempts
        assert [b"one", b"two"] == list(stream)
        assert (OK, "") == (stream.code(), stream.details())

        service.steps, service.messages = ["UNAVAILABLE"], []
        stream = opened.unary_stream(WATCH)(b"")
        assert OK == stream.code()
        assert [] == list(stream)


@pytest.mark.parametrize("ask", ["code", "details", "trailing_metadata", "debug_error_string"])
def test_code_of_a_failed_stream_before_reading(service: FakeService, ask: str) -> None:
    """All attempts are made, and the reader gets the error with its record."""
    service.steps = ["UNAVAILABLE"] * 9

    with open_channel(service.target) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        getattr(stream, ask)()
        assert 4 == service.attempts
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)

    assert Reason.ATTEMPTS == reason_of(caught.value)
    assert UNAVAILABLE == stream.code()


def test_one_thread_reads_and_another_waits(service: FakeService) -> None:
    """The two threads share the attempts."""
    service.steps, service.messages = ["UNAVAILABLE"], []
    ends: list[Any] = []

    with open_channel(service.target) as opened:
        stream = opened.unary_stream(WATCH)(b"")
        threads = [threading.Thread(target=lambda: ends.append(stream.code())) for _ in range(4)]
        threads.append(threading.Thread(target=lambda: ends.append(list(stream))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert 2 == service.attempts
    assert ([OK] * 4, [[]]) == ([end for end in ends if end], [end for end in ends if not end])
