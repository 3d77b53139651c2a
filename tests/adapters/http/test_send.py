"""The loop of each kind of request, without any client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import tarry
from tarry import Breaker, Downstream, Hedging, Kind, Outcome, Policy
from tarry.adapters.http.headers import response_classifier
from tarry.adapters.http.send import RequestSender
from tarry.runtime.clocks import system
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
from tarry.testing import VirtualClock, captured_events, no_wait

GET = ("GET", "http", "a", None, True)
POST = ("POST", "http", "a", None, False)


def sending(send: Any, first: Any = None, **options: Any) -> RequestSender:
    """Return the requests of an adapter whose every error is transient."""
    given: dict[str, Any] = {
        "is_async": False,
        "policy": None,
        "hedging": None,
        "downstream": None,
        "idempotency_key": None,
        "classify_error": lambda _, repeatable: Outcome(Kind.TRANSIENT, safe=repeatable),
        "classify_response": response_classifier(lambda response: response.headers),
        "release": lambda _: True,
    }
    return RequestSender(send, first, **given | options)


def answer(status: int) -> Any:
    """Return an answer."""
    return SimpleNamespace(status_code=status, headers={})


class Server:
    """Answers with one status after the other, and notes the number of each attempt."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = iter(statuses)
        self.numbers: list[int] = []
        self.limits: list[float | None] = []

    def send(self, *, limit: float | None, number: int = 1) -> Any:
        """Be sent a request."""
        self.numbers.append(number)
        self.limits.append(limit)
        return answer(next(self._statuses))


def test_function_is_made_once_for_a_kind() -> None:
    """The second request of a kind finds what the first has made."""
    made = sending(Server().send)

    first = made.send_function(GET)

    assert first is made.send_functions[GET]
    assert first is not made.send_function(POST)


def test_kinds_that_are_used_are_kept() -> None:
    """A client that follows links to everywhere keeps what it goes back to."""
    made = sending(Server().send)
    used, unused = made.send_function(GET), made.send_function(POST)

    for number in range(2000):
        made.send_function(("GET", "http", f"host-{number}", None, True))
        if not number % 100:
            assert used is made.send_function(GET)

    assert used is made.send_function(GET)
    assert unused is not made.send_function(POST)


@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "heard"])
def test_attempts_are_numbered(heard: bool) -> None:
    """Every attempt knows its number, on the short way and where somebody listens."""
    server = Server(503, 503, 200)
    call = sending(server.send).send_function(GET)

    with no_wait():
        if heard:
            with captured_events():
                assert 200 == call().status_code
        else:
            assert 200 == call().status_code

    assert [1, 2, 3] == server.numbers


