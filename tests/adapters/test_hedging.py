"""Copies of a request that takes too long, through every client that can send them."""

from __future__ import annotations

import threading

import pytest

import tarry
from tarry import Breaker, Downstream, Hedging, Outcome, Policy, Reason, TokenBudget
from tarry.testing import captured_events
from tests.adapters.clients import HEDGING, Answer, Client
from tests.adapters.conftest import Server

pytestmark = pytest.mark.parametrize("client", HEDGING, ids=str)

AT_ONCE = Hedging(after=0)
"""Both copies are sent before one is answered, and either may arrive first."""
NEVER = Hedging(after=3600)
"""No copy is sent because of time."""


def test_second_answer_wins(server: Server, client: Client) -> None:
    """A request that is not answered is overtaken by its copy, which carries its number."""
    with client.open(connections=2, hedging=AT_ONCE) as talker:
        answer = talker.send("GET", server.url("late,200"))

    assert Answer(200, "answer 2") == answer
    assert {None, "2"} == set(server.received("X-Retry-Attempt"))


def test_losers_hold_no_connection(server: Server, client: Client) -> None:
    """After every call both connections can be used again, whatever became of the loser."""
    with client.open(connections=2, hedging=AT_ONCE) as talker, tarry.deadline(60):
        for number in range(5):
            url = server.url("late,200", run=f"-{number}")
            assert Answer(200, "answer 2") == talker.send("GET", url)
            server.go_on()  # now the loser has its answer, too
            server.flaky.go_on.clear()


def test_copies_share_a_key(server: Server, client: Client) -> None:
    """To the server both copies of a POST are one order, and so they may be sent."""
    with client.open(connections=2, hedging=AT_ONCE, idempotency_key="auto") as talker:
        answer = talker.send("POST", server.url("late,200"), b"order")

    first, second = server.received("Idempotency-Key")
    assert Answer(200, "answer 2") == answer
    assert first == second is not None


def test_copies_carry_the_whole_body(server: Server, client: Client) -> None:
    """Every copy sends the same bytes."""
    with client.open(hedging=NEVER) as talker:
        talker.send("PUT", server.url("503,200"), b"the whole thing")

    assert [b"the whole thing"] * 2 == [seen.body for seen in server.seen]


@pytest.mark.parametrize("hedging", [AT_ONCE, NEVER], ids=["at once", "never"])
def test_post_without_a_key_is_sent_once(server: Server, client: Client, hedging: Hedging) -> None:
    """What may not be repeated is neither hedged nor sent again after a failure."""
    with client.open(connections=2, hedging=hedging) as talker:
        answer = talker.send("POST", server.url("503,200"), b"order")

    assert (Answer(503, "answer 1"), 1) == (answer, len(server.seen))


def test_body_that_is_used_up_is_sent_once(server: Server, client: Client) -> None:
    """Two copies cannot share an iterator."""
    with client.open(connections=2, hedging=AT_ONCE) as talker:
        answer = talker.send("PUT", server.url("503,200"), talker.iterator())

    assert (503, 1) == (answer.status, len(server.seen))


# --- failures -------------------------------------------------------------------------------------


