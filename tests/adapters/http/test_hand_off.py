"""Calls that are handed off to a real service, with every client library.

All tests share one service and one target. Each task succeeds or waits for an hour, so that the
breaker of the service stays closed for the next test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import pytest

import tarry
from tarry import Breaker, Downstream, InFlight, Policy, Reason, TokenBudget
from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.http.hand_off import HAND_OFF_TIMEOUT_S
from tarry.adapters.httpx import RetryTransport
from tarry.runtime.effects import effects
from tests.adapters.clients import (
    HEDGING_LIBRARIES,
    AsyncSession,
    ClientLibrary,
    ClientResponse,
    Session,
)
from tests.adapters.conftest import FlakyServerView
from tests.integration.service import Service, service

pytestmark = pytest.mark.usefixtures("_no_waits")

SYNC_LIBRARIES = {"httpx-sync", "httpx2-sync", "requests"}
BODY = b'{"order": 7}'
HEADERS = {"Content-Type": "application/json", "X-Tenant": "shop", "Accept-Language": "en"}
LONG_DELAYS = Policy(initial_delay=30.0, max_delay=30.0, jitter="none")


@pytest.fixture(scope="module")
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run one service for all tests."""
    with service(tmp_path_factory.mktemp("service")) as running_service:
        yield running_service


@contextmanager
def open_with_hand_off(client: ClientLibrary, url: str, **options: Any) -> Iterator[Session]:
    """Open a client that hands off its failed calls to the service at this URL."""
    if client.name in SYNC_LIBRARIES:
        with (
            tarry.Client(url) as task_client,
            client.open(hand_off=task_client, **options) as session,
        ):
            yield session
        return
    async_task_client = tarry.AsyncClient(url)
    with client.open(hand_off=async_task_client, **options) as session:
        assert isinstance(session, AsyncSession)
        try:
            yield session
        finally:
            session.close(async_task_client)


@contextmanager
def open_with_running_service(
    client: ClientLibrary, running_service: Service, **options: Any
) -> Iterator[Session]:
    """Open a client with automatic keys that hands off its failed calls to the running service."""
    options = {"idempotency_key": "auto"} | options
    with open_with_hand_off(
        client, f"http://127.0.0.1:{running_service.port}", **options
    ) as session:
        yield session


def call_and_hand_off(
    session: Session, method: str, url: str, body: Any, **headers: str
) -> tarry.HandedOff:
    """Make a call that is handed off, and return its error."""
    with pytest.raises(tarry.HandedOff) as caught:
        session.send(method, url, body, HEADERS | headers)
    return caught.value


def wait_for_final_status(running_service: Service, error: tarry.HandedOff) -> str:
    """Make a delayed task due now, wait until the task is finished, and return its status."""
    if error.task.next_attempt_at > error.task.created_at:
        running_service.request("POST", f"/retry-tasks/{error.task.task_id}/retry")
    status: str = running_service.wait_until_finished(error.task.task_id)["status"]
    return status


def tasks_for(running_service: Service, server: FlakyServerView) -> list[dict[str, Any]]:
    """Return the tasks that were created by one test."""
    return [
        task for task in running_service.all_tasks() if f"run={server.run}&" in task["targetUrl"]
    ]


# --- calls that are handed off --------------------------------------------------------------------


def downstream_with_open_breaker() -> Downstream:
    """Return a downstream whose breaker is open."""
    downstream = Downstream("shop", breaker=Breaker())
    downstream.force("open")
    return downstream


def downstream_at_its_limit() -> Downstream:
    """Return a downstream whose in-flight limit is reached."""
    downstream = Downstream("shop", limiter=InFlight(1))
    downstream.admit(effects.now())
    return downstream


def downstream_without_budget() -> Downstream:
    """Return a downstream whose retry budget does not allow a retry."""
    return Downstream("shop", budget=TokenBudget(capacity=1))


