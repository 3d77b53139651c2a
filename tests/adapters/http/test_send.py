"""`RequestSender`, tested without a client library."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import tarry
from tarry import Breaker, Downstream, Hedging, Kind, Outcome, Policy
from tarry.adapters.http.messages import (
    HttpClientFunctions,
    RequestSnapshot,
    make_response_classifier,
)
from tarry.adapters.http.send import RequestSender
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
from tarry.runtime.effects import effects
from tarry.testing import VirtualClock, captured_events, no_wait

GET = ("GET", "http", "a", None, True)
POST = ("POST", "http", "a", None, False)


def make_sender(send: Any, first: Any = None, **options: Any) -> RequestSender:
    """Return the sender of an adapter whose errors are all transient."""
    functions = HttpClientFunctions(
        is_async=False,
        classify_error=lambda _, repeatable: Outcome(Kind.TRANSIENT, repeatable=repeatable),
        classify_response=make_response_classifier(lambda response: response.headers),
        release_connection=lambda _: True,
        snapshot=lambda _: RequestSnapshot("GET", "http://a/", (), b""),
    )
    replaced = {name: options.pop(name) for name in functions._fields if name in options}
    option_names = ("policy", "hedging", "downstream", "idempotency_key", "hand_off")
    defaults: dict[str, Any] = dict.fromkeys(option_names)
    return RequestSender(functions._replace(**replaced), send, first, **defaults | options)


def make_response(status: int) -> Any:
    """Return a response with this status and no headers."""
    return SimpleNamespace(status_code=status, headers={})


class FakeServer:
    """Responds with the given statuses, and records the number and timeout of each attempt."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = iter(statuses)
        self.attempt_numbers: list[int] = []
        self.attempt_timeouts: list[float | None] = []

    def send(self, *, attempt_timeout: float | None, attempt_number: int = 1) -> Any:
        """Handle one attempt."""
        self.attempt_numbers.append(attempt_number)
        self.attempt_timeouts.append(attempt_timeout)
        return make_response(next(self._statuses))


def test_send_function_is_cached() -> None:
    """A send function is cached under its key, and another key gets another function."""
    sender = make_sender(FakeServer().send)

    first = sender.send_function(GET)

    assert first is sender.cached_functions[GET]
    assert first is not sender.send_function(POST)


def test_cache_keeps_used_send_functions() -> None:
    """The cache keeps a send function that is used again, and drops an unused one."""
    sender = make_sender(FakeServer().send)
    used, unused = sender.send_function(GET), sender.send_function(POST)

    for number in range(2000):
        sender.send_function(("GET", "http", f"host-{number}", None, True))
        if not number % 100:
            assert used is sender.send_function(GET)

    assert used is sender.send_function(GET)
    assert unused is not sender.send_function(POST)


@pytest.mark.parametrize("has_listener", [False, True])
def test_attempts_are_numbered(has_listener: bool) -> None:
    """Every attempt gets its number, with and without listeners."""
    server = FakeServer(503, 503, 200)
    call = make_sender(server.send).send_function(GET)

    with no_wait():
        if has_listener:
            with captured_events():
                assert 200 == call().status_code
        else:
            assert 200 == call().status_code

    assert [1, 2, 3] == server.attempt_numbers


