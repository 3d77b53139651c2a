"""Calls that cannot go on now, handed to a real service, through every client.

All share one service and one target: what is handed off succeeds there, or waits for an hour, so
that the service's breaker does not open on what the next test needs.
"""

from __future__ import annotations

import asyncio
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
from tarry.runtime.clocks import system
from tests.adapters.clients import HEDGING, Answer, Client, Looped, Talker
from tests.adapters.conftest import Server
from tests.integration.service import Service, service

pytestmark = pytest.mark.usefixtures("_hurry")

BLOCKING = {"httpx-sync", "httpx2-sync", "requests"}
BODY = b'{"order": 7}'
HEADERS = {"Content-Type": "application/json", "X-Tenant": "shop", "Accept-Language": "en"}
SLOW = Policy(initial_delay=30.0, max_delay=30.0, jitter="none")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all."""
    with service(tmp_path_factory.mktemp("service")) as running:
        yield running


@contextmanager
def handing_off(client: Client, url: str, **options: Any) -> Iterator[Talker]:
    """Open a client whose adapter hands off to the service at this address."""
    if client.name in BLOCKING:
        with tarry.Client(url) as blocks, client.open(hand_off=blocks, **options) as talker:
            yield talker
        return
    awaits = tarry.AsyncClient(url)
    with client.open(hand_off=awaits, **options) as talker:
        assert isinstance(talker, Looped)
        try:
            yield talker
        finally:
            talker.close(awaits)


@contextmanager
def handing(client: Client, running: Service, **options: Any) -> Iterator[Talker]:
    """Open one that hands off to the service that runs."""
    options = {"idempotency_key": "auto"} | options
    with handing_off(client, f"http://127.0.0.1:{running.port}", **options) as talker:
        yield talker


def handed(talker: Talker, method: str, url: str, body: Any, **headers: str) -> tarry.HandedOff:
    """Make a call that is handed off."""
    with pytest.raises(tarry.HandedOff) as caught:
        talker.send(method, url, body, HEADERS | headers)
    return caught.value


def delivered(running: Service, error: tarry.HandedOff) -> str:
    """Wait for the end of the task, and say how it ended."""
    if error.task.next_attempt_at > error.task.created_at:
        running.ask("POST", f"/retry-tasks/{error.task.task_id}/retry")
    status: str = running.end_of(error.task.task_id)["status"]
    return status


def tasks_for(running: Service, server: Server) -> list[dict[str, Any]]:
    """Return the tasks of one test."""
    return [task for task in running.all_tasks() if f"run={server.run}&" in task["targetUrl"]]


# --- each reason ----------------------------------------------------------------------------------


def opened() -> Downstream:
    """Return a dependency whose breaker is open."""
    downstream = Downstream("shop", breaker=Breaker())
    downstream.force("open")
    return downstream


def full() -> Downstream:
    """Return a dependency that has as much to do as it may."""
    downstream = Downstream("shop", limiter=InFlight(1))
    downstream.admit(system.now())
    return downstream


def poor() -> Downstream:
    """Return a dependency without a budget for a retry."""
    return Downstream("shop", budget=TokenBudget(capacity=1))


TWO = Policy(max_attempts=2)
REASONS: list[tuple[Reason, str, dict[str, Any]]] = [
    (Reason.ATTEMPTS, "503,503,200", {"policy": TWO}),
    (Reason.ATTEMPTS, "drop,drop,200", {"policy": TWO}),
    (Reason.BREAKER_OPEN, "200", {"downstream": opened}),
    (Reason.BUDGET_EMPTY, "503,200", {"downstream": poor}),
    (Reason.LIMIT, "200", {"downstream": full}),
    (Reason.HINT_TOO_LONG, "429:retry-after=3600,200", {}),
    (Reason.TOTAL_BUDGET, "503,200", {"policy": SLOW.replace(total_budget=20.0)}),
    (Reason.DEADLINE, "503,200", {"policy": SLOW, "deadline": 20.0}),
    (Reason.DEADLINE, "200", {"deadline": 0.0}),
]


@pytest.mark.parametrize(
    ("reason", "plan", "options"), REASONS, ids=[f"{one[0]}-{one[1][:4]}" for one in REASONS]
)
def test_each_reason_is_delivered_in_the_end(
    running: Service,
    server: Server,
    client: Client,
    reason: Reason,
    plan: str,
    options: dict[str, Any],
) -> None:
    """The service sends the same request with the same key, and the target sees no difference."""
    options = dict(options)
    if "downstream" in options:
        options["downstream"] = options["downstream"]()
    seconds = options.pop("deadline", 60.0)
    with handing(client, running, **options) as talker, tarry.deadline(seconds):
        error = handed(talker, "POST", server.url(plan), BODY)

    record = tarry.record_of(error)
    assert record is not None
    assert reason is record.reason
    assert "SUCCEEDED" == delivered(running, error)
    assert record.attempts + 1 == len(server.seen)
    last = server.seen[-1]
    assert ("POST", BODY) == (last.method, last.body)
    assert {f'"{error.task.idempotency_key}"'} == set(server.received("Idempotency-Key"))
    sent = {name.lower(): value for name, value in last.headers.items()}
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= sent.items()
    assert "x-deadline-ms" not in sent


def test_what_it_would_have_ended_with(running: Service, server: Server, client: Client) -> None:
    """The error tells where the call went and why, and keeps the answer or the error inside."""
    with handing(client, running, policy=Policy(max_attempts=1)) as talker:
        answered = handed(talker, "PUT", server.url("503,200"), BODY)
        dropped = handed(talker, "PUT", server.url("drop,200", run="-2"), BODY)

    assert f"handed off as task {answered.task.task_id}, for no attempts left" in str(answered)
    assert isinstance(answered.__cause__, tarry.ResultNotAccepted)
    answer: Any = answered.__cause__.result
    assert 503 == (answer.status if client.name == "aiohttp" else answer.status_code)
    assert isinstance(dropped.__cause__, client.dropped)


@pytest.mark.parametrize("plan", ["503", "long", "chunks"])
def test_the_answer_holds_no_connection(
    running: Service, server: Server, client: Client, plan: str
) -> None:
    """With one connection for all, another call gets through after one was handed off."""
    with handing(client, running, policy=Policy(max_attempts=1)) as talker:
        handed(talker, "DELETE", server.url(f"{plan},200"), None)
        answer = talker.send("GET", server.url("200", run="-2"))

    assert Answer(200, "answer 1") == answer


@pytest.mark.parametrize("asked", ["60", "3600"])
def test_the_service_waits_as_the_server_asked(
    running: Service, server: Server, client: Client, asked: str
) -> None:
    """`Retry-After` is the floor of the task's first wait, with no more than a tenth on top."""
    with handing(client, running, policy=Policy(max_attempts=1)) as talker:
        task = handed(talker, "POST", server.url(f"503:retry-after={asked}"), BODY).task

    waits = task.next_attempt_at - task.created_at
    assert int(asked) * 1000 <= waits <= int(asked) * 1100 + 1


