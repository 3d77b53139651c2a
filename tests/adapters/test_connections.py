"""Connections, downstreams and arguments, with every client library."""

from __future__ import annotations

import pytest

import tarry
from tarry import Breaker, BreakerState, Downstream, Policy
from tests.adapters.clients import ClientLibrary, ClientResponse
from tests.adapters.conftest import FlakyServerView
from tests.integration.flaky import flaky_server

pytestmark = pytest.mark.usefixtures("_no_waits")


def test_connection_is_released_during_a_wait(
    server: FlakyServerView, client: ClientLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pool of one connection, another call succeeds while the first one waits."""
    with client.open() as session:
        others = session.call_during_waits(
            monkeypatch, "GET", server.url("200", run_suffix="-other")
        )
        response = session.send("GET", server.url("503,drop,long,200"))

    assert ClientResponse(200, "answer 4") == response
    assert [ClientResponse(200, f"answer {number}") for number in (1, 2, 3)] == others


def test_attempts_reuse_the_connection(server: FlakyServerView, client: ClientLibrary) -> None:
    """Short responses are read to their end, so all attempts use the same connection."""
    with client.open() as session:
        session.send("GET", server.url("503,429,200"))

    assert 1 == server.opened_connections


@pytest.mark.parametrize("plan", ["503", "long"])
def test_breaker_opens_during_the_wait(
    server: FlakyServerView, client: ClientLibrary, plan: str
) -> None:
    """A short last response is returned; a long one was dropped, so the call raises."""
    payments = Downstream("payments", breaker=Breaker())

    def open_breaker(*_: object) -> float:
        payments.force("open")
        return 0.0

    with client.open(downstream=payments, policy=Policy(jitter=open_breaker)) as session:
        if plan == "long":
            with pytest.raises(tarry.BreakerOpen, match="the last attempt failed with 503"):
                session.send("GET", server.url(plan))
        else:
            assert ClientResponse(503, "answer 1") == session.send("GET", server.url(plan))

    assert 1 == len(server.received_requests)


# --- downstreams ----------------------------------------------------------------------------------


def downstream_with_breaker(origin: str) -> Downstream:
    """Return a downstream whose breaker opens at the second consecutive failure."""
    return Downstream(origin, breaker=Breaker(consecutive=2))


def test_each_origin_has_its_own_breaker(server: FlakyServerView, client: ClientLibrary) -> None:
    """An open breaker rejects calls to its own origin, but not to other origins."""
    with client.open(downstream=downstream_with_breaker) as session, flaky_server() as healthy:
        last = session.send("GET", server.url("503"))
        with pytest.raises(tarry.BreakerOpen) as caught:
            session.send("GET", server.url("503"))
        other = session.send("GET", healthy.url)

    assert (503, 200) == (last.status, other.status)
    assert 2 == len(server.received_requests)
    assert server.flaky.url == caught.value.downstream


def test_permanent_responses_do_not_open_the_breaker(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A 404 does not count as a failure for the breaker."""
    payments = downstream_with_breaker("payments")
    with client.open(downstream=payments) as session:
        statuses = [session.send("GET", server.url("404")).status for _ in range(5)]

    assert [404] * 5 == statuses
    assert BreakerState.CLOSED == payments.state


def test_breaker_opens_after_twenty_failures(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """Without `min_span` a breaker opens after 20 failures, however fast they follow each other."""
    payments = Downstream("payments", breaker=Breaker(min_span=0))
    with client.open(policy=Policy(max_attempts=1), downstream=payments) as session:
        for _ in range(20):
            session.send("GET", server.url("503"))
        with pytest.raises(tarry.BreakerOpen):
            session.send("GET", server.url("503"))

    assert 20 == len(server.received_requests)


def test_outer_retry_does_not_multiply_attempts(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A retry around the client does not repeat a call that the adapter gave up."""
    with client.open() as session, pytest.raises(client.disconnect_error):
        tarry.call(session.send, "GET", server.url("drop"), on=Exception)

    assert 4 == len(server.received_requests)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("idempotency_key", "order-7", "all requests would have the same key"),
        ("idempotency_key", 7, 'must be "auto", a function of the request, or None, got 7'),
        ("downstream", "payments", 'must be a tarry.Downstream("name")'),
        ("policy", 4, "policy must be a tarry.Policy"),
    ],
)
def test_invalid_argument_raises(
    client: ClientLibrary, option: str, value: object, message: str
) -> None:
    """An invalid argument raises when the adapter is created."""
    with pytest.raises(tarry.ConfigurationError) as caught, client.open(**{option: value}):
        pass

    assert message in str(caught.value)


def test_key_function_must_not_be_async(client: ClientLibrary) -> None:
    """A coroutine function is rejected, because the key is needed at once."""

    async def key(_: object) -> str:
        return "order-7"

    with (
        pytest.raises(tarry.ConfigurationError, match="must be a plain function"),
        client.open(idempotency_key=key),
    ):
        pass


def test_key_must_be_visible_ascii(server: FlakyServerView, client: ClientLibrary) -> None:
    """A key with other characters raises before the request is sent."""
    with (
        client.open(idempotency_key=lambda _: "Bestellung für\n") as session,
        pytest.raises(tarry.ConfigurationError, match="visible ASCII"),
    ):
        session.send("POST", server.url("200"))

    assert [] == server.received_requests
