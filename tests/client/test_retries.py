"""Requests over a real connection: retries, lost responses and errors."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

import tarry
from tarry.client import errors
from tests.client.client_drivers import ClientDriver
from tests.client.conftest import OpenDriver
from tests.client.fake_service import FakeService, problem_response, task_json

pytestmark = pytest.mark.usefixtures("_no_wait")

HOOK = "https://example.com/hook"


@pytest.mark.parametrize("fault", ["drop", "cut", "503", "429"])
def test_enqueue_survives_a_lost_response(
    driver: ClientDriver, service: FakeService, fault: str
) -> None:
    """A lost, cut off, 503 or 429 response is retried: one task, one key."""
    service.faults.append(fault)

    task = driver.call("enqueue", HOOK, {"order": 1})

    first, second = service.requests
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert "2" == second.headers["x-retry-attempt"]
    assert [task.idempotency_key] == list(service.tasks)


def test_batch_survives_a_lost_response(driver: ClientDriver, service: FakeService) -> None:
    """A batch is retried unchanged, and its results are those of the first request."""
    service.faults.append("drop")

    results = driver.call("enqueue_many", [{"url": HOOK}, {"url": HOOK, "body": "two"}])

    assert 2 == len(service.requests)
    assert list(service.tasks) == [result.task.idempotency_key for result in results]
    assert [200, 200] == [result.status for result in results]


def test_each_enqueue_has_its_own_key(driver: ClientDriver, service: FakeService) -> None:
    """Each call adds a task, unless the user passes the same key."""
    for key in (None, None, "mine", "mine"):
        driver.call("enqueue", HOOK, key=key)
    assert 3 == len(service.tasks)
    assert "mine" in service.tasks


@pytest.mark.parametrize("call", [("retry", "some-task"), ("replay",)])
def test_non_idempotent_request_is_sent_once(
    driver: ClientDriver, service: FakeService, call: tuple[str, ...]
) -> None:
    """A request that is not idempotent is not retried after it may have been processed."""
    service.faults.append("drop")
    with pytest.raises(errors.ServiceUnreachable):
        driver.call(*call)
    assert 1 == len(service.requests)


@pytest.mark.parametrize("status", [200, 202])
def test_cancel(driver: ClientDriver, service: FakeService, status: int) -> None:
    """A task is cancelled at once, or after its running attempt."""
    service.responses["DELETE /retry-tasks/a"] = (status, task_json(1, cancelling=status == 202))
    assert (status == 202) is driver.call("cancel", "a").cancelling
    assert 1 == len(service.requests)


def test_cancel_survives_a_lost_response(driver: ClientDriver, service: FakeService) -> None:
    """A retried cancel finds the task cancelled, and succeeds."""
    task = driver.call("enqueue", HOOK)
    path = f"/retry-tasks/{task.task_id}"
    before: list[Any] = []

    def cancel(_: Any) -> Any:
        if before:
            return problem_response(
                409, "Already ended", "It is CANCELLED.", taskStatus="CANCELLED"
            )
        before.append(1)
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


def test_unavailable_service(driver: ClientDriver, service: FakeService) -> None:
    """After the last attempt the error has the last response and retry_after."""
    service.faults.extend(["503"] * 10)
    with pytest.raises(errors.ServiceUnavailable, match=r"answered with 503: Later\.$") as caught:
        driver.call("enqueue", HOOK)
    assert (503, "Not now", 7.0) == (
        caught.value.status,
        caught.value.title,
        caught.value.retry_after,
    )
    assert 4 == len(service.requests)


def test_policy_of_the_client(service: FakeService, open_driver: OpenDriver) -> None:
    """The client's policy decides the number of attempts."""
    service.faults.extend(["503"] * 10)
    with open_driver(service.url, policy=tarry.Policy(max_attempts=2)) as driver:
        with pytest.raises(errors.ServiceUnavailable):
            driver.call("get", "some")
        assert 2 == len(service.requests)


def test_unreachable_service(open_driver: OpenDriver) -> None:
    """Without a service, a ConnectionError names the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with open_driver(url) as driver, pytest.raises(ConnectionError, match=url) as caught:
            driver.call("get", "some")
    assert isinstance(caught.value, errors.ServiceUnreachable)
    assert isinstance(caught.value.__cause__, httpx.ConnectError)
    assert None is caught.value.status


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidRequest),
        (401, errors.NotAuthorized),
        (403, errors.NotAuthorized),
        (404, errors.NotFound),
        (409, errors.Conflict),
        (413, errors.InvalidRequest),
        (422, errors.InvalidRequest),
        (500, errors.ServiceError),
    ],
)
def test_problems_become_errors(
    driver: ClientDriver, service: FakeService, status: int, kind: type[errors.ServiceError]
) -> None:
    """A problem document becomes the matching error, with the invalid field."""
    said = problem_response(status, "Bad", "delayMs is too long.", field="delayMs")
    service.responses["POST /retry-tasks"] = said
    with pytest.raises(errors.ServiceError) as caught:
        driver.call("enqueue", HOOK)
    error = caught.value
    assert kind is type(error)
    assert f"POST /retry-tasks was answered with {status}: delayMs is too long." == str(error)
    assert (status, "Bad", "delayMs is too long.", "delayMs") == (
        error.status,
        error.title,
        error.detail,
        error.field,
    )


def test_responses_of_other_servers(driver: ClientDriver, service: FakeService) -> None:
    """Responses that are not from a tarry service become errors."""
    service.responses["GET /retry-tasks/a"] = (200, b"<html>hello</html>")
    service.responses["GET /retry-tasks/b"] = (418, b"<html>teapot</html>")
    service.responses["GET /retry-tasks/c"] = (302, b"")
    with pytest.raises(errors.ServiceError, match="not from a tarry service"):
        driver.call("get", "a")
    with pytest.raises(errors.InvalidRequest, match="418: no problem document"):
        driver.call("get", "b")
    with pytest.raises(errors.ServiceError, match="302"):
        driver.call("get", "c")


def test_response_size_is_limited(
    driver: ClientDriver, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response has a maximum size."""
    monkeypatch.setattr("tarry.client.transport.MAX_RESPONSE_BYTES", 1000)
    service.responses["GET /retry-tasks/a"] = (200, b" " * 1001)
    with pytest.raises(errors.ServiceError, match="more than 1000 bytes"):
        driver.call("get", "a")
    assert 1 == len(service.requests)


def test_api_key_is_sent(
    driver: ClientDriver, service: FakeService, open_driver: OpenDriver
) -> None:
    """The API key is sent with every request, and is not shown by repr."""
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
