"""Keys of requests that are sent while a request with a key is handled, with every library."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tarry.runtime.derived_keys import KeyedRequest, current_request
from tests.adapters.clients import ClientLibrary
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


def keys_of_run(
    server: FlakyServerView, client: ClientLibrary, record_name: str, bodies: list[bytes]
) -> list[str | None]:
    """Handle a request that sends a POST for each body; return the keys that the server got."""
    count = len(server.received_requests)
    token = current_request.set(KeyedRequest(record_name))
    try:
        with client.open(idempotency_key="auto") as session:
            for body in bodies:
                session.send("POST", server.url("200"), body)
    finally:
        current_request.reset(token)
    return server.header_values("Idempotency-Key")[count:]


def test_each_run_of_a_request_sends_the_same_keys(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """The second run of a request sends the keys of the first run; another request does not."""
    bodies = [b"10 EUR", b"20 EUR", b"10 EUR"]

    first, second, other = (
        keys_of_run(server, client, record_name, bodies) for record_name in ("one", "one", "two")
    )

    assert 3 == len(set(first))
    assert first == second
    assert set(first).isdisjoint(other)


def test_all_attempts_send_the_derived_key(server: FlakyServerView, client: ClientLibrary) -> None:
    token = current_request.set(KeyedRequest("one"))
    try:
        with client.open(idempotency_key="auto") as session:
            session.send("POST", server.url("503,200"), b"10 EUR")
    finally:
        current_request.reset(token)

    first, second = server.header_values("Idempotency-Key")
    assert first == second


@pytest.mark.parametrize("key", [lambda _: "mine", None])
def test_other_options_are_not_changed(
    server: FlakyServerView, client: ClientLibrary, key: Callable[[object], str] | None
) -> None:
    """Only "auto" derives keys: a function still returns the key, and None still adds none."""
    token = current_request.set(KeyedRequest("one"))
    try:
        with client.open(idempotency_key=key) as session:
            session.send("POST", server.url("200"), b"10 EUR")
    finally:
        current_request.reset(token)

    assert ["mine" if key else None] == server.header_values("Idempotency-Key")