TWO_ATTEMPTS = Policy(max_attempts=2)
REASONS: list[tuple[Reason, str, dict[str, Any]]] = [
    (Reason.ATTEMPTS, "503,503,200", {"policy": TWO_ATTEMPTS}),
    (Reason.ATTEMPTS, "drop,drop,200", {"policy": TWO_ATTEMPTS}),
    (Reason.BREAKER_OPEN, "200", {"downstream": downstream_with_open_breaker}),
    (Reason.BUDGET_EMPTY, "503,200", {"downstream": downstream_without_budget}),
    (Reason.LIMIT, "200", {"downstream": downstream_at_its_limit}),
    (Reason.HINT_TOO_LONG, "429:retry-after=3600,200", {}),
    (Reason.TOTAL_BUDGET, "503,200", {"policy": LONG_DELAYS.replace(total_budget=20.0)}),
    (Reason.DEADLINE, "503,200", {"policy": LONG_DELAYS, "deadline": 20.0}),
    (Reason.DEADLINE, "200", {"deadline": 0.0}),
]


@pytest.mark.parametrize(
    ("reason", "plan", "options"),
    REASONS,
    ids=[f"{reason}-{plan[:4]}" for reason, plan, _ in REASONS],
)
def test_call_is_handed_off_for_each_reason(
    running_service: Service,
    server: FlakyServerView,
    client: ClientLibrary,
    reason: Reason,
    plan: str,
    options: dict[str, Any],
) -> None:
    """The service sends the request that was given up, with the same key, headers and body."""
    options = dict(options)
    if "downstream" in options:
        options["downstream"] = options["downstream"]()
    seconds = options.pop("deadline", 60.0)
    with (
        open_with_running_service(client, running_service, **options) as session,
        tarry.deadline(seconds),
    ):
        error = call_and_hand_off(session, "POST", server.url(plan), BODY)

    record = tarry.record_of(error)
    assert record is not None
    assert reason is record.reason
    assert "SUCCEEDED" == wait_for_final_status(running_service, error)
    assert record.attempts + 1 == len(server.received_requests)
    last = server.received_requests[-1]
    assert ("POST", BODY) == (last.method, last.body)
    assert {error.task.idempotency_key} == set(server.header_values("Idempotency-Key"))
    sent = {name.lower(): value for name, value in last.headers.items()}
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= sent.items()
    assert "x-deadline-ms" not in sent


def test_error_contains_the_original_result(
    running_service: Service, server: FlakyServerView, client: ClientLibrary
) -> None:
    """The error names the task and the reason, and has the response or the error as its cause."""
    with open_with_running_service(
        client, running_service, policy=Policy(max_attempts=1)
    ) as session:
        failed = call_and_hand_off(session, "PUT", server.url("503,200"), BODY)
        dropped = call_and_hand_off(session, "PUT", server.url("drop,200", run_suffix="-2"), BODY)

    assert f"handed off as task {failed.task.task_id}: no attempts left" in str(failed)
    assert isinstance(failed.__cause__, tarry.ResultNotAccepted)
    response: Any = failed.__cause__.result
    assert 503 == (response.status if client.name == "aiohttp" else response.status_code)
    assert isinstance(dropped.__cause__, client.disconnect_error)


@pytest.mark.parametrize("plan", ["503", "long", "chunks"])
def test_hand_off_releases_the_connection(
    running_service: Service, server: FlakyServerView, client: ClientLibrary, plan: str
) -> None:
    """With a pool of one connection, another call succeeds after a hand-off."""
    with open_with_running_service(
        client, running_service, policy=Policy(max_attempts=1)
    ) as session:
        call_and_hand_off(session, "DELETE", server.url(f"{plan},200"), None)
        response = session.send("GET", server.url("200", run_suffix="-2"))

    assert ClientResponse(200, "answer 1") == response