def test_time_is_no_matter_of_the_caller(running: Service, server: Server, client: Client) -> None:
    """Headers of one attempt, of one connection or of the client itself are left out."""
    own = {"Connection": "X-Hop", "X-Hop": "1", "TE": "trailers", "Traceparent": "00-1-2-01"}
    with (
        handing(client, running, policy=Policy(max_attempts=2, attempt_timeout=9.0)) as talker,
        tarry.deadline(60.0),
    ):
        error = handed(talker, "PUT", server.url("503,503,200"), BODY, **own)

    assert "SUCCEEDED" == delivered(running, error)
    sent = {name.lower() for name in server.seen[-1].headers}
    assert set() == {"x-hop", "te", "x-deadline-ms"} & sent
    assert ["1", "2", "1"] == [value or "1" for value in server.received("X-Retry-Attempt")]


# --- the key --------------------------------------------------------------------------------------


def test_the_same_call_twice_is_one_task(running: Service, server: Server, client: Client) -> None:
    """Under a key of the user's, the second hand-off gets the first one's task."""
    key = {"Idempotency-Key": f'"{server.run} of \\"{client}\\""'}
    url = server.url("503:retry-after=3600")
    with handing(client, running, policy=Policy(max_attempts=1)) as talker:
        first, second = (handed(talker, "POST", url, BODY, **key) for _ in range(2))

    assert first.task.task_id == second.task.task_id
    assert f'{server.run} of "{client}"' == first.task.idempotency_key
    assert 1 == len(tasks_for(running, server))


def test_a_loop_around_it_makes_no_second_task(
    running: Service, server: Server, client: Client
) -> None:
    """An outer loop that would retry anything passes `HandedOff` on."""
    with handing(client, running, policy=Policy(max_attempts=1)) as talker:
        send = tarry.retry(on=Exception, attempts=3)(talker.send)
        with pytest.raises(tarry.HandedOff):
            send("POST", server.url("503:retry-after=3600"), BODY)

    assert 1 == len(tasks_for(running, server))


