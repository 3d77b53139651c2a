"""A table of calls that runs with every client library."""

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
    request_count: int
    """The number of requests that the server receives."""
    status: int | None
    """The status of the returned response, or None if the call raises the disconnect error."""
    method: str = "GET"
    reason: Reason | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.name


AUTO_KEY = {"idempotency_key": "auto"}
USER_KEY = {"Idempotency-Key": '"mine"'}


def with_policy(**values: Any) -> dict[str, Any]:
    """Return the options of a client with this policy."""
    return {"policy": Policy(**values)}


CASES = [
    Case("immediate success", "200", 1, 200),
    *(
        Case(f"retryable status {status}", f"{status},200", 2, 200)
        for status in (408, 425, 429, 500, 502, 503, 504)
    ),
    Case("two failures, then a success", "503,502,200", 3, 200),
    Case("a dropped connection", "drop,200", 2, 200),
    Case("a dropped connection, then a failure", "drop,503,200", 3, 200),
    Case("the last response is returned", "503", 4, 503),
    Case("the last error is raised", "drop", 4, None, reason=Reason.ATTEMPTS),
    Case("max_attempts of the policy", "503", 2, 503, options=with_policy(max_attempts=2)),
    Case(
        "retryable status of the policy",
        "418,200",
        2,
        200,
        options=with_policy(retryable_statuses={418}),
    ),
    *(Case(f"permanent status {status}", f"{status},200", 1, status) for status in (400, 404, 501)),
    Case("a permanent status after a failure", "503,404,200", 2, 404),
    *(Case(f"idempotent {method}", "503,drop,200", 3, 200, method) for method in ("PUT", "DELETE")),
    Case("HEAD", "503,drop,200", 3, 200, "HEAD"),
    *(
        Case(f"{method} with a 503 response", "503,200", 1, 503, method)
        for method in ("POST", "PATCH")
    ),
    Case("POST that may have been read", "drop,200", 1, None, "POST", Reason.NOT_REPEATABLE),
    Case("POST with an automatic key", "503,drop,200", 3, 200, "POST", options=AUTO_KEY),
    Case("PATCH with an automatic key", "503,200", 2, 200, "PATCH", options=AUTO_KEY),
    Case("POST with a key set by the user", "503,drop,200", 3, 200, "POST", headers=USER_KEY),
    Case("X-Should-Retry: true", "400:x-should-retry=true,200", 2, 200),
    Case("X-Should-Retry: false", "503:x-should-retry=false,200", 1, 503),
    Case("Retry-After longer than the maximum", "503:retry-after=999,200", 1, 503),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(server: FlakyServerView, client: ClientLibrary, case: Case) -> None:
    """A call sends the expected number of requests and ends with the expected result."""
    with client.open(**case.options) as session:
        if case.status is not None:
            response = session.send(case.method, server.url(case.plan), headers=dict(case.headers))

            text = "" if case.method == "HEAD" else f"answer {case.request_count}"
            assert ClientResponse(case.status, text) == response
        else:
            with pytest.raises(client.disconnect_error) as caught:
                session.send(case.method, server.url(case.plan))

            record = tarry.record_of(caught.value)
            assert record is not None
            assert (case.reason, case.request_count) == (record.reason, record.attempts)

    assert [case.method] * case.request_count == [
        request.method for request in server.received_requests
    ]


# --- headers of attempts --------------------------------------------------------------------------


def test_attempts_are_numbered(server: FlakyServerView, client: ClientLibrary) -> None:
    """The first attempt has no number header; each later attempt has its number."""
    with client.open() as session:
        session.send("GET", server.url("503,drop,200"))

    assert [None, "2", "3"] == server.header_values("X-Retry-Attempt")


def test_one_key_for_all_attempts_of_a_call(server: FlakyServerView, client: ClientLibrary) -> None:
    """All attempts of a call have the same automatic key; the next call has another key."""
    with client.open(**AUTO_KEY) as session:
        session.send("POST", server.url("503,503,200"), b"order")
        session.send("POST", server.url("200"), b"order")

    first, second, third, other = server.header_values("Idempotency-Key")
    assert first == second == third != other
    assert first is not None
    assert first.isalnum()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_idempotent_request_gets_no_key(
    server: FlakyServerView, client: ClientLibrary, method: str
) -> None:
    with client.open(**AUTO_KEY) as session:
        session.send(method, server.url("200"))

    assert [None] == server.header_values("Idempotency-Key")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (lambda request: f"order-{request.method}", ["order-POST"] * 2),
        (lambda _: 'a"b\\c', ['a"b\\c'] * 2),
        (lambda _: None, [None]),
    ],
    ids=["from the request", "with quotes", "none"],
)
def test_key_from_a_function(
    server: FlakyServerView,
    client: ClientLibrary,
    key: Callable[[Any], str | None],
    expected: list[str | None],
) -> None:
    """A function of the request returns the key, or None for no key."""
    with client.open(idempotency_key=key) as session:
        session.send("POST", server.url("503,200"))

    assert expected == server.header_values("Idempotency-Key")


def test_user_key_is_kept(server: FlakyServerView, client: ClientLibrary) -> None:
    """A key that the user has set is not replaced."""
    with client.open(**AUTO_KEY) as session:
        session.send("POST", server.url("503,200"), headers=dict(USER_KEY))

    assert ['"mine"', '"mine"'] == server.header_values("Idempotency-Key")


# --- events ---------------------------------------------------------------------------------------


def test_events_name_method_and_origin(server: FlakyServerView, client: ClientLibrary) -> None:
    """The operation in events is the method and the origin, without path and query."""
    with client.open() as session, captured_events() as events:
        session.send("GET", server.url("503,200"))

    assert {f"GET {server.flaky.url}"} == {event.operation for event in events}