class Telling(TokenBudget):
    """A budget that tells when a failure was counted."""

    def __init__(self, told: threading.Event) -> None:
        super().__init__()
        self._told = told

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Learn that an attempt ended."""
        super().record(outcome, paid, now)
        if outcome.counts_as_failure:
            self._told.set()


def test_failure_does_not_beat_a_copy_that_runs(server: Server, client: Client) -> None:
    """A 503 of one copy is no answer while another, which comes later, may have a better one."""
    payments = Downstream("payments", budget=Telling(server.flaky.go_on))
    with client.open(connections=2, hedging=AT_ONCE, downstream=payments) as talker:
        answer = talker.send("GET", server.url("503,late"))

    assert (Answer(200, "answer 2"), 2) == (answer, len(server.seen))


@pytest.mark.parametrize("first", ["503", "long", "drop"])
def test_copy_follows_a_failure_at_once(server: Server, client: Client, first: str) -> None:
    """What failed is not waited for; the time of a copy comes early."""
    with client.open(hedging=NEVER) as talker:
        answer = talker.send("GET", server.url(f"{first},200"))

    assert Answer(200, "answer 2") == answer
    assert [None, "2"] == server.received("X-Retry-Attempt")


def test_last_answer_of_all_that_failed(server: Server, client: Client) -> None:
    """If every copy fails, the client gets the last answer as it is."""
    with client.open(hedging=Hedging(after=3600, max_attempts=3)) as talker:
        answer = talker.send("GET", server.url("503,429,500"))

    assert (Answer(500, "answer 3"), 3) == (answer, len(server.seen))


def test_last_error_of_all_that_failed(server: Server, client: Client) -> None:
    """If the last copy ends with an error, that is what the call ends with."""
    with client.open(hedging=NEVER) as talker, pytest.raises(client.dropped) as caught:
        talker.send("GET", server.url("503,drop"))

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.ATTEMPTS, 2) == (record.reason, record.attempts)


def test_permanent_answer_is_the_answer(server: Server, client: Client) -> None:
    """A 404 ends the call, and says nothing against the server."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    with client.open(hedging=NEVER, downstream=payments) as talker:
        statuses = [talker.send("GET", server.url("404")).status for _ in range(3)]

    assert ([404] * 3, 3, "closed") == (statuses, len(server.seen), payments.state)


def test_permanent_answer_is_no_success(server: Server, client: Client) -> None:
    """Listeners hear that the call was given up for good."""
    with client.open(hedging=NEVER) as talker, captured_events() as events:
        talker.send("GET", server.url("404"))

    (end,) = events
    assert isinstance(end, tarry.GaveUp)
    assert (Reason.PERMANENT, 1, "404") == (end.reason, end.attempts, end.detail)


@pytest.mark.parametrize("first", ["503", "long"])
def test_copy_that_may_not_go_when_its_time_comes(
    server: Server, client: Client, first: str
) -> None:
    """After a wait that the server asked for, a short answer is still whole; a long one is gone."""
    payments = Downstream("payments", breaker=Breaker(consecutive=1))
    url = server.url(f"{first}:retry-after-ms=1")
    with client.open(hedging=NEVER, downstream=payments) as talker:
        if first == "long":
            with pytest.raises(tarry.BreakerOpen, match="the last answer was 503"):
                talker.send("GET", url)
        else:
            assert Answer(503, "answer 1") == talker.send("GET", url)

    assert 1 == len(server.seen)


def test_outer_loop_passes_on_what_all_copies_failed_with(server: Server, client: Client) -> None:
    """A retry around a client that hedges does not multiply the copies."""
    with client.open(hedging=NEVER) as talker, pytest.raises(client.dropped):
        tarry.call(talker.send, "GET", server.url("drop"), on=Exception)

    assert 2 == len(server.seen)


# --- time -----------------------------------------------------------------------------------------


def test_deadline_ends_all_copies(server: Server, client: Client) -> None:
    """A call whose copies all hang ends at the deadline, which each of them was told."""
    ends = (*client.cut_off, tarry.DeadlineExceeded)
    with (
        client.open(connections=2, hedging=AT_ONCE) as talker,
        tarry.deadline(0.25),
        pytest.raises(ends),
    ):
        talker.send("GET", server.url("hang"))

    assert all(0 < int(text or 0) <= 250 for text in server.received("X-Deadline-Ms"))


def test_percentile_of_an_origin(server: Server, client: Client) -> None:
    """Once a hundred calls to an origin were seen, its latency says when a copy goes."""
    with client.open(connections=2, hedging=Hedging(after="p95")) as talker:
        for _ in range(100):
            talker.send("GET", server.url("200", run="-before"))
        answer = talker.send("GET", server.url("late,200"))

    assert Answer(200, "answer 2") == answer


# --- arguments ------------------------------------------------------------------------------------


def test_retry_or_hedge(client: Client) -> None:
    """A client that retries and hedges would multiply the two, so that it is refused."""
    with (
        pytest.raises(tarry.ConfigurationError, match=r"policy= .* or hedging="),
        client.open(policy=Policy(), hedging=AT_ONCE),
    ):
        pass


def test_wrong_hedging(client: Client) -> None:
    """A mistake is named when the adapter is made."""
    with pytest.raises(tarry.ConfigurationError, match=r"hedging must be a tarry\.Hedging"):
        client.open(hedging="p95").__enter__()