# --- what is not handed off -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "plan", "headers", "why"),
    [
        ("PUT", "404", {}, None),
        ("PUT", "503:x-should-retry=false", {}, None),
        ("POST", "503", {}, None),
        ("PUT", "503", {"Host": "elsewhere.example"}, "is set by the service itself"),
        ("PUT", "503", {"Webhook-Id": "7"}, "is set by the service itself"),
        ("POST", "503", {"Idempotency-Key": "bare"}, "in double quotes"),
    ],
)
def test_answers_that_stand(
    running: Service,
    server: Server,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    method: str,
    plan: str,
    headers: dict[str, str],
    why: str | None,
) -> None:
    """An answer is returned as it is, and the log says why, where the service could have helped."""
    caplog.set_level(logging.WARNING, "tarry")
    options = {"policy": Policy(max_attempts=1), "idempotency_key": None}
    with handing(client, running, **options) as talker:
        answer = talker.send(method, server.url(plan), BODY, headers)

    assert Answer(int(plan[:3]), "answer 1") == answer
    assert [] == tasks_for(running, server)
    lines = [one.message for one in caplog.records if "not handed off" in one.message]
    assert (why is not None) == bool(lines)
    assert why is None or why in lines[0]


def test_unsafe_requests_stay_here(running: Service, client: Client, refused: str) -> None:
    """A POST without a key is not handed off, also where nothing was sent; the error says why."""
    options = {"policy": TWO, "idempotency_key": None}
    with handing(client, running, **options) as talker, pytest.raises(client.refused) as caught:
        talker.send("POST", refused, BODY)

    assert 'an Idempotency-Key (idempotency_key="auto") makes it so' in caught.value.__notes__[-1]


def test_bodies_that_are_no_bytes_stay_here(running: Service, client: Client, refused: str) -> None:
    """An iterator is not read for the service; the error says why."""
    with handing(client, running, policy=TWO) as talker, pytest.raises(client.refused) as caught:
        talker.send("PUT", refused, talker.iterator())

    assert "its body is a file or a stream" in caught.value.__notes__[-1]


