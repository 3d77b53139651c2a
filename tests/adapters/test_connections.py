"""Connections, and the dependency behind each origin, through every client."""

from __future__ import annotations

import pytest

import tarry
from tarry import Breaker, BreakerState, Downstream, Policy
from tests.adapters.clients import Answer, Client
from tests.adapters.conftest import Server
from tests.integration.flaky import flaky_server

pytestmark = pytest.mark.usefixtures("_hurry")


def test_wait_holds_no_connection(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one connection for all, another call gets through while the first one waits."""
    with client.open() as talker:
        others = talker.while_waiting(monkeypatch, "GET", server.url("200", run="-other"))
        answer = talker.send("GET", server.url("503,drop,long,200"))

    assert Answer(200, "answer 4") == answer
    assert [Answer(200, f"answer {number}") for number in (1, 2, 3)] == others


def test_connection_of_a_failure_is_kept(server: Server, client: Client) -> None:
    """Short answers are read to their end, so that all attempts go through one connection."""
    with client.open() as talker:
        talker.send("GET", server.url("503,429,200"))

    assert 1 == server.opened


@pytest.mark.parametrize("plan", ["503", "long"])
def test_breaker_that_opens_during_the_wait(server: Server, client: Client, plan: str) -> None:
    """The last answer is still whole if it was short; a long one is gone, and the error says so."""
    payments = Downstream("payments", breaker=Breaker())

    def opens(*_: object) -> float:
        payments.force("open")
        return 0.0

    with client.open(downstream=payments, policy=Policy(jitter=opens)) as talker:
        if plan == "long":
            with pytest.raises(tarry.BreakerOpen, match="the last answer was 503"):
                talker.send("GET", server.url(plan))
        else:
            assert Answer(503, "answer 1") == talker.send("GET", server.url(plan))

    assert 1 == len(server.seen)


# --- the dependency -------------------------------------------------------------------------------


def guarded(origin: str) -> Downstream:
    """Return a dependency whose breaker opens at the second failure."""
    return Downstream(origin, breaker=Breaker(consecutive=2))


def test_breaker_of_one_origin_leaves_the_others_alone(server: Server, client: Client) -> None:
    """An open breaker stops calls to its own origin before they are sent, and no others."""
    with client.open(downstream=guarded) as talker, flaky_server() as healthy:
        last = talker.send("GET", server.url("503"))
        with pytest.raises(tarry.BreakerOpen) as caught:
            talker.send("GET", server.url("503"))
        other = talker.send("GET", healthy.url)

    assert (503, 200) == (last.status, other.status)
    assert 2 == len(server.seen)
    assert server.flaky.url == caught.value.downstream


def test_permanent_answers_do_not_open_the_breaker(server: Server, client: Client) -> None:
    """A 404 is an answer: the server lives."""
    payments = guarded("payments")
    with client.open(downstream=payments) as talker:
        statuses = [talker.send("GET", server.url("404")).status for _ in range(5)]

    assert [404] * 5 == statuses
    assert BreakerState.CLOSED == payments.state


def test_breaker_by_default(server: Server, client: Client) -> None:
    """Without a word about it, every origin has a breaker."""
    with client.open(policy=Policy(max_attempts=1)) as talker:
        for _ in range(20):
            talker.send("GET", server.url("503"))
        with pytest.raises(tarry.BreakerOpen):
            talker.send("GET", server.url("503"))

    assert 20 == len(server.seen)


def test_outer_loop_passes_on_what_the_adapter_gave_up(server: Server, client: Client) -> None:
    """A retry around the client does not multiply the attempts of the adapter."""
    with client.open() as talker, pytest.raises(client.dropped):
        tarry.call(talker.send, "GET", server.url("drop"), on=Exception)

    assert 4 == len(server.seen)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("idempotency_key", "order-7", "with one key, all requests would count as one"),
        ("idempotency_key", 7, 'must be "auto", a function of the request, or None, got 7'),
        ("downstream", "payments", 'must be a tarry.Downstream("name")'),
        ("policy", 4, "policy must be a tarry.Policy"),
    ],
)
def test_wrong_arguments(client: Client, option: str, value: object, says: str) -> None:
    """A mistake is named when the adapter is made."""
    with pytest.raises(tarry.ConfigurationError) as caught, client.open(**{option: value}):
        pass

    assert says in str(caught.value)


def test_coroutine_function_makes_no_key(client: Client) -> None:
    """The key is needed at once."""

    async def key(_: object) -> str:
        return "order-7"

    with (
        pytest.raises(tarry.ConfigurationError, match="must be a plain function"),
        client.open(idempotency_key=key),
    ):
        pass


def test_key_that_no_header_can_carry(server: Server, client: Client) -> None:
    """A key outside of visible ASCII is refused before anything is sent."""
    with (
        client.open(idempotency_key=lambda _: "Bestellung für\n") as talker,
        pytest.raises(tarry.ConfigurationError, match="visible ASCII"),
    ):
        talker.send("POST", server.url("200"))

    assert [] == server.seen
