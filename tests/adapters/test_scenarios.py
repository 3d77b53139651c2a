"""One table of cases that every client library runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import tarry
from tarry import Policy, Reason
from tarry.testing import captured_events
from tests.adapters.clients import ClientLibrary, ClientResponse
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


@dataclass(frozen=True)
class Case:
    """The server's plan for one call, and the expected result."""

    name: str
    plan: str
    arrive: int
    """How many requests the server sees."""
    gives: int | None
    """The status that is returned, None for the client's own error of a broken connection."""
    method: str = "GET"
    reason: Reason | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.name


AUTO = {"idempotency_key": "auto"}
KEY = {"Idempotency-Key": '"mine"'}


def options(**values: Any) -> dict[str, Any]:
    """The policy options of a case."""
    return {"policy": Policy(**values)}


CASES = [
    Case("an answer at once", "200", 1, 200),
    *(
        Case(f"retryable status {status}", f"{status},200", 2, 200)
        for status in (408, 425, 429, 500, 502, 503, 504)
    ),
    Case("two failures", "503,502,200", 3, 200),
    Case("a broken connection", "drop,200", 2, 200),
    Case("a broken connection, then a failure", "drop,503,200", 3, 200),
    Case("the last answer is returned", "503", 4, 503),
    Case("the last error is raised", "drop", 4, None, reason=Reason.ATTEMPTS),
    Case("another number of attempts", "503", 2, 503, options=options(max_attempts=2)),
    Case("a status of the user's", "418,200", 2, 200, options=options(retryable_statuses={418})),
    *(Case(f"permanent status {status}", f"{status},200", 1, status) for status in (400, 404, 501)),
    Case("a permanent status after a failure", "503,404,200", 2, 404),
    *(Case(f"idempotent {method}", "503,drop,200", 3, 200, method) for method in ("PUT", "DELETE")),
    Case("HEAD", "503,drop,200", 3, 200, "HEAD"),
    *(
        Case(f"{method} that was answered", "503,200", 1, 503, method)
        for method in ("POST", "PATCH")
    ),
    Case("POST that may have been read", "drop,200", 1, None, "POST", Reason.NOT_REPEATABLE),
    Case("POST with a key of ours", "503,drop,200", 3, 200, "POST", options=AUTO),
    Case("PATCH with a key of ours", "503,200", 2, 200, "PATCH", options=AUTO),
    Case("POST with a key of the user's", "503,drop,200", 3, 200, "POST", headers=KEY),
    Case("the server says yes", "400:x-should-retry=true,200", 2, 200),
    Case("the server says no", "503:x-should-retry=false,200", 1, 503),
    Case("a longer wait than is allowed", "503:retry-after=999,200", 1, 503),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(server: FlakyServerView, client: ClientLibrary, case: Case) -> None:
    """A call sends as many requests as its case says, and ends with that response or error."""
    with client.open(**case.options) as session:
        if case.gives is not None:
            response = session.send(case.method, server.url(case.plan), headers=dict(case.headers))

            text = "" if case.method == "HEAD" else f"answer {case.arrive}"
            assert ClientResponse(case.gives, text) == response
        else:
            with pytest.raises(client.disconnect_error) as caught:
                session.send(case.method, server.url(case.plan))

            record = tarry.record_of(caught.value)
            assert record is not None
            assert (case.reason, case.arrive) == (record.reason, record.attempts)

    assert [case.method] * case.arrive == [seen.method for seen in server.seen]


# --- headers of an attempt ------------------------------------------------------------------------


def test_attempts_are_numbered(server: FlakyServerView, client: ClientLibrary) -> None:
    """The first attempt has no number header, later ones have it."""
    with client.open() as session:
        session.send("GET", server.url("503,drop,200"))

    assert [None, "2", "3"] == server.received("X-Retry-Attempt")


def test_one_key_for_all_attempts_of_a_call(server: FlakyServerView, client: ClientLibrary) -> None:
    """The automatic key is the same on every attempt and another for the next call."""
    with client.open(**AUTO) as session:
        session.send("POST", server.url("503,503,200"), b"order")
        session.send("POST", server.url("200"), b"order")

    first, second, third, other = server.received("Idempotency-Key")
    assert first == second == third != other
    assert first is not None
    assert first.startswith('"')


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_idempotent_request_gets_no_key(
    server: FlakyServerView, client: ClientLibrary, method: str
) -> None:
    """A request that is repeatable anyway gets no key."""
    with client.open(**AUTO) as session:
        session.send(method, server.url("200"))

    assert [None] == server.received("Idempotency-Key")


@pytest.mark.parametrize(
    ("key", "sent"),
    [
        (lambda request: f"order-{request.method}", ['"order-POST"'] * 2),
        (lambda _: 'a"b\\c', ['"a\\"b\\\\c"'] * 2),
        (lambda _: None, [None]),
    ],
    ids=["of the request", "with quotes", "none"],
)
def test_key_from_a_function(
    server: FlakyServerView,
    client: ClientLibrary,
    key: Callable[[Any], str | None],
    sent: list[str | None],
) -> None:
    """A function of the request returns the key, or None for no key."""
    with client.open(idempotency_key=key) as session:
        session.send("POST", server.url("503,200"))

    assert sent == server.received("Idempotency-Key")


def test_user_key_is_kept(server: FlakyServerView, client: ClientLibrary) -> None:
    """A key that the user has set is not replaced."""
    with client.open(**AUTO) as session:
        session.send("POST", server.url("503,200"), headers=dict(KEY))

    assert ['"mine"', '"mine"'] == server.received("Idempotency-Key")


# --- events ---------------------------------------------------------------------------------------


def test_events_name_method_and_origin(server: FlakyServerView, client: ClientLibrary) -> None:
    """The operation in events is the method and the origin, without path and query."""
    with client.open() as session, captured_events() as events:
        session.send("GET", server.url("503,200"))

    assert {f"GET {server.flaky.url}"} == {event.operation for event in events}
