"""Requests that are retried, requests that are not, and deadlines, with every client library."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

import tarry
from tarry import Policy, Reason
from tests.adapters.clients import CHUNKS, ClientLibrary
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


def reason_and_attempts(error: BaseException) -> tuple[Reason | None, int]:
    """Return the reason and the number of attempts of a call that raises."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason, record.attempts


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_refused_connection_is_retried(
    client: ClientLibrary, unreachable_url: str, method: str
) -> None:
    """If the connection is refused, nothing was sent, so any method is retried."""
    with client.open() as session, pytest.raises(client.connect_error) as caught:
        session.send(method, unreachable_url, b"order" if method == "POST" else None)

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_unread_iterator_is_sent_again(client: ClientLibrary, unreachable_url: str) -> None:
    """A request with an iterator is retried if connecting fails, as nothing was consumed."""
    with client.open() as session, pytest.raises(client.connect_error) as caught:
        session.send("PUT", unreachable_url, session.iterator())

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_tls_error_is_permanent(server: FlakyServerView, client: ClientLibrary) -> None:
    """A TLS error, here of a server without TLS, is not retried."""
    with client.open() as session, pytest.raises(client.tls_error) as caught:
        session.send("GET", server.url("200").replace("http:", "https:"))

    assert (Reason.PERMANENT, 1) == reason_and_attempts(caught.value)


@pytest.fixture
def url_with_broken_handshake() -> Iterator[str]:
    """Return the URL of a server that disconnects during the TLS handshake."""

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
        with socket.create_connection(listening.getsockname()) as final_connection:
            final_connection.sendall(b"stop")
        thread.join(10)


def test_interrupted_handshake_is_retried(
    client: ClientLibrary, url_with_broken_handshake: str
) -> None:
    """A disconnect during the TLS handshake, as when a proxy restarts, is retried."""
    with client.open() as session, pytest.raises(Exception) as caught:  # noqa: PT011
        session.send("GET", url_with_broken_handshake)

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_note_about_a_missing_key(server: FlakyServerView, client: ClientLibrary) -> None:
    """The notes explain why a POST was not retried, and that an idempotency key allows a retry."""
    with client.open() as session, pytest.raises(client.disconnect_error) as caught:
        session.send("POST", server.url("drop,200"), b"order")

    first, second = caught.value.__notes__
    assert first.endswith("gave up after 1 attempt: the operation is not repeatable")
    assert 'its method is not idempotent; an Idempotency-Key (idempotency_key="auto")' in second


def test_log_line_about_a_request_that_is_not_repeatable(
    server: FlakyServerView, client: ClientLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning for a POST with a key and an iterator does not recommend an Idempotency-Key."""
    with client.open(idempotency_key="auto") as session:
        session.send("POST", server.url("503,200"), session.iterator())

    [warning] = [record.message for record in caplog.records if record.name == "tarry"]
    assert warning.endswith("gave up after 1 attempt: the operation is not repeatable (503)")


@pytest.mark.parametrize("key", ["auto", None])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_iterator_is_sent_once(
    server: FlakyServerView, client: ClientLibrary, method: str, key: str | None
) -> None:
    """An iterator is sent once, with or without a key, and a note explains why."""
    with (
        client.open(idempotency_key=key) as session,
        pytest.raises(client.disconnect_error) as caught,
    ):
        response = session.send(method, server.url("drop,200"), session.iterator())
        pytest.fail(
            f"{response} after {server.opened_connections} connections: {server.received_requests}"
        )

    assert (Reason.NOT_REPEATABLE, 1) == reason_and_attempts(caught.value)
    assert "its body cannot be sent a second time" in caught.value.__notes__[-1]
    assert [b"".join(CHUNKS)] == [request.body for request in server.received_requests]


def test_response_to_an_iterator_is_returned(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A failed response to a request with an iterator is returned at once."""
    with client.open() as session:
        response = session.send("PUT", server.url("503,200"), session.iterator())

    assert (503, 1) == (response.status, len(server.received_requests))


def test_body_is_sent_again_completely(server: FlakyServerView, client: ClientLibrary) -> None:
    """Every attempt sends the complete body."""
    with client.open() as session:
        session.send("PUT", server.url("503,drop,200"), b"the body")

    assert [b"the body"] * 3 == [request.body for request in server.received_requests]


# --- timeouts and deadlines -----------------------------------------------------------------------

SHORT_TIMEOUT = Policy(attempt_timeout=1)  # s; long enough for a request on a busy machine


def test_timed_out_attempt_is_retried(server: FlakyServerView, client: ClientLibrary) -> None:
    """An attempt ends at its timeout, and a GET is retried."""
    with client.open(policy=SHORT_TIMEOUT) as session:
        response = session.send("GET", server.url("hang,200"))

    assert (200, 2) == (response.status, len(server.received_requests))
    assert all(0 < int(text or 0) <= 1000 for text in server.header_values("X-Deadline-Ms"))


def test_timed_out_post_is_not_retried(server: FlakyServerView, client: ClientLibrary) -> None:
    """A POST without a key is not retried after a timeout, as the server may have received it."""
    with (
        client.open(policy=SHORT_TIMEOUT) as session,
        pytest.raises(client.timeout_errors) as caught,
    ):
        session.send("POST", server.url("hang,200"))

    assert (Reason.NOT_REPEATABLE, 1) == reason_and_attempts(caught.value)
    assert 1 == len(server.received_requests)


def test_deadline_is_sent(server: FlakyServerView, client: ClientLibrary) -> None:
    """Every attempt sends the remaining time of the deadline."""
    with client.open() as session, tarry.deadline(60):
        session.send("GET", server.url("503,200"))

    remaining_ms = [int(text or 0) for text in server.header_values("X-Deadline-Ms")]
    assert 60_000 >= remaining_ms[0] >= remaining_ms[1] > 0


def test_no_header_without_a_deadline(server: FlakyServerView, client: ClientLibrary) -> None:
    with client.open() as session:
        session.send("GET", server.url("200"))

    assert [None] == server.header_values("X-Deadline-Ms")


def test_deadline_ends_an_attempt(server: FlakyServerView, client: ClientLibrary) -> None:
    """An attempt that hangs ends at the deadline, and is the last attempt."""
    with (
        client.open() as session,
        tarry.deadline(1),
        pytest.raises(client.timeout_errors) as caught,
    ):
        session.send("GET", server.url("hang"))

    assert (Reason.DEADLINE, 1) == reason_and_attempts(caught.value)


def test_nothing_is_sent_after_the_deadline(server: FlakyServerView, client: ClientLibrary) -> None:
    """A call whose deadline has passed sends no request."""
    with client.open() as session, tarry.deadline(0), pytest.raises(tarry.DeadlineExceeded):
        session.send("GET", server.url("200"))

    assert [] == server.received_requests
