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

IMMEDIATE = Hedging(after=0)
"""The second copy is sent at once, so either copy may arrive first."""
AFTER_FAILURE = Hedging(after=3600)
"""The second copy is sent only after the first has failed."""


def test_second_copy_wins(server: FlakyServerView, client: ClientLibrary) -> None:
    """If the first copy gets no response, the call returns the response of the second copy."""
    with client.open(connections=2, hedging=IMMEDIATE) as session:
        response = session.send("GET", server.url("late,200"))

    assert ClientResponse(200, "answer 2") == response
    assert {None, "2"} == set(server.header_values("X-Retry-Attempt"))


def test_losing_copies_release_their_connection(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """After a call, the connection of the losing copy can be used again."""
    with client.open(connections=2, hedging=IMMEDIATE) as session, tarry.deadline(60):
        for number in range(5):
            url = server.url("late,200", run_suffix=f"-{number}")
            assert ClientResponse(200, "answer 2") == session.send("GET", url)
            server.resume()  # the server responds to the losing copy
            server.flaky.may_continue.clear()


def test_copies_have_the_same_key(server: FlakyServerView, client: ClientLibrary) -> None:
    """A POST with an automatic key is hedged, and both copies have the same key."""
    with client.open(connections=2, hedging=IMMEDIATE, idempotency_key="auto") as session:
        response = session.send("POST", server.url("late,200"), b"order")

    first, second = server.header_values("Idempotency-Key")
    assert ClientResponse(200, "answer 2") == response
    assert first == second is not None


def test_copies_have_the_same_body(server: FlakyServerView, client: ClientLibrary) -> None:
    """Every copy sends the complete body."""
    with client.open(hedging=AFTER_FAILURE) as session:
        session.send("PUT", server.url("503,200"), b"the body")

    assert [b"the body"] * 2 == [request.body for request in server.received_requests]


@pytest.mark.parametrize("hedging", [IMMEDIATE, AFTER_FAILURE], ids=["immediate", "after failure"])
def test_post_without_a_key_is_sent_once(
    server: FlakyServerView, client: ClientLibrary, hedging: Hedging
) -> None:
    """A request that is not repeatable is neither hedged nor retried."""
    with client.open(connections=2, hedging=hedging) as session:
        response = session.send("POST", server.url("503,200"), b"order")

    assert (ClientResponse(503, "answer 1"), 1) == (response, len(server.received_requests))


def test_iterator_is_sent_once(server: FlakyServerView, client: ClientLibrary) -> None:
    """A request whose body is an iterator is sent once, because two copies cannot share it."""
    with client.open(connections=2, hedging=IMMEDIATE) as session:
        response = session.send("PUT", server.url("503,200"), session.iterator())

    assert (503, 1) == (response.status, len(server.received_requests))


# --- failures -------------------------------------------------------------------------------------


class NotifyingBudget(TokenBudget):
    """A budget that sets an event when a failure is counted."""

    def __init__(self, failure_counted: threading.Event) -> None:
        super().__init__()
        self._failure_counted = failure_counted

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Record an attempt; set the event after a failure."""
        super().record(outcome, paid, now)
        if outcome.counts_as_failure:
            self._failure_counted.set()


def test_failure_waits_for_the_other_copy(server: FlakyServerView, client: ClientLibrary) -> None:
    """A 503 of one copy is not returned while another copy may succeed."""
    payments = Downstream("payments", budget=NotifyingBudget(server.flaky.may_continue))
    with client.open(connections=2, hedging=IMMEDIATE, downstream=payments) as session:
        response = session.send("GET", server.url("503,late"))

    assert (ClientResponse(200, "answer 2"), 2) == (response, len(server.received_requests))


@pytest.mark.parametrize("first", ["503", "long", "drop"])
def test_copy_is_sent_at_once_after_a_failure(
    server: FlakyServerView, client: ClientLibrary, first: str
) -> None:
    """After a failure the next copy is sent without the hedging delay."""
    with client.open(hedging=AFTER_FAILURE) as session:
        response = session.send("GET", server.url(f"{first},200"))

    assert ClientResponse(200, "answer 2") == response
    assert [None, "2"] == server.header_values("X-Retry-Attempt")


def test_last_response_is_returned_if_all_copies_fail(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    with client.open(hedging=Hedging(after=3600, max_attempts=3)) as session:
        response = session.send("GET", server.url("503,429,500"))

    assert (ClientResponse(500, "answer 3"), 3) == (response, len(server.received_requests))


def test_last_error_is_raised_if_all_copies_fail(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    with (
        client.open(hedging=AFTER_FAILURE) as session,
        pytest.raises(client.disconnect_error) as caught,
    ):
        session.send("GET", server.url("503,drop"))

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 2) == (record.reason, record.attempts)


def test_permanent_response_ends_the_call(server: FlakyServerView, client: ClientLibrary) -> None:
    """A 404 ends the call and does not count as a failure for the breaker."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    with client.open(hedging=AFTER_FAILURE, downstream=payments) as session:
        statuses = [session.send("GET", server.url("404")).status for _ in range(3)]

    assert ([404] * 3, 3, "closed") == (statuses, len(server.received_requests), payments.state)


def test_permanent_response_emits_gave_up(server: FlakyServerView, client: ClientLibrary) -> None:
    """A permanent response emits `GaveUp` and no other event."""
    with client.open(hedging=AFTER_FAILURE) as session, captured_events() as events:
        session.send("GET", server.url("404"))

    (event,) = events
    assert isinstance(event, tarry.GaveUp)
    assert (Reason.PERMANENT, 1, "404") == (event.reason, event.attempts, event.detail)


@pytest.mark.parametrize("first", ["503", "long"])
def test_breaker_that_opens_before_the_second_copy(
    server: FlakyServerView, client: ClientLibrary, first: str
) -> None:
    """A short first response is returned; a long one was dropped, so the call raises."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    url = server.url(f"{first}:retry-after-ms=1")
    with client.open(hedging=AFTER_FAILURE, downstream=payments) as session:
        if first == "long":
            with pytest.raises(tarry.BreakerOpen, match="the last attempt failed with 503"):
                session.send("GET", url)
        else:
            assert ClientResponse(503, "answer 1") == session.send("GET", url)

    assert 1 == len(server.received_requests)


def test_outer_retry_does_not_multiply_copies(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A retry around a hedging client does not multiply the copies."""
    with client.open(hedging=AFTER_FAILURE) as session, pytest.raises(client.disconnect_error):
        tarry.call(session.send, "GET", server.url("drop"), on=Exception)

    assert 2 == len(server.received_requests)


# --- deadlines and delays -------------------------------------------------------------------------


def test_deadline_ends_all_copies(server: FlakyServerView, client: ClientLibrary) -> None:
    """A call whose copies all hang ends at the deadline, and each copy has sent the deadline."""
    errors = (*client.timeout_errors, tarry.DeadlineExceeded)
    with (
        client.open(connections=2, hedging=IMMEDIATE) as session,
        tarry.deadline(1),
        pytest.raises(errors),
    ):
        session.send("GET", server.url("hang"))

    remaining_ms = [int(text or 0) for text in server.header_values("X-Deadline-Ms")]
    assert 2 == len(remaining_ms)
    assert all(0 < each <= 1000 for each in remaining_ms)


def test_delay_from_a_latency_percentile(server: FlakyServerView, client: ClientLibrary) -> None:
    """After a hundred calls, the p95 latency of the origin is the delay before the second copy."""
    with client.open(connections=2, hedging=Hedging(after="p95")) as session:
        for _ in range(100):
            session.send("GET", server.url("200", run_suffix="-before"))
        response = session.send("GET", server.url("late,200"))

    assert ClientResponse(200, "answer 2") == response


# --- arguments ------------------------------------------------------------------------------------


def test_policy_with_hedging_raises(client: ClientLibrary) -> None:
    """A client cannot both retry and hedge, because retries would multiply the copies."""
    with (
        pytest.raises(tarry.ConfigurationError, match=r"policy= .* or hedging="),
        client.open(policy=Policy(), hedging=IMMEDIATE),
    ):
        pass


def test_invalid_hedging_raises(client: ClientLibrary) -> None:
    """An invalid `hedging` argument raises when the adapter is created."""
    with pytest.raises(tarry.ConfigurationError, match=r"hedging must be a tarry\.Hedging"):
        client.open(hedging="p95").__enter__()
