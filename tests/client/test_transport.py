"""Requests over a real connection: retries, lost responses and the event stream."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry.client import errors
from tarry.client.transport import EventStreamParser
from tarry.runtime.downstream import live_downstreams
from tarry.testing import captured_events
from tests.client.client_drivers import ClientDriver
from tests.client.conftest import OpenDriver
from tests.client.fake_service import FakeService, problem_response, task_json

pytestmark = pytest.mark.usefixtures("_no_wait")

HOOK = "https://example.com/hook"


@pytest.mark.parametrize("fault", ["drop", "cut", "503", "429"])
def test_enqueue_is_retried_with_the_same_key(
    driver: ClientDriver, service: FakeService, fault: str
) -> None:
    """A request with a lost, incomplete, 503 or 429 response is retried with the same key."""
    service.faults.append(fault)

    task = driver.call("enqueue", HOOK, {"order": 1})

    first, second = service.requests
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert "2" == second.headers["x-retry-attempt"]
    assert [task.idempotency_key] == list(service.tasks)


def test_requests_do_not_appear_in_the_telemetry_of_the_program(
    driver: ClientDriver, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests of the client emit no events and are no metrics; retries are logged at DEBUG."""
    service.faults.append("503")
    with (
        caplog.at_level(logging.DEBUG, "tarry"),
        captured_events() as events,
        tarry.record_calls() as records,
    ):
        driver.call("enqueue", HOOK)

    assert 2 == len(service.requests)
    assert ([], []) == (events, records)
    assert [] == [item for item in live_downstreams() if item.name.startswith(service.url)]
    [wait] = [record for record in caplog.records if "retry 1 of" in record.getMessage()]
    assert ("tarry.client", logging.DEBUG) == (wait.name, wait.levelno)


