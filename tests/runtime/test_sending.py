"""The loop of each kind of request, without any client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tarry
from tarry import Breaker, Downstream, Hedging, Kind, Outcome, Policy
from tarry.runtime import outgoing
from tarry.runtime.sending import Sending
from tarry.testing import VirtualClock, captured_events, no_wait

GET = ("GET", "http", "a", None, True)
POST = ("POST", "http", "a", None, False)


def sending(send: Any, **options: Any) -> Sending:
    """Return the requests of an adapter whose every error is transient."""
    given: dict[str, Any] = {
        "looped": False,
        "policy": None,
        "hedging": None,
        "downstream": None,
        "idempotency_key": None,
        "outcome_of": lambda _, repeatable: Outcome(Kind.TRANSIENT, safe=repeatable),
        "judge": outgoing.judge_by(lambda response: response.headers),
        "release": lambda _: True,
    }
    return Sending(send, **given | options)


def answer(status: int) -> Any:
    """Return an answer."""
    return SimpleNamespace(status_code=status, headers={})


class Server:
    """Answers with one status after the other, and notes the number of each attempt."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = iter(statuses)
        self.numbers: list[int] = []

    def send(self, number: int = 1) -> Any:
        """Be sent a request."""
        self.numbers.append(number)
        return answer(next(self._statuses))


def test_function_is_made_once_for_a_kind() -> None:
    """The second request of a kind finds what the first has made."""
    made = sending(Server().send)

    first = made.made(GET)

    assert first is made.known[GET]
    assert first is not made.made(POST)


def test_kinds_that_are_used_are_kept() -> None:
    """A client that follows links to everywhere keeps what it goes back to."""
    made = sending(Server().send)
    used, unused = made.made(GET), made.made(POST)

    for number in range(2000):
        made.made(("GET", "http", f"host-{number}", None, True))
        if not number % 100:
            assert used is made.made(GET)

    assert used is made.made(GET)
    assert unused is not made.made(POST)


@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "heard"])
def test_attempts_are_numbered(heard: bool) -> None:
    """Every attempt knows its number, on the short way and where somebody listens."""
    server = Server(503, 503, 200)
    call = sending(server.send).made(GET)

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
        lambda number=1: replies.pop(0),
        downstream=payments,
        policy=Policy(max_attempts=1),
        outcome_of=lambda *_: Outcome(Kind.PERMANENT),
    ).made(GET)

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
    made = sending(Server(200).send, policy=Policy(attempt_timeout=2.0))

    assert 2.0 == made.limit
    assert 200 == made.made(GET)().status_code


def test_hedged_or_sent_once() -> None:
    """With hedging, what may be repeated is copied, and the rest is sent once."""
    server = Server(503, 200, 503)
    made = sending(server.send, hedging=Hedging(after=3600))

    assert 200 == made.made(GET)().status_code
    with pytest.raises(tarry.ResultNotAccepted):
        made.made(POST)()

    assert [1, 2, 1] == server.numbers