@pytest.mark.parametrize("retry_after", ["60", "3600"])
def test_retry_after_delays_the_task(
    running_service: Service, server: FlakyServerView, client: ClientLibrary, retry_after: str
) -> None:
    """The first delay of the task is `Retry-After` plus at most 10%."""
    with open_with_running_service(
        client, running_service, policy=Policy(max_attempts=1)
    ) as session:
        task = call_and_hand_off(
            session, "POST", server.url(f"503:retry-after={retry_after}"), BODY
        ).task

    delay_ms = task.next_attempt_at - task.created_at
    assert int(retry_after) * 1000 <= delay_ms <= int(retry_after) * 1100 + 1


def test_headers_of_the_attempt_are_dropped(
    running_service: Service, server: FlakyServerView, client: ClientLibrary
) -> None:
    """Headers of one attempt, one connection or the client itself are not sent to the service.

    The service continues the numbers of the attempts.
    """
    connection_headers = {
        "Connection": "X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Traceparent": "00-1-2-01",
    }
    with (
        open_with_running_service(
            client, running_service, policy=Policy(max_attempts=2, attempt_timeout=9.0)
        ) as session,
        tarry.deadline(60.0),
    ):
        error = call_and_hand_off(
            session, "PUT", server.url("503,503,200"), BODY, **connection_headers
        )

    assert "SUCCEEDED" == wait_for_final_status(running_service, error)
    sent = {name.lower() for name in server.received_requests[-1].headers}
    assert set() == {"x-hop", "te", "x-deadline-ms"} & sent
    assert [None, "2", "3"] == server.header_values("X-Retry-Attempt")


# --- idempotency keys -----------------------------------------------------------------------------


def test_same_key_creates_one_task(
    running_service: Service, server: FlakyServerView, client: ClientLibrary
) -> None:
    """With the same key, the second hand-off returns the task of the first."""
    key = {"Idempotency-Key": f'"{server.run} of \\"{client}\\""'}
    url = server.url("503:retry-after=3600")
    with open_with_running_service(
        client, running_service, policy=Policy(max_attempts=1)
    ) as session:
        first, second = (call_and_hand_off(session, "POST", url, BODY, **key) for _ in range(2))

    assert first.task.task_id == second.task.task_id
    assert key["Idempotency-Key"] == first.task.idempotency_key
    assert 1 == len(tasks_for(running_service, server))


@pytest.mark.parametrize("key", ["bare-{}", '"quoted-{}"', "two words {}", '"odd {}'])
def test_service_sends_the_key_of_the_adapter(
    running_service: Service, server: FlakyServerView, client: ClientLibrary, key: str
) -> None:
    """The attempts of the service have the same header as those of the adapter."""
    key = key.format(server.run)
    with open_with_running_service(
        client, running_service, policy=Policy(max_attempts=1)
    ) as session:
        url = server.url("503,200")
        error = call_and_hand_off(session, "POST", url, BODY, **{"Idempotency-Key": key})

    assert "SUCCEEDED" == wait_for_final_status(running_service, error)
    assert [key, key] == server.header_values("Idempotency-Key")


def test_service_sends_the_key_in_the_header_of_the_adapter(
    running_service: Service, server: FlakyServerView, client: ClientLibrary
) -> None:
    """The service uses the key header of the adapter's policy."""
    policy = Policy(
        max_attempts=1, idempotency_key_header="X-Request-Id", idempotency_key_format="quoted"
    )
    with open_with_running_service(client, running_service, policy=policy) as session:
        error = call_and_hand_off(session, "POST", server.url("503,200"), BODY)

    assert "SUCCEEDED" == wait_for_final_status(running_service, error)
    first, second = server.header_values("X-Request-Id")
    assert first == second == error.task.idempotency_key
    assert error.task.idempotency_key.startswith('"')
    assert [None, None] == server.header_values("Idempotency-Key")


def test_outer_retry_creates_no_second_task(
    running_service: Service, server: FlakyServerView, client: ClientLibrary
) -> None:
    """An outer retry does not retry after `HandedOff`, so there is one task."""
    with open_with_running_service(
        client, running_service, policy=Policy(max_attempts=1)
    ) as session:
        send = tarry.retry(on=Exception, attempts=3)(session.send)
        with pytest.raises(tarry.HandedOff):
            send("POST", server.url("503:retry-after=3600"), BODY)

    assert 1 == len(tasks_for(running_service, server))