def test_breaker_of_the_client_does_not_appear_in_the_telemetry(
    open_driver: OpenDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The breaker of the client opens without an event or a log line above DEBUG."""
    with captured_events() as events, open_driver("http://127.0.0.1:1") as driver:
        for _ in range(30):
            with pytest.raises((errors.ServiceUnreachable, tarry.BreakerOpen)):
                driver.call("get", "some-task")

    assert [] == events
    assert [] == [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_batch_is_retried_after_a_lost_response(driver: ClientDriver, service: FakeService) -> None:
    """A batch is retried unchanged, and the results are the tasks of the first request."""
    service.faults.append("drop")

    results = driver.call("enqueue_many", [{"url": HOOK}, {"url": HOOK, "body": "two"}])

    assert 2 == len(service.requests)
    assert list(service.tasks) == [result.task.idempotency_key for result in results]
    assert [200, 200] == [result.status for result in results]


def test_each_enqueue_has_its_own_key(driver: ClientDriver, service: FakeService) -> None:
    """Each call adds a task, unless the caller passes a key that was already used."""
    for key in (None, None, "order-7", "order-7"):
        driver.call("enqueue", HOOK, key=key)
    assert 3 == len(service.tasks)
    assert "order-7" in service.tasks


@pytest.mark.parametrize("call", [("retry", "some-task"), ("replay",), ("cancel_many",)])
def test_non_idempotent_request_is_sent_once(
    driver: ClientDriver, service: FakeService, call: tuple[str, ...]
) -> None:
    """A request that is not idempotent is not retried after it may have been processed."""
    service.faults.append("drop")
    with pytest.raises(errors.ServiceUnreachable):
        driver.call(*call)
    assert 1 == len(service.requests)


@pytest.mark.parametrize("status", [200, 202])
def test_cancel_returns_the_task(driver: ClientDriver, service: FakeService, status: int) -> None:
    """A task is cancelled at once (200), or after its running attempt (202)."""
    service.responses["DELETE /retry-tasks/a"] = (status, task_json(1, cancelling=status == 202))
    assert (status == 202) is driver.call("cancel", "a").cancelling
    assert 1 == len(service.requests)


def test_cancel_is_retried_after_a_lost_response(
    driver: ClientDriver, service: FakeService
) -> None:
    """A retried cancel succeeds if the first request has already cancelled the task."""
    task = driver.call("enqueue", HOOK)
    path = f"/retry-tasks/{task.task_id}"
    earlier_requests: list[Any] = []

    def cancel(_: Any) -> Any:
        if earlier_requests:
            return problem_response(
                409, "Already ended", "It is CANCELLED.", taskStatus="CANCELLED"
            )
        earlier_requests.append(1)
        cancelled = {**task_json(1), "taskId": task.task_id, "status": "CANCELLED"}
        service.tasks[task.idempotency_key] = cancelled
        return 200, cancelled

    service.responses[f"DELETE {path}"] = cancel
    service.faults.append("drop")

    assert "CANCELLED" == driver.call("cancel", task).status
    assert ["POST", "DELETE", "DELETE", "GET"] == [request.method for request in service.requests]


def test_succeeded_task_cannot_be_cancelled(driver: ClientDriver, service: FakeService) -> None:
    """Cancelling a succeeded task raises Conflict with the service's detail."""
    ended = problem_response(409, "Already ended", "The task is SUCCEEDED.", taskStatus="SUCCEEDED")
    service.responses["DELETE /retry-tasks/some"] = ended
    with pytest.raises(errors.Conflict, match=r"The task is SUCCEEDED\.$") as caught:
        driver.call("cancel", "some")
    assert "SUCCEEDED" == caught.value.problem["taskStatus"]


def test_policy_of_the_client(service: FakeService, open_driver: OpenDriver) -> None:
    """The client's policy decides the number of attempts."""
    service.faults.extend(["503"] * 10)
    with open_driver(service.url, policy=tarry.Policy(max_attempts=2)) as driver:
        with pytest.raises(errors.ServiceUnavailable):
            driver.call("get", "some")
        assert 2 == len(service.requests)


def test_response_size_is_limited(
    driver: ClientDriver, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that is larger than the maximum is an error."""
    monkeypatch.setattr("tarry.client.transport.MAX_RESPONSE_BYTES", 1000)
    service.responses["GET /retry-tasks/a"] = (200, b" " * 1001)
    with pytest.raises(errors.ServiceError, match="more than 1000 bytes"):
        driver.call("get", "a")
    assert 1 == len(service.requests)


def test_api_key_is_sent(
    driver: ClientDriver, service: FakeService, open_driver: OpenDriver
) -> None:
    """The API key is sent with every request, and is not in the repr of the client."""
    driver.call("enqueue", HOOK)
    with open_driver(service.url) as other:
        other.call("enqueue", HOOK)
    assert ["Bearer secret", None] == [
        request.headers.get("authorization") for request in service.requests
    ]
    assert "secret" not in repr(driver.client)
    assert service.url in repr(driver.client)


def test_url_with_a_path(service: FakeService, open_driver: OpenDriver) -> None:
    """The URL of the service may have a path."""
    service.responses["GET /tarry/retry-tasks/a"] = (200, task_json(1))
    with open_driver(f"{service.url}/tarry/") as driver:
        assert "PENDING" == driver.call("get", "a").status


def test_deadline_limits_retries(driver: ClientDriver, service: FakeService) -> None:
    """A Retry-After beyond the caller's deadline is not waited for."""
    service.faults.extend(["503"] * 10)
    with tarry.deadline(5), pytest.raises(errors.ServiceUnavailable):
        driver.call("enqueue", HOOK)
    assert 1 == len(service.requests)


def event_bytes(kind: str, at: int) -> bytes:
    """Return an event as the service sends it."""
    data = json.dumps({"kind": kind, "at": at, "lane": "https://example.com:443"})
    return f"id: {at}-1\nevent: {kind}\ndata: {data}\n\n".encode()


@pytest.mark.usefixtures("_no_wait")
def test_event_stream_is_reopened(
    driver: ClientDriver, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """The client reopens an event stream after a lost connection and after an outage."""
    service.streams.extend(
        [
            b": hello\n\n" + event_bytes("added", 1) + event_bytes("attempt", 2)[:-1],
            b"",
            event_bytes("succeeded", 3) + event_bytes("added", 4),
        ]
    )
    service.faults.extend(["", "", *["503"] * 8])

    events = driver.events(3)

    assert [("added", 1), ("succeeded", 3), ("added", 4)] == [
        (event.kind, event.at) for event in events
    ]
    assert 11 == len(service.requests)
    lost = [record.getMessage() for record in caplog.records if record.name == "tarry.client"]
    assert 2 == len(lost)
    assert lost[0].startswith("event stream lost, reconnecting, url=")
    assert {"text/event-stream"} == {request.headers["accept"] for request in service.requests}


@pytest.mark.usefixtures("_no_wait")
def test_first_connection_is_not_retried_forever(
    driver: ClientDriver, service: FakeService
) -> None:
    """The first connection of an event stream is retried as often as the policy allows."""
    service.faults.extend(["503"] * 100)
    with pytest.raises(errors.ServiceUnavailable):
        driver.events(1)
    assert 4 == len(service.requests)


def test_response_that_is_not_an_event_stream(driver: ClientDriver, service: FakeService) -> None:
    service.responses["GET /events"] = (200, {"hello": "world"})
    with pytest.raises(errors.ServiceError, match="not an event stream"):
        driver.events(1)


EVENT_STREAM = b"".join(
    [
        b": hello\n\n",
        event_bytes("added", 1),
        event_bytes("missed", 2).replace(b"\n", b"\r\n"),
        event_bytes("parked", 3).replace(b"\n", b"\r"),
        b'data: {"kind":\ndata:"missed",\ndata: "missed": 5}\nretry: 10\nodd\n\n',
    ]
)


@given(st.lists(st.integers(0, len(EVENT_STREAM)), max_size=20))
def test_chunk_boundaries_do_not_affect_events(cuts: list[int]) -> None:
    """The events of a stream do not depend on its division into chunks."""
    parser = EventStreamParser()
    boundaries = [0, *sorted(cuts), len(EVENT_STREAM)]
    found = [
        event
        for start, end in pairwise(boundaries)
        for event in parser.feed(EVENT_STREAM[start:end])
    ]
    assert ["added", "missed", "parked", "missed"] == [event.kind for event in found]
    assert 5 == found[-1].missed


@pytest.mark.parametrize("chunk", [b"x" * 4096, b"\ndata: " + b"x" * 4096])
def test_event_size_is_limited(chunk: bytes) -> None:
    """An event that is larger than the maximum is an error, in one line or in many."""
    parser = EventStreamParser()
    with pytest.raises(errors.ServiceError, match="more than 262144 bytes"):
        for _ in range(100):
            assert [] == list(parser.feed(chunk))


def test_invalid_event() -> None:
    """An event that cannot be parsed is an error."""
    with pytest.raises(errors.ServiceError, match="cannot be parsed"):
        list(EventStreamParser().feed(b"data: [1]\n\n"))
