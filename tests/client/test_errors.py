"""Unsuccessful responses become errors, which have the fields of the problem document."""

from __future__ import annotations

import socket
import time
from email.utils import formatdate

import httpx
import pytest

from tarry.client import errors
from tests.client.client_drivers import ClientDriver
from tests.client.conftest import OpenDriver
from tests.client.fake_service import FakeService, problem_response

pytestmark = pytest.mark.usefixtures("_no_wait")

HOOK = "https://example.com/hook"


@pytest.mark.parametrize(
    ("call", "request_line", "status"),
    [
        (("get", "a"), "GET /retry-tasks/a", 404),
        (("cancel", "a"), "DELETE /retry-tasks/a", 409),
        (("health",), "GET /readyz", 503),
    ],
)
def test_retry_after_date(
    driver: ClientDriver,
    service: FakeService,
    call: tuple[str, ...],
    request_line: str,
    status: int,
) -> None:
    """`retry_after` is the number of seconds until the date in Retry-After."""
    service.responses[request_line] = problem_response(status, "Not now", "Later.")
    service.retry_after = formatdate(time.time() + 100, usegmt=True)
    with pytest.raises(errors.ServiceError) as caught:
        driver.call(*call)
    assert status == caught.value.status
    assert 100 == pytest.approx(caught.value.retry_after, abs=30)


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


def test_unreachable_service(open_driver: OpenDriver) -> None:
    """When nothing listens at the address, a ConnectionError names the address."""
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound_socket.getsockname()[1]}"
        with open_driver(url) as driver, pytest.raises(ConnectionError, match=url) as caught:
            driver.call("get", "some")
    assert isinstance(caught.value, errors.ServiceUnreachable)
    assert isinstance(caught.value.__cause__, httpx.ConnectError)
    assert None is caught.value.status


@pytest.mark.parametrize(
    ("status", "error_type"),
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
    driver: ClientDriver, service: FakeService, status: int, error_type: type[errors.ServiceError]
) -> None:
    """A problem document becomes the error of its status, with the fields of the document."""
    response = problem_response(status, "Bad", "delayMs is too long.", field="delayMs")
    service.responses["POST /retry-tasks"] = response
    with pytest.raises(errors.ServiceError) as caught:
        driver.call("enqueue", HOOK)
    error = caught.value
    assert error_type is type(error)
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