def test_answer_that_cannot_be_judged_gives_its_permit_back() -> None:
    """What is wrong with an answer ends the call, and a breaker does not wait for it for ever."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1, open_for=1.0, probes=1))
    replies: list[Any] = [answer(503), object(), answer(200)]
    call = sending(
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


def test_time_for_an_attempt_is_the_clients_own() -> None:
    """A client that blocks is told the time for an attempt; no thread cuts it off."""
    server = Server(200)
    made = sending(server.send, policy=Policy(attempt_timeout=2.0))

    assert 200 == made.send_function(GET)().status_code
    assert [2.0] == server.limits


def test_hedged_or_sent_once() -> None:
    """With hedging, what may be repeated is copied, and the rest is sent once."""
    server = Server(503, 200, 503)
    made = sending(server.send, hedging=Hedging(after=3600))

    assert 200 == made.send_function(GET)().status_code
    with pytest.raises(tarry.ResultNotAccepted):
        made.send_function(POST)()

    assert [1, 2, 1] == server.numbers


# --- requests that go well at once ----------------------------------------------------------------


class Client:
    """Sends in both ways, plain and on a loop, and notes which one was taken."""

    def __init__(self, *replies: int | Exception) -> None:
        self._replies = iter(replies)
        self.taken: list[str] = []

    def _reply(self, way: str) -> Any:
        self.taken.append(way)
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return answer(reply)

    def send(self, request: str, *, looped: bool, **options: Any) -> Any:
        """Send a request, with what this made of it."""

        def first(_request: str) -> Any:
            return self._reply("first")

        def send(_request: str, *, limit: float | None, number: int = 1) -> Any:
            assert limit is None
            return self._reply(f"attempt {number}")

        async def afirst(request: str) -> Any:
            return first(request)

        async def asend(request: str, **told: Any) -> Any:
            return send(request, **told)

        async def arelease(_: object) -> bool:
            return True

        if not looped:
            return sending(send, first, **options).send_function(GET)(request)
        options |= {"is_async": True, "release": arelease}
        call = sending(asend, afirst, **options).send_function(GET)

        async def main() -> Any:
            return await call(request)

        return asyncio.run(main())


looped_or_not = pytest.mark.parametrize("looped", [False, True], ids=["plain", "looped"])


@looped_or_not
def test_first_attempt_goes_the_short_way(looped: bool) -> None:
    """What goes well at once is sent without a look at limits and numbers, and is counted."""
    payments = Downstream("payments", breaker=Breaker())
    client = Client(200)

    assert 200 == client.send("r", looped=looped, downstream=payments).status_code

    assert ["first"] == client.taken
    assert payments.quantile(0.5) is not None


@looped_or_not
@pytest.mark.parametrize("trouble", [503, ConnectionError()], ids=["answer", "error"])
def test_trouble_leaves_the_short_way(looped: bool, trouble: int | Exception) -> None:
    """After a failure the attempts are numbered, and the failure has been counted."""
    payments = Downstream("payments", breaker=Breaker(consecutive=2))
    client = Client(trouble, 503, 200)

    with no_wait(), pytest.raises((tarry.ResultNotAccepted, ConnectionError)):
        client.send("r", looped=looped, downstream=payments)

    assert ["first", "attempt 2"] == client.taken
    assert "open" == payments.state


@looped_or_not
def test_what_is_not_to_be_sent_again_ends_the_call(looped: bool) -> None:
    """An answer or an error that no attempt would change is the end, also on the short way."""
    refused = Outcome(Kind.PERMANENT)
    client = Client(404, ValueError("no"))

    assert 404 == client.send("r", looped=looped).status_code
    with pytest.raises(ValueError, match="no"):
        client.send("r", looped=looped, classify_error=lambda *_: refused)

    assert ["first", "first"] == client.taken


@looped_or_not
def test_deadline_listener_and_open_breaker_need_numbered_attempts(looped: bool) -> None:
    """Only where one of them is at work do first attempts go through the full driver."""
    failing = Downstream("failing", breaker=Breaker(consecutive=2))
    failing.record(0, Outcome(Kind.TRANSIENT), 0.0, system.now(), 0.5)
    disabled = Downstream("disabled", breaker=Breaker())
    disabled.force("disabled")
    client = Client(*[200] * 5)

    client.send("r", looped=looped, downstream=failing)
    client.send("r", looped=looped, downstream=Downstream("bare"))
    assert ["first"] * 2 == client.taken
    assert failing.breaker is not None
    assert (2, 1, 0) == failing.breaker.counts(system.now())

    client.send("r", looped=looped, downstream=disabled)
    with tarry.deadline(5):
        client.send("r", looped=looped)
    with captured_events():
        client.send("r", looped=looped)
    assert ["attempt 1"] * 3 == client.taken[2:]


@looped_or_not
def test_outer_loop_does_not_resend_an_unsafe_request(looped: bool) -> None:
    """An error that ends an unsafe request on its first attempt is final for loops around it."""
    client = Client(ConnectionError("lost"), ConnectionError("sent twice"))
    unsafe = Outcome(Kind.TRANSIENT, safe=False)

    with no_wait(), pytest.raises(ConnectionError, match="lost"):
        tarry.call(
            lambda: client.send("r", looped=looped, classify_error=lambda *_: unsafe),
            on=ConnectionError,
        )

    assert ["first"] == client.taken


@looped_or_not
def test_successes_are_counted_before_there_are_many(looped: bool) -> None:
    """They wait for the next look at the counts, but never more than a few."""
    payments = Downstream("payments", breaker=Breaker())

    for _ in range(MAX_UNCOUNTED_SUCCESSES + 1):
        Client(200).send("r", looped=looped, downstream=payments)

    assert not payments.uncounted_successes


@looped_or_not
def test_late_failure_counts_after_the_successes_before_it(looped: bool) -> None:
    """A breaker sees the successes that were not counted yet when a failure comes."""
    payments = Downstream("payments", breaker=Breaker(failure_rate=0.5, min_calls=2))
    client = Client(200, 200, 200, 503)

    for _ in range(3):
        client.send("r", looped=looped, downstream=payments)
    with pytest.raises(tarry.ResultNotAccepted):
        client.send("r", looped=looped, downstream=payments, policy=Policy(max_attempts=1))

    assert payments.breaker is not None
    assert (4, 1, 0) == payments.breaker.counts(system.now())
    assert "closed" == payments.state
