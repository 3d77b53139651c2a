"""What may be sent twice and what may not, through every client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

import tarry
from tarry import Policy, Reason
from tests.adapters.clients import PIECES, Client
from tests.adapters.conftest import Server

pytestmark = pytest.mark.usefixtures("_hurry")


def reason_and_attempts(error: BaseException) -> tuple[Reason, int]:
    """Return how the call that ended with an error went."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason, record.attempts


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_connection_that_was_never_made(client: Client, refused: str, method: str) -> None:
    """Where nobody listens nothing was read, so that any method is retried."""
    with client.open() as talker, pytest.raises(client.refused) as caught:
        talker.send(method, refused, b"order" if method == "POST" else None)

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_body_that_was_never_sent_is_not_used_up(client: Client, refused: str) -> None:
    """An iterator is as good as new while no connection was made."""
    with client.open() as talker, pytest.raises(client.refused) as caught:
        talker.send("PUT", refused, talker.iterator())

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_tls_that_fails_is_not_tried_again(server: Server, client: Client) -> None:
    """A server that does not speak TLS, or has a wrong certificate, will not change its mind."""
    with client.open() as talker, pytest.raises(client.tls) as caught:
        talker.send("GET", server.url("200").replace("http:", "https:"))

    assert (Reason.PERMANENT, 1) == reason_and_attempts(caught.value)


@pytest.fixture
def restarting() -> Iterator[str]:
    """Give the address of a server that hangs up in the middle of a TLS handshake."""

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection:
                if connection.recv(65_536) == b"stop":
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}/"
        with socket.create_connection(listening.getsockname()) as last:
            last.sendall(b"stop")
        thread.join(10)


def test_tls_that_is_cut_short_is_tried_again(client: Client, restarting: str) -> None:
    """A handshake that ends early is a lost connection, as of a load balancer that restarts."""
    with client.open() as talker, pytest.raises(Exception) as caught:  # noqa: PT011
        talker.send("GET", restarting)

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_error_says_that_a_key_is_missing(server: Server, client: Client) -> None:
    """The notes on the error say why the request was not sent again, and what would help."""
    with client.open() as talker, pytest.raises(client.dropped) as caught:
        talker.send("POST", server.url("drop,200"), b"order")

    first, second = caught.value.__notes__
    assert first.endswith("gave up after 1 attempt: the operation is not safe to repeat")
    assert 'its method is not idempotent; an Idempotency-Key (idempotency_key="auto")' in second


@pytest.mark.parametrize("key", ["auto", None])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_body_that_is_used_up(server: Server, client: Client, method: str, key: str | None) -> None:
    """An iterator is sent once, key or not, and the error says so."""
    with client.open(idempotency_key=key) as talker, pytest.raises(client.dropped) as caught:
        answer = talker.send(method, server.url("drop,200"), talker.iterator())
        pytest.fail(f"{answer} came by {server.opened} connections: {server.seen}")

    assert (Reason.UNSAFE, 1) == reason_and_attempts(caught.value)
    assert "its body cannot be sent a second time" in caught.value.__notes__[-1]
    assert [b"".join(PIECES)] == [seen.body for seen in server.seen]


def test_answer_to_a_body_that_is_used_up(server: Server, client: Client) -> None:
    """A failure that answers an iterator is returned at once."""
    with client.open() as talker:
        answer = talker.send("PUT", server.url("503,200"), talker.iterator())

    assert (503, 1) == (answer.status, len(server.seen))


def test_body_is_sent_again_whole(server: Server, client: Client) -> None:
    """Every attempt carries the same bytes."""
    with client.open() as talker:
        talker.send("PUT", server.url("503,drop,200"), b"the whole thing")

    assert [b"the whole thing"] * 3 == [seen.body for seen in server.seen]


# --- time -----------------------------------------------------------------------------------------

BRIEF = Policy(attempt_timeout=0.25)


def test_attempt_that_takes_too_long_is_made_again(server: Server, client: Client) -> None:
    """An attempt is cut off at its timeout, and an idempotent one is followed by the next."""
    with client.open(policy=BRIEF) as talker:
        answer = talker.send("GET", server.url("hang,200"))

    assert (200, 2) == (answer.status, len(server.seen))
    assert all(0 < int(text or 0) <= 250 for text in server.received("X-Deadline-Ms"))


def test_post_that_took_too_long_is_not_made_again(server: Server, client: Client) -> None:
    """A request that was cut off may have been read: without a key it is not sent again."""
    with client.open(policy=BRIEF) as talker, pytest.raises(client.cut_off) as caught:
        talker.send("POST", server.url("hang,200"))

    assert (Reason.UNSAFE, 1) == reason_and_attempts(caught.value)
    assert 1 == len(server.seen)


def test_deadline_is_sent(server: Server, client: Client) -> None:
    """Every attempt tells the server what is left of the ambient deadline."""
    with client.open() as talker, tarry.deadline(60):
        talker.send("GET", server.url("503,200"))

    left = [int(text or 0) for text in server.received("X-Deadline-Ms")]
    assert 60_000 >= left[0] >= left[1] > 0


def test_no_deadline_is_sent_without_one(server: Server, client: Client) -> None:
    """A call that may take for ever says nothing about time."""
    with client.open() as talker:
        talker.send("GET", server.url("200"))

    assert [None] == server.received("X-Deadline-Ms")


def test_deadline_ends_an_attempt(server: Server, client: Client) -> None:
    """A server that hangs is left at the deadline, without another attempt."""
    with client.open() as talker, tarry.deadline(0.25), pytest.raises(client.cut_off) as caught:
        talker.send("GET", server.url("hang"))

    assert (Reason.DEADLINE, 1) == reason_and_attempts(caught.value)


def test_nothing_is_sent_after_the_deadline(server: Server, client: Client) -> None:
    """A call whose time is over does not reach the server."""
    with client.open() as talker, tarry.deadline(0), pytest.raises(tarry.DeadlineExceeded):
        talker.send("GET", server.url("200"))

    assert [] == server.seen