# --- calls that are not handed off ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "plan", "headers", "logged_reason"),
    [
        ("PUT", "404", {}, None),
        ("PUT", "503:x-should-retry=false", {}, None),
        ("POST", "503", {}, None),
        ("PUT", "503", {"Host": "elsewhere.example"}, "is set by the service itself"),
        ("PUT", "503", {"Webhook-Id": "7"}, "is set by the service itself"),
        ("POST", "503", {"Idempotency-Key": "x" * 256}, "idempotencyKey"),
    ],
)
def test_responses_that_are_not_handed_off(
    running_service: Service,
    server: FlakyServerView,
    client: ClientLibrary,
    caplog: pytest.LogCaptureFixture,
    method: str,
    plan: str,
    headers: dict[str, str],
    logged_reason: str | None,
) -> None:
    """The call returns the response; a request that the service cannot send is logged."""
    caplog.set_level(logging.WARNING, "tarry")
    options = {"policy": Policy(max_attempts=1), "idempotency_key": None}
    with open_with_running_service(client, running_service, **options) as session:
        response = session.send(method, server.url(plan), BODY, headers)

    assert ClientResponse(int(plan[:3]), "answer 1") == response
    assert [] == tasks_for(running_service, server)
    lines = [record.message for record in caplog.records if "not handed off" in record.message]
    assert (logged_reason is not None) == bool(lines)
    assert logged_reason is None or logged_reason in lines[0]


def test_request_that_is_not_repeatable_is_not_handed_off(
    running_service: Service, client: ClientLibrary, unreachable_url: str
) -> None:
    """A POST without a key is not handed off, even if nothing was sent; a note explains why."""
    options = {"policy": TWO_ATTEMPTS, "idempotency_key": None}
    with (
        open_with_running_service(client, running_service, **options) as session,
        pytest.raises(client.connect_error) as caught,
    ):
        session.send("POST", unreachable_url, BODY)

    assert 'an Idempotency-Key; set idempotency_key="auto"' in caught.value.__notes__[-1]


def test_iterator_is_not_handed_off(
    running_service: Service, client: ClientLibrary, unreachable_url: str
) -> None:
    """A request whose body is an iterator is not handed off; a note explains why."""
    with (
        open_with_running_service(client, running_service, policy=TWO_ATTEMPTS) as session,
        pytest.raises(client.connect_error) as caught,
    ):
        session.send("PUT", unreachable_url, session.iterator())

    assert "the body of the request is a file or a stream" in caught.value.__notes__[-1]


def test_unreachable_service(
    server: FlakyServerView,
    client: ClientLibrary,
    unreachable_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the service is unreachable, the call ends as usual; a note and the log name the error."""
    caplog.set_level(logging.WARNING, "tarry")
    url = unreachable_url.removesuffix("/thing")
    with open_with_hand_off(client, url, policy=Policy(max_attempts=1)) as session:
        response = session.send("PUT", server.url("503"), BODY)
        with pytest.raises(client.disconnect_error) as caught:
            session.send("PUT", server.url("drop", run_suffix="-2"), BODY)

    assert ClientResponse(503, "answer 1") == response
    expected = "not handed off to the retry service: ServiceUnreachable: POST /retry-tasks got no "
    expected += f"response from {url}"
    assert expected in caught.value.__notes__[-1]
    assert 2 == len([record for record in caplog.records if expected in record.message])


# --- hedging and timeouts -------------------------------------------------------------------------


@pytest.mark.parametrize("library", HEDGING_LIBRARIES, ids=str)
def test_hedged_request_is_handed_off(
    running_service: Service, server: FlakyServerView, library: ClientLibrary
) -> None:
    """A hedged request is handed off if all its copies fail."""
    hedging = tarry.Hedging(after=30.0)
    with open_with_running_service(
        library, running_service, hedging=hedging, connections=2
    ) as session:
        error = call_and_hand_off(session, "POST", server.url("503,503,200"), BODY)

    assert "SUCCEEDED" == wait_for_final_status(running_service, error)
    assert 1 == len(set(server.header_values("Idempotency-Key")))


async def test_total_timeout_of_aiohttp_does_not_end_the_hand_off(
    running_service: Service, server: FlakyServerView
) -> None:
    """The session's total timeout ends the call, but not the hand-off."""
    async with (
        tarry.AsyncClient(f"http://127.0.0.1:{running_service.port}") as service,
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=0.2),
            middlewares=(RetryMiddleware(hand_off=service),),
        ) as session,
    ):
        with pytest.raises(tarry.HandedOff) as caught:
            await session.put(server.url("hang,200"), data=BODY)
        error = caught.value
    assert isinstance(error.__cause__, TimeoutError)
    assert "SUCCEEDED" == wait_for_final_status(running_service, error)


