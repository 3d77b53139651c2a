"""The functions that send requests, tested without a client."""

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
from tarry.runtime.clocks import environment
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
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
    changed = {name: options.pop(name) for name in functions._fields if name in options}
    names = ("policy", "hedging", "downstream", "idempotency_key", "task_client")
    return RequestSender(
        functions._replace(**changed), send, first, **dict.fromkeys(names) | options
    )


def make_response(status: int) -> Any:
    """Return a response."""
    return SimpleNamespace(status_code=status, headers={})


class FakeServer:
    """Responds with one status after the other, and records the number of each attempt."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = iter(statuses)
        self.numbers: list[int] = []
        self.attempt_timeouts: list[float | None] = []

    def send(self, *, attempt_timeout: float | None, attempt_number: int = 1) -> Any:
        """Handle one attempt."""
        self.numbers.append(attempt_number)
        self.attempt_timeouts.append(attempt_timeout)
        return make_response(next(self._statuses))


def test_send_function_is_cached() -> None:
    """The second request with the same key uses the function of the first."""
    sender = make_sender(FakeServer().send)

    first = sender.send_function(GET)

    assert first is sender.cached_functions[GET]
    assert first is not sender.send_function(POST)


def test_used_send_functions_are_kept() -> None:
    """A client that calls many origins keeps the functions that it uses again."""
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

    assert [1, 2, 3] == server.numbers


def test_classification_error_releases_the_permit() -> None:
    """An error in the classification ends the call, and the breaker is not blocked."""
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


def test_sync_client_enforces_the_attempt_timeout() -> None:
    """A sync client gets the time limit of an attempt; no thread enforces it."""
    server = FakeServer(200)
    sender = make_sender(server.send, policy=Policy(attempt_timeout=2.0))

    assert 200 == sender.send_function(GET)().status_code
    assert [2.0] == server.attempt_timeouts


def test_hedged_or_sent_once() -> None:
    """With hedging, repeatable requests are copied, and others are sent once."""
    server = FakeServer(503, 200, 503)
    sender = make_sender(server.send, hedging=Hedging(after=3600))

    assert 200 == sender.send_function(GET)().status_code
    with pytest.raises(tarry.ResultNotAccepted):
        sender.send_function(POST)()

    assert [1, 2, 1] == server.numbers


# --- the fast path --------------------------------------------------------------------------------


class FakeClient:
    """Sends sync or async, and records which function was used."""

    def __init__(self, *replies: int | Exception) -> None:
        self._replies = iter(replies)
        self.used: list[str] = []

    def _reply(self, function: str) -> Any:
        self.used.append(function)
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
    """A first attempt that succeeds is sent without limit and number, and is counted."""
    payments = Downstream("payments", breaker=Breaker())
    client = FakeClient(200)

    assert 200 == client.send("r", is_async=is_async, downstream=payments).status_code

    assert ["first"] == client.used
    assert payments.quantile(0.5) is not None


@sync_and_async
@pytest.mark.parametrize("failure", [503, ConnectionError()], ids=["answer", "error"])
def test_failure_leaves_the_fast_path(is_async: bool, failure: int | Exception) -> None:
    """After a failure the attempts are numbered, and the failure is counted."""
    payments = Downstream("payments", breaker=Breaker(consecutive=2))
    client = FakeClient(failure, 503, 200)

    with no_wait(), pytest.raises((tarry.ResultNotAccepted, ConnectionError)):
        client.send("r", is_async=is_async, downstream=payments)

    assert ["first", "attempt 2"] == client.used
    assert "open" == payments.state


@sync_and_async
def test_permanent_result_ends_the_call(is_async: bool) -> None:
    """A permanent response or error ends the call, also on the fast path."""
    refused = Outcome(Kind.PERMANENT)
    client = FakeClient(404, ValueError("no"))

    assert 404 == client.send("r", is_async=is_async).status_code
    with pytest.raises(ValueError, match="no"):
        client.send("r", is_async=is_async, classify_error=lambda *_: refused)

    assert ["first", "first"] == client.used


@sync_and_async
def test_fast_path_needs_a_closed_breaker_and_no_deadline_or_listener(is_async: bool) -> None:
    """Without a breaker or with a closed one, the first attempt is sent unchanged."""
    failing = Downstream("failing", breaker=Breaker(consecutive=2))
    failing.record(0, Outcome(Kind.TRANSIENT), 0.0, environment.now(), 0.5)
    disabled = Downstream("disabled", breaker=Breaker())
    disabled.force("disabled")
    client = FakeClient(*[200] * 5)

    client.send("r", is_async=is_async, downstream=failing)
    client.send("r", is_async=is_async, downstream=Downstream("bare"))
    assert failing.breaker is not None
    assert (2, 1, 0) == failing.breaker.counts(environment.now())

    client.send("r", is_async=is_async, downstream=disabled)
    with tarry.deadline(5):
        client.send("r", is_async=is_async)
    with captured_events():
        client.send("r", is_async=is_async)
    assert ["first"] * 2 + ["attempt 1"] * 3 == client.used


@sync_and_async
def test_outer_retry_does_not_resend_an_unsafe_request(is_async: bool) -> None:
    """An error that ends an unsafe request on its first attempt is final for an outer retry."""
    client = FakeClient(ConnectionError("lost"), ConnectionError("sent twice"))
    unsafe = Outcome(Kind.TRANSIENT, repeatable=False)

    with no_wait(), pytest.raises(ConnectionError, match="lost"):
        tarry.call(
            lambda: client.send("r", is_async=is_async, classify_error=lambda *_: unsafe),
            on=ConnectionError,
        )

    assert ["first"] == client.used


@sync_and_async
def test_uncounted_successes_are_limited(is_async: bool) -> None:
    """Successes are counted later in batches, but only a few are pending."""
    payments = Downstream("payments", breaker=Breaker())

    for _ in range(MAX_UNCOUNTED_SUCCESSES + 1):
        FakeClient(200).send("r", is_async=is_async, downstream=payments)

    assert not payments.uncounted_successes


@sync_and_async
def test_failure_counts_after_pending_successes(is_async: bool) -> None:
    """A breaker counts the pending successes before a failure."""
    payments = Downstream("payments", breaker=Breaker(failure_rate=0.5, min_calls=2))
    client = FakeClient(200, 200, 200, 503)

    for _ in range(3):
        client.send("r", is_async=is_async, downstream=payments)
    with pytest.raises(tarry.ResultNotAccepted):
        client.send("r", is_async=is_async, downstream=payments, policy=Policy(max_attempts=1))

    assert payments.breaker is not None
    assert (4, 1, 0) == payments.breaker.counts(environment.now())
    assert "closed" == payments.state