def test_service_that_is_down(
    server: Server, client: Client, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer and the error are as without it; the note and the log tell what went wrong."""
    caplog.set_level(logging.WARNING, "tarry")
    url = refused.removesuffix("/thing")
    with handing_off(client, url, policy=Policy(max_attempts=1)) as talker:
        answer = talker.send("PUT", server.url("503"), BODY)
        with pytest.raises(client.dropped) as caught:
            talker.send("PUT", server.url("drop", run="-2"), BODY)

    assert Answer(503, "answer 1") == answer
    said = "not handed off to the retry service: ServiceUnreachable: POST /retry-tasks got no "
    said += f"response from {url}"
    assert said in caught.value.__notes__[-1]
    assert 2 == len([one for one in caplog.records if said in one.message])


# --- other ways to end ----------------------------------------------------------------------------


@pytest.mark.parametrize("hedger", HEDGING, ids=str)
def test_hedged_requests(running: Service, server: Server, hedger: Client) -> None:
    """When every copy has failed, the service goes on."""
    hedging = tarry.Hedging(after=30.0)
    with handing(hedger, running, hedging=hedging, connections=2) as talker:
        error = handed(talker, "POST", server.url("503,503,200"), BODY)

    assert "SUCCEEDED" == delivered(running, error)
    assert 1 == len(set(server.received("Idempotency-Key")))


def test_total_of_a_session(running: Service, server: Server) -> None:
    """The total timeout of aiohttp ends a call, and not what follows from that."""

    async def call() -> tarry.HandedOff:
        async with (
            tarry.AsyncClient(f"http://127.0.0.1:{running.port}") as service,
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=0.2),
                middlewares=(RetryMiddleware(hand_off=service),),
            ) as session,
        ):
            with pytest.raises(tarry.HandedOff) as caught:
                await session.put(server.url("hang,200"), data=BODY)
            return caught.value

    error = asyncio.run(call())

    assert isinstance(error.__cause__, TimeoutError)
    assert "SUCCEEDED" == delivered(running, error)


# --- a service of one's own -----------------------------------------------------------------------


class Taken:
    """Whatever has `enqueue` will do: this one remembers, and then does what it is told."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.orders: list[dict[str, Any]] = []
        self._error = error

    def enqueue(self, url: str, body: bytes | None, **options: Any) -> Any:
        """Take a task."""
        self.orders.append({"url": url, "body": body} | options)
        if self._error is not None:
            raise self._error
        return "task-7"

    def for_(self, client: Client) -> Any:
        """Return this, or the same to await."""
        return self if client.name in BLOCKING else Awaited(self)


class Awaited:
    """What `Taken` is, to await."""

    def __init__(self, inside: Taken) -> None:
        self._inside = inside

    async def enqueue(self, url: str, body: bytes | None, **options: Any) -> Any:
        """Take a task."""
        return self._inside.enqueue(url, body, **options)


class Gone(BaseException):
    """As a cancellation, or Ctrl-C."""


def test_what_the_service_is_given(server: Server, client: Client) -> None:
    """The user of a URL is in the headers, and not in the address that is stored."""
    service = Taken()
    url = server.url("503").replace("http://", "http://ann:secret@") + "#here"
    policy = Policy(max_attempts=1)
    with client.open(hand_off=service.for_(client), policy=policy) as talker:
        error = handed(talker, "DELETE", url, None, Cookie="a=1; b=2")

    (order,) = service.orders
    assert "task-7" == error.task
    assert (server.url("503"), None, "DELETE") == (order["url"], order["body"], order["method"])
    assert order["headers"]["authorization"].startswith("Basic ")
    assert "a=1; b=2" == order["headers"]["cookie"]
    assert (None, 32) == (order["delay"], len(order["key"]))


def test_lines_of_one_header_are_joined(server: Server) -> None:
    """The service takes one text for a name, so that lines become a list (RFC 9110, 5.3)."""
    service: Any = Taken()
    transport = RetryTransport(hand_off=service, policy=Policy(max_attempts=1))
    with httpx.Client(transport=transport) as client, pytest.raises(tarry.HandedOff):
        client.put(server.url("503"), headers=[("X-Tag", "a"), ("X-Tag", "b")])

    assert "a, b" == service.orders[0]["headers"]["x-tag"]


def test_leaving_during_a_hand_off(server: Server, client: Client) -> None:
    """Who is cancelled while the service is asked leaves no connection behind."""
    service = Taken(Gone())
    policy = Policy(max_attempts=1)
    with client.open(hand_off=service.for_(client), policy=policy) as talker:
        with pytest.raises(Gone):
            talker.send("PUT", server.url("long"), BODY)
        answer = talker.send("GET", server.url("200", run="-2"))

    assert Answer(200, "answer 1") == answer


def test_the_callers_deadline_is_not_the_services(server: Server, client: Client) -> None:
    """A hand-off has its own time, also when the caller has none left; then his is back."""
    left: list[float | None] = []

    class Watching(Taken):
        def enqueue(self, url: str, body: bytes | None, **options: Any) -> Any:
            left.append(tarry.remaining())
            return super().enqueue(url, body, **options)

    with client.open(hand_off=Watching().for_(client)) as talker, tarry.deadline(0.0):
        handed(talker, "PUT", server.url("200"), BODY)
        assert 0.0 == tarry.remaining()

    (seconds,) = left
    assert seconds is not None
    assert 0.0 < seconds <= HAND_OFF_TIMEOUT_S


# --- arguments ------------------------------------------------------------------------------------


def test_calls_that_go_well_never_touch_it(server: Server, client: Client) -> None:
    """Neither a success nor one after retries has to do with the service."""
    service = Taken()
    with client.open(hand_off=service.for_(client)) as talker:
        answers = [talker.send("PUT", server.url("503,drop,200"), BODY) for _ in range(2)]

    assert [Answer(200, "answer 3"), Answer(200, "answer 4")] == answers
    assert [] == service.orders


@pytest.mark.parametrize("given", [tarry.Client, 7, "http://127.0.0.1:8080", "other"])
def test_other_kinds_are_refused(client: Client, given: Any) -> None:
    """What cannot work is refused when the adapter is made, with what to write instead."""
    blocks = client.name in BLOCKING
    if given == "other":
        given = Awaited(Taken()) if blocks else Taken()
    wanted = "tarry.Client" if blocks else "tarry.AsyncClient"
    with (
        pytest.raises(tarry.ConfigurationError, match=rf"hand_off must be a {wanted}\("),
        client.open(hand_off=given),
    ):
        pytest.fail("it was taken")