# --- with a fake task client ----------------------------------------------------------------------


class FakeTaskClient:
    """A task client that records the enqueued tasks, or raises an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.tasks: list[dict[str, Any]] = []
        self._error = error

    def enqueue(self, url: str, body: bytes | None, **options: Any) -> Any:
        """Record a task, or raise."""
        self.tasks.append({"url": url, "body": body} | options)
        if self._error is not None:
            raise self._error
        return "task-7"

    def for_library(self, client: ClientLibrary) -> Any:
        """Return this client, or its async version for an async library."""
        return self if client.name in SYNC_LIBRARIES else AsyncFakeTaskClient(self)


class AsyncFakeTaskClient:
    """The async version of `FakeTaskClient`."""

    def __init__(self, client: FakeTaskClient) -> None:
        self._client = client

    async def enqueue(self, url: str, body: bytes | None, **options: Any) -> Any:
        """Record a task, or raise."""
        return self._client.enqueue(url, body, **options)


class Interrupted(BaseException):
    """An exception like CancelledError or KeyboardInterrupt."""


def test_credentials_of_the_url_become_a_header(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """The task has the credentials of a URL in a header, and a URL without credentials."""
    service = FakeTaskClient()
    url = server.url("503").replace("http://", "http://ann:secret@") + "#here"
    policy = Policy(max_attempts=1)
    with client.open(hand_off=service.for_library(client), policy=policy) as session:
        error = call_and_hand_off(session, "DELETE", url, None, Cookie="a=1; b=2")

    (task,) = service.tasks
    assert "task-7" == error.task
    assert (server.url("503"), None, "DELETE") == (task["url"], task["body"], task["method"])
    assert task["headers"]["authorization"].startswith("Basic ")
    assert "a=1; b=2" == task["headers"]["cookie"]
    assert (None, 32, "default") == (task["delay"], len(task["key"]), task["policy"])


def test_hand_off_with_a_policy(server: FlakyServerView, client: ClientLibrary) -> None:
    """`HandOff` names the policy of the tasks."""
    service = FakeTaskClient()
    hand_off = tarry.HandOff(service.for_library(client), policy="webhook")
    with client.open(hand_off=hand_off, policy=Policy(max_attempts=1)) as session:
        call_and_hand_off(session, "PUT", server.url("503"), BODY)

    assert ["webhook"] == [task["policy"] for task in service.tasks]


def test_hand_off_with_secrets(server: FlakyServerView, client: ClientLibrary) -> None:
    """A secret replaces the value of a header; a request without the header does not get it."""
    service = FakeTaskClient()
    hand_off = tarry.HandOff(service.for_library(client), secrets={"Authorization": "orders"})
    with client.open(hand_off=hand_off, policy=Policy(max_attempts=1)) as session:
        call_and_hand_off(session, "PUT", server.url("503"), BODY, Authorization="Bearer token-1")
        call_and_hand_off(session, "PUT", server.url("503", run_suffix="-2"), BODY)

    with_header, without_header = (task["headers"] for task in service.tasks)
    assert {"secret": "orders"} == with_header["authorization"]
    assert "authorization" not in without_header


def test_repeated_header_is_joined(server: FlakyServerView) -> None:
    """The values of a repeated header are joined by a comma (RFC 9110, section 5.3)."""
    service: Any = FakeTaskClient()
    transport = RetryTransport(hand_off=service, policy=Policy(max_attempts=1))
    with httpx.Client(transport=transport) as client, pytest.raises(tarry.HandedOff):
        client.put(server.url("503"), headers=[("X-Tag", "a"), ("X-Tag", "b")])

    assert "a, b" == service.tasks[0]["headers"]["x-tag"]


def test_cancelled_hand_off_releases_the_connection(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    service = FakeTaskClient(Interrupted())
    policy = Policy(max_attempts=1)
    with client.open(hand_off=service.for_library(client), policy=policy) as session:
        with pytest.raises(Interrupted):
            session.send("PUT", server.url("long"), BODY)
        response = session.send("GET", server.url("200", run_suffix="-2"))

    assert ClientResponse(200, "answer 1") == response


def test_hand_off_has_its_own_deadline(server: FlakyServerView, client: ClientLibrary) -> None:
    """The hand-off ignores the caller's deadline, which is restored afterwards."""
    remaining: list[float | None] = []

    class RecordingTaskClient(FakeTaskClient):
        def enqueue(self, url: str, body: bytes | None, **options: Any) -> Any:
            remaining.append(tarry.remaining())
            return super().enqueue(url, body, **options)

    with (
        client.open(hand_off=RecordingTaskClient().for_library(client)) as session,
        tarry.deadline(0.0),
    ):
        call_and_hand_off(session, "PUT", server.url("200"), BODY)
        assert 0.0 == tarry.remaining()

    (seconds,) = remaining
    assert seconds is not None
    assert 0.0 < seconds <= HAND_OFF_TIMEOUT_S


