"""One table of cases, and every client runs each: the same requests, the same answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import tarry
from tarry import Policy, Reason
from tarry.testing import captured_events
from tests.adapters.clients import Answer, Client
from tests.adapters.conftest import Server

pytestmark = pytest.mark.usefixtures("_hurry")


@dataclass(frozen=True)
class Case:
    """What a server does to the requests of one call, and what comes of it."""

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
    """The options of a policy."""
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
    Case("POST that may have been read", "drop,200", 1, None, "POST", Reason.UNSAFE),
    Case("POST with a key of ours", "503,drop,200", 3, 200, "POST", options=AUTO),
    Case("PATCH with a key of ours", "503,200", 2, 200, "PATCH", options=AUTO),
    Case("POST with a key of the user's", "503,drop,200", 3, 200, "POST", headers=KEY),
    Case("the server says yes", "400:x-should-retry=true,200", 2, 200),
    Case("the server says no", "503:x-should-retry=false,200", 1, 503),
    Case("a longer wait than is allowed", "503:retry-after=999,200", 1, 503),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(server: Server, client: Client, case: Case) -> None:
    """A call sends as many requests as its case says, and ends with that answer or error."""
    with client.open(**case.options) as talker:
        if case.gives is not None:
            answer = talker.send(case.method, server.url(case.plan), headers=dict(case.headers))

            text = "" if case.method == "HEAD" else f"answer {case.arrive}"
            assert Answer(case.gives, text) == answer
        else:
            with pytest.raises(client.dropped) as caught:
                talker.send(case.method, server.url(case.plan))

            record = tarry.record_of(caught.value)
            assert record is not None
            assert (case.reason, case.arrive) == (record.reason, record.attempts)

    assert [case.method] * case.arrive == [seen.method for seen in server.seen]


# --- what the server is told ----------------------------------------------------------------------


def test_attempts_are_numbered(server: Server, client: Client) -> None:
    """The first attempt has no number, the others have theirs."""
    with client.open() as talker:
        talker.send("GET", server.url("503,drop,200"))

    assert [None, "2", "3"] == server.received("X-Retry-Attempt")


def test_one_key_for_all_attempts_of_a_call(server: Server, client: Client) -> None:
    """The automatic key is the same on every attempt and another for the next call."""
    with client.open(**AUTO) as talker:
        talker.send("POST", server.url("503,503,200"), b"order")
        talker.send("POST", server.url("200"), b"order")

    first, second, third, other = server.received("Idempotency-Key")
    assert first == second == third != other
    assert first is not None
    assert first.startswith('"')


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_idempotent_request_gets_no_key(server: Server, client: Client, method: str) -> None:
    """What may be repeated anyway is not given a key."""
    with client.open(**AUTO) as talker:
        talker.send(method, server.url("200"))

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
    server: Server, client: Client, key: Callable[[Any], str | None], sent: list[str | None]
) -> None:
    """A function of the request makes the key, or says that this request has none."""
    with client.open(idempotency_key=key) as talker:
        talker.send("POST", server.url("503,200"))

    assert sent == server.received("Idempotency-Key")


def test_key_of_the_user_stays(server: Server, client: Client) -> None:
    """A key that the user has put on a request is not replaced."""
    with client.open(**AUTO) as talker:
        talker.send("POST", server.url("503,200"), headers=dict(KEY))

    assert ['"mine"', '"mine"'] == server.received("Idempotency-Key")


# --- events ---------------------------------------------------------------------------------------


def test_events_name_method_and_origin(server: Server, client: Client) -> None:
    """The operation in events is the method and the origin, without path and query."""
    with client.open() as talker, captured_events() as events:
        talker.send("GET", server.url("503,200"))

    assert {f"GET {server.flaky.url}"} == {event.operation for event in events}
