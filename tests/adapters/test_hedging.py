"""Hedged requests, with every client library that supports hedging."""

from __future__ import annotations

import threading

import pytest

import tarry
from tarry import Breaker, Downstream, Hedging, Outcome, Policy, Reason, TokenBudget
from tarry.testing import captured_events
from tests.adapters.clients import HEDGING_LIBRARIES, ClientLibrary, ClientResponse
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.parametrize("client", HEDGING_LIBRARIES, ids=str)

AT_ONCE = Hedging(after=0)
"""Both copies are sent before one is answered, and either may arrive first."""
NEVER = Hedging(after=3600)
"""No copy is sent because of time."""


def test_second_copy_wins(server: FlakyServerView, client: ClientLibrary) -> None:
    """A request without a response is overtaken by its second copy, which has its number."""
    with client.open(connections=2, hedging=AT_ONCE) as session:
        response = session.send("GET", server.url("late,200"))

    assert ClientResponse(200, "answer 2") == response
    assert {None, "2"} == set(server.received("X-Retry-Attempt"))


def test_losing_copies_release_their_connection(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """After every call both connections can be used again."""
    with client.open(connections=2, hedging=AT_ONCE) as session, tarry.deadline(60):
        for number in range(5):
            url = server.url("late,200", run=f"-{number}")
            assert ClientResponse(200, "answer 2") == session.send("GET", url)
            server.resume()  # now the loser has its answer, too
            server.flaky.go_on.clear()


def test_copies_share_a_key(server: FlakyServerView, client: ClientLibrary) -> None:
    """Both copies of a POST have the same key, so they may be sent."""
    with client.open(connections=2, hedging=AT_ONCE, idempotency_key="auto") as session:
        response = session.send("POST", server.url("late,200"), b"order")

    first, second = server.received("Idempotency-Key")
    assert ClientResponse(200, "answer 2") == response
    assert first == second is not None


def test_copies_have_the_whole_body(server: FlakyServerView, client: ClientLibrary) -> None:
    """Every copy sends the same bytes."""
    with client.open(hedging=NEVER) as session:
        session.send("PUT", server.url("503,200"), b"the whole thing")

    assert [b"the whole thing"] * 2 == [seen.body for seen in server.seen]


@pytest.mark.parametrize("hedging", [AT_ONCE, NEVER], ids=["at once", "never"])
def test_post_without_a_key_is_sent_once(
    server: FlakyServerView, client: ClientLibrary, hedging: Hedging
) -> None:
    """A request that is not repeatable is neither hedged nor retried."""
    with client.open(connections=2, hedging=hedging) as session:
        response = session.send("POST", server.url("503,200"), b"order")

    assert (ClientResponse(503, "answer 1"), 1) == (response, len(server.seen))


def test_iterator_is_sent_once(server: FlakyServerView, client: ClientLibrary) -> None:
    """Two copies cannot share an iterator."""
    with client.open(connections=2, hedging=AT_ONCE) as session:
        response = session.send("PUT", server.url("503,200"), session.iterator())

    assert (503, 1) == (response.status, len(server.seen))


# --- failures -------------------------------------------------------------------------------------


class NotifyingBudget(TokenBudget):
    """A budget that sets an event when a failure is counted."""

    def __init__(self, told: threading.Event) -> None:
        super().__init__()
        self._told = told

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Record an attempt."""
        super().record(outcome, paid, now)
        if outcome.counts_as_failure:
            self._told.set()


def test_failure_waits_for_the_other_copy(server: FlakyServerView, client: ClientLibrary) -> None:
    """A 503 of one copy is not returned while another copy may succeed."""
    payments = Downstream("payments", budget=NotifyingBudget(server.flaky.go_on))
    with client.open(connections=2, hedging=AT_ONCE, downstream=payments) as session:
        response = session.send("GET", server.url("503,late"))

    assert (ClientResponse(200, "answer 2"), 2) == (response, len(server.seen))


@pytest.mark.parametrize("first", ["503", "long", "drop"])
def test_copy_follows_a_failure_at_once(
    server: FlakyServerView, client: ClientLibrary, first: str
) -> None:
    """After a failure the next copy is sent without waiting for its time."""
    with client.open(hedging=NEVER) as session:
        response = session.send("GET", server.url(f"{first},200"))

    assert ClientResponse(200, "answer 2") == response
    assert [None, "2"] == server.received("X-Retry-Attempt")


def test_last_response_of_failed_copies(server: FlakyServerView, client: ClientLibrary) -> None:
    """If every copy fails, the client gets the last response."""
    with client.open(hedging=Hedging(after=3600, max_attempts=3)) as session:
        response = session.send("GET", server.url("503,429,500"))

    assert (ClientResponse(500, "answer 3"), 3) == (response, len(server.seen))


def test_last_error_of_failed_copies(server: FlakyServerView, client: ClientLibrary) -> None:
    """If the last copy ends with an error, the call raises it."""
    with client.open(hedging=NEVER) as session, pytest.raises(client.disconnect_error) as caught:
        session.send("GET", server.url("503,drop"))

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 2) == (record.reason, record.attempts)


def test_permanent_response_ends_the_call(server: FlakyServerView, client: ClientLibrary) -> None:
    """A 404 ends the call and is no failure of the server."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    with client.open(hedging=NEVER, downstream=payments) as session:
        statuses = [session.send("GET", server.url("404")).status for _ in range(3)]

    assert ([404] * 3, 3, "closed") == (statuses, len(server.seen), payments.state)


def test_permanent_response_is_no_success(server: FlakyServerView, client: ClientLibrary) -> None:
    """Listeners are notified that the call was given up."""
    with client.open(hedging=NEVER) as session, captured_events() as events:
        session.send("GET", server.url("404"))

    (end,) = events
    assert isinstance(end, tarry.GaveUp)
    assert (Reason.PERMANENT, 1, "404") == (end.reason, end.attempts, end.detail)


@pytest.mark.parametrize("first", ["503", "long"])
def test_copy_that_is_not_allowed_after_a_wait(
    server: FlakyServerView, client: ClientLibrary, first: str
) -> None:
    """After a requested wait, a short response is complete; a long one is gone."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    url = server.url(f"{first}:retry-after-ms=1")
    with client.open(hedging=NEVER, downstream=payments) as session:
        if first == "long":
            with pytest.raises(tarry.BreakerOpen, match="the last attempt failed with 503"):
                session.send("GET", url)
        else:
            assert ClientResponse(503, "answer 1") == session.send("GET", url)

    assert 1 == len(server.seen)


def test_outer_retry_does_not_multiply_copies(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A retry around a hedging client does not multiply the copies."""
    with client.open(hedging=NEVER) as session, pytest.raises(client.disconnect_error):
        tarry.call(session.send, "GET", server.url("drop"), on=Exception)

    assert 2 == len(server.seen)


# --- time -----------------------------------------------------------------------------------------


def test_deadline_ends_all_copies(server: FlakyServerView, client: ClientLibrary) -> None:
    """A call whose copies all hang ends at the deadline, which each of them has sent."""
    ends = (*client.timeout_errors, tarry.DeadlineExceeded)
    with (
        client.open(connections=2, hedging=AT_ONCE) as session,
        tarry.deadline(0.25),
        pytest.raises(ends),
    ):
        session.send("GET", server.url("hang"))

    assert all(0 < int(text or 0) <= 250 for text in server.received("X-Deadline-Ms"))


def test_percentile_of_an_origin(server: FlakyServerView, client: ClientLibrary) -> None:
    """After a hundred calls to an origin, its latency decides when a copy is sent."""
    with client.open(connections=2, hedging=Hedging(after="p95")) as session:
        for _ in range(100):
            session.send("GET", server.url("200", run="-before"))
        response = session.send("GET", server.url("late,200"))

    assert ClientResponse(200, "answer 2") == response


# --- arguments ------------------------------------------------------------------------------------


def test_policy_and_hedging_raise(client: ClientLibrary) -> None:
    """A client cannot retry and hedge, because the two would multiply."""
    with (
        pytest.raises(tarry.ConfigurationError, match=r"policy= .* or hedging="),
        client.open(policy=Policy(), hedging=AT_ONCE),
    ):
        pass


def test_invalid_hedging_raises(client: ClientLibrary) -> None:
    """An invalid argument raises when the adapter is created."""
    with pytest.raises(tarry.ConfigurationError, match=r"hedging must be a tarry\.Hedging"):
        client.open(hedging="p95").__enter__()