def test_successful_calls_are_not_handed_off(
    server: FlakyServerView, client: ClientLibrary
) -> None:
    """A call that succeeds, at once or after retries, creates no task."""
    service = FakeTaskClient()
    with client.open(hand_off=service.for_library(client)) as session:
        responses = [session.send("PUT", server.url("503,drop,200"), BODY) for _ in range(2)]

    assert [ClientResponse(200, "answer 3"), ClientResponse(200, "answer 4")] == responses
    assert [] == service.tasks


# --- arguments ------------------------------------------------------------------------------------


def test_invalid_policy_of_a_hand_off_raises() -> None:
    """The policy of a hand-off is a name, because the service stores the policy."""
    with pytest.raises(tarry.ConfigurationTypeError, match="policy must be the name of a policy"):
        tarry.HandOff(FakeTaskClient(), policy=Policy())  # type: ignore[arg-type]


@pytest.mark.parametrize("secrets", ["orders", {"Authorization": 7}])
def test_invalid_secrets_of_a_hand_off_raise(secrets: Any) -> None:
    """The secrets of a hand-off are a dict of names."""
    with pytest.raises(tarry.ConfigurationTypeError, match="secrets must be a dict of names"):
        tarry.HandOff(FakeTaskClient(), secrets=secrets)


@pytest.mark.parametrize(
    "value",
    [tarry.Client, 7, "http://127.0.0.1:8080", tarry.HandOff(7), "wrong type"],  # type: ignore[arg-type]
)
def test_invalid_client_raises(client: ClientLibrary, value: Any) -> None:
    """An invalid client raises when the adapter is created; the error names the valid type."""
    is_sync = client.name in SYNC_LIBRARIES
    if value == "wrong type":
        value = AsyncFakeTaskClient(FakeTaskClient()) if is_sync else FakeTaskClient()
    expected_type = "tarry.Client" if is_sync else "tarry.AsyncClient"
    with (
        pytest.raises(tarry.ConfigurationError, match=rf"hand_off must be a {expected_type}\("),
        client.open(hand_off=value),
    ):
        pytest.fail("the invalid client was accepted")