def test_classification_error_releases_the_permit() -> None:
    """An error in the classification ends the call and releases the permit of the breaker."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1, open_for=1.0, probes=1))
    replies: list[Any] = [make_response(503), object(), make_response(200)]
    call = make_sender(
        lambda **_: replies.pop(0),
        downstream=payments,
        policy=Policy(max_attempts=1),
        classify_error=lambda *_: Outcome(Kind.PERMANENT),
    ).send_function(GET)

    with VirtualClock() as clock:
        with pytest.raises(tarry.ResultNotAccepted):
            call()
        clock.advance(1.5)
        with pytest.raises(AttributeError):
            call()
        assert 200 == call().status_code

    assert "closed" == payments.state


def test_sync_send_function_gets_the_attempt_timeout() -> None:
    """A sync send function gets the attempt timeout, which the client library enforces."""
    server = FakeServer(200)
    sender = make_sender(server.send, policy=Policy(attempt_timeout=2.0))

    assert 200 == sender.send_function(GET)().status_code
    assert [2.0] == server.attempt_timeouts


def test_only_repeatable_requests_are_hedged() -> None:
    """With hedging, a repeatable request is sent twice, and another request is sent once."""
    server = FakeServer(503, 200, 503)
    sender = make_sender(server.send, hedging=Hedging(after=3600))

    assert 200 == sender.send_function(GET)().status_code
    with pytest.raises(tarry.ResultNotAccepted):
        sender.send_function(POST)()

    assert [1, 2, 1] == server.attempt_numbers


# --- fast path ------------------------------------------------------------------------------------


class FakeClient:
    """Sends sync or async requests, and records the function that sends each attempt."""

    def __init__(self, *replies: int | Exception) -> None:
        self._replies = iter(replies)
        self.used_functions: list[str] = []

    def _reply(self, function: str) -> Any:
        self.used_functions.append(function)
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return make_response(reply)

    def send(self, request: str, *, is_async: bool, **options: Any) -> Any:
        """Send a request with these options."""

        def first(_request: str) -> Any:
            return self._reply("first")

        def send(_request: str, *, attempt_timeout: float | None, attempt_number: int = 1) -> Any:
            assert attempt_timeout is None
            return self._reply(f"attempt {attempt_number}")

        async def async_first(request: str) -> Any:
            return first(request)

        async def async_send(request: str, **keywords: Any) -> Any:
            return send(request, **keywords)

        async def async_release(_: object) -> bool:
            return True

        if not is_async:
            return make_sender(send, first, **options).send_function(GET)(request)
        options |= {"is_async": True, "release_connection": async_release}
        call = make_sender(async_send, async_first, **options).send_function(GET)

        async def main() -> Any:
            return await call(request)

        return asyncio.run(main())


sync_and_async = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@sync_and_async
def test_first_attempt_uses_the_fast_path(is_async: bool) -> None:
    """A first attempt that succeeds uses the fast path, and its latency is recorded."""
    payments = Downstream("payments", breaker=Breaker())
    client = FakeClient(200)

    assert 200 == client.send("r", is_async=is_async, downstream=payments).status_code

    assert ["first"] == client.used_functions
    assert payments.quantile(0.5) is not None


@sync_and_async
@pytest.mark.parametrize("failure", [503, ConnectionError()], ids=["response", "error"])
def test_failure_leaves_the_fast_path(is_async: bool, failure: int | Exception) -> None:
    """After a failed first attempt the driver makes the next, and the breaker counts both."""
    payments = Downstream("payments", breaker=Breaker(consecutive=2))
    client = FakeClient(failure, 503, 200)

    with no_wait(), pytest.raises((tarry.ResultNotAccepted, ConnectionError)):
        client.send("r", is_async=is_async, downstream=payments)

    assert ["first", "attempt 2"] == client.used_functions
    assert "open" == payments.state


@sync_and_async
def test_permanent_result_ends_the_call(is_async: bool) -> None:
    """A permanent response or error on the fast path ends the call."""
    permanent = Outcome(Kind.PERMANENT)
    client = FakeClient(404, ValueError("no"))

    assert 404 == client.send("r", is_async=is_async).status_code
    with pytest.raises(ValueError, match="no"):
        client.send("r", is_async=is_async, classify_error=lambda *_: permanent)

    assert ["first", "first"] == client.used_functions


@sync_and_async
def test_fast_path_needs_a_closed_breaker_and_no_deadline_or_listener(is_async: bool) -> None:
    failing = Downstream("failing", breaker=Breaker(consecutive=2))
    failing.record(0, Outcome(Kind.TRANSIENT), 0.0, effects.now(), 0.5)
    disabled = Downstream("disabled", breaker=Breaker())
    disabled.force("disabled")
    client = FakeClient(*[200] * 5)

    client.send("r", is_async=is_async, downstream=failing)
    client.send("r", is_async=is_async, downstream=Downstream("without a breaker"))
    assert failing.breaker is not None
    assert (2, 1, 0) == failing.breaker.counts(effects.now())

    client.send("r", is_async=is_async, downstream=disabled)
    with tarry.deadline(5):
        client.send("r", is_async=is_async)
    with captured_events():
        client.send("r", is_async=is_async)
    assert ["first"] * 2 + ["attempt 1"] * 3 == client.used_functions


@sync_and_async
def test_outer_retry_does_not_resend_a_request_that_is_not_repeatable(is_async: bool) -> None:
    """An outer retry does not repeat a request that is not repeatable, even on the fast path."""
    client = FakeClient(ConnectionError("lost"), ConnectionError("sent twice"))
    not_repeatable = Outcome(Kind.TRANSIENT, repeatable=False)

    with no_wait(), pytest.raises(ConnectionError, match="lost"):
        tarry.call(
            lambda: client.send("r", is_async=is_async, classify_error=lambda *_: not_repeatable),
            on=ConnectionError,
        )

    assert ["first"] == client.used_functions


@sync_and_async
def test_uncounted_successes_are_limited(is_async: bool) -> None:
    """Uncounted successes are counted as soon as their number exceeds the limit."""
    payments = Downstream("payments", breaker=Breaker())

    for _ in range(MAX_UNCOUNTED_SUCCESSES + 1):
        FakeClient(200).send("r", is_async=is_async, downstream=payments)

    assert not payments.uncounted_successes


@sync_and_async
def test_pending_successes_are_counted_before_a_failure(is_async: bool) -> None:
    """The breaker counts the pending successes before a failure, so it stays closed."""
    payments = Downstream("payments", breaker=Breaker(min_calls=2, min_span=0))
    client = FakeClient(200, 200, 200, 503)

    for _ in range(3):
        client.send("r", is_async=is_async, downstream=payments)
    with pytest.raises(tarry.ResultNotAccepted):
        client.send("r", is_async=is_async, downstream=payments, policy=Policy(max_attempts=1))

    assert payments.breaker is not None
    assert (4, 1, 0) == payments.breaker.counts(effects.now())
    assert "closed" == payments.state
