"""The REST API of Google Cloud Tasks."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tarry.service.api.problems import ApiError
from tarry.service.api.shims.cloud_tasks import (
    HttpRequest,
    TaskFields,
    TaskRetryConfig,
    translate_task,
)
from tests.service.api.harness import NOW, TARGET, ApiHarness, Response
from tests.test_docs import DOCS, table_of

PARENT = "projects/p/locations/europe-west1/queues/orders"
PATH = f"/v2/{PARENT}/tasks"
NAME = f"{PARENT}/tasks/order-7"
LATER = "2030-01-01T00:00:00.250000000Z"


async def create(api: ApiHarness, task: dict[str, Any] | None = None, path: str = PATH) -> Response:
    """Create a task for TARGET with further fields."""
    document = {"task": {"httpRequest": {"url": TARGET}, **(task or {})}}
    return await api.request("POST", f"{path}?%24alt=json%3Benum-encoding%3Dint", document)


async def create_ok(api: ApiHarness, task: dict[str, Any] | None = None) -> dict[str, Any]:
    """Create a task and return its resource."""
    response = await create(api, task)
    assert 200 == response.status, response.body
    resource: dict[str, Any] = response.json
    return resource


def id_of(resource: dict[str, Any]) -> str:
    """Return the id at the end of a task's name."""
    task_id: str = resource["name"].rpartition("/")[2]
    return task_id


def fields_of(task: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `POST /retry-tasks` for a task."""
    document = {"httpRequest": {"url": TARGET}, **task}
    return translate_task(msgspec.convert(document, TaskFields), PARENT, NOW)


async def test_http_request_becomes_a_task() -> None:
    """Method, headers and body are delivered; the queue is the lane key; the resource shows it."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    http_request = {
        "url": TARGET,
        "httpMethod": 4,
        "headers": {"X-Order": "7", "Authorization": "Bearer abc"},
        "body": "_wA",
    }
    resource = await create_ok(
        api, {"httpRequest": http_request, "scheduleTime": LATER, "dispatchDeadline": "15.5s"}
    )
    task, content = await api.stored_task(id_of(resource))
    assert ("PUT", b"\xff\x00") == (content.method, content.body)
    assert http_request["headers"] == content.headers
    assert {"attemptTimeoutMs": 15_500} == content.overrides
    assert ("cloud-tasks", "default/https:example.com:443@orders") == (task.policy_id, task.lane)
    assert {
        "name": f"{PARENT}/tasks/{task.id}",
        "httpRequest": {
            "url": TARGET,
            "httpMethod": "PUT",
            "headers": {"X-Order": "7", "Authorization": "[redacted]"},
        },
        "createTime": "2027-01-15T08:00:00.000Z",
        "scheduleTime": "2030-01-01T00:00:00.250Z",
        "dispatchCount": 0,
        "dispatchDeadline": "15.5s",
        "view": "BASIC",
    } == resource
    assert resource == (await api.request("GET", f"/v2/{resource['name']}")).json


@pytest.mark.parametrize(
    ("method", "name"),
    [("POST", "POST"), ("PATCH", "PATCH"), (0, "POST"), (2, "GET"), (7, "OPTIONS")],
)
def test_methods_are_names_or_numbers(method: str | int, name: str) -> None:
    """A method is a name, or its number in the protocol; 0 is unspecified."""
    assert name == fields_of({"httpRequest": {"url": TARGET, "httpMethod": method}})["method"]


def test_time_in_the_past_means_now() -> None:
    """A task with a `scheduleTime` in the past is due at once."""
    assert "nextAttemptAt" not in fields_of({"scheduleTime": "1970-01-01T00:00:00Z"})


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({}, {}),
        ({"maxAttempts": 5}, {"maxAttempts": 5}),
        ({"maxAttempts": -1}, {"maxAttempts": 100_000}),
        ({"maxRetryDuration": "0s", "maxAttempts": 2}, {"maxAttempts": 2}),
        ({"maxRetryDuration": "3600s"}, {"maxAttempts": 100_000, "totalBudgetMs": 3_600_000}),
        (
            {"minBackoff": "0.5s", "maxBackoff": "10s"},
            {"initialDelayMs": 500, "maxDelayMs": 10_000},
        ),
        (
            {"maxDoublings": 16},
            {
                "initialDelayMs": 100,
                "maxDelayMs": 3_600_000,
                "backoffType": "EXPONENTIAL",
                "multiplier": 2,
            },
        ),
        (
            {"minBackoff": "10s", "maxBackoff": "60s", "maxDoublings": 0},
            {"initialDelayMs": 10_000, "maxDelayMs": 60_000, "backoffType": "LINEAR"},
        ),
        (
            {"minBackoff": "10s", "maxBackoff": "300s", "maxDoublings": 3},
            {
                "initialDelayMs": 10_000,
                "maxDelayMs": 300_000,
                "backoffType": "SCHEDULE",
                "scheduleMs": [10_000, 20_000, 40_000, 80_000, 160_000, 240_000, 300_000],
            },
        ),
    ],
)
def test_retry_config_overrides_the_policy(
    config: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """The retry config of a task gives the delays that Cloud Tasks documents."""
    assert overrides == fields_of({"retryConfig": config})["policy"]


async def test_retry_config_is_a_valid_policy() -> None:
    """Overrides of each type of backoff are accepted."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    for config in (
        {"maxDoublings": 16},
        {"maxDoublings": 0, "minBackoff": "10s"},
        {"maxDoublings": 3, "minBackoff": "10s", "maxBackoff": "300s"},
        {"maxRetryDuration": "60s"},
        {"maxAttempts": -1},
    ):
        await create_ok(api, {"retryConfig": config})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"httpRequest": None}, "task.httpRequest is missing"),
        ({"appEngineHttpRequest": {}}, "task.appEngineHttpRequest is not supported: use httpReq"),
        (
            {"httpRequest": {"url": TARGET, "oidcToken": {}}},
            "task.httpRequest.oidcToken is not supported: define the token in the setting",
        ),
        (
            {"httpRequest": {"url": TARGET, "oauthToken": {}}},
            "task.httpRequest.oauthToken is not supported",
        ),
        ({"httpRequest": {"url": TARGET, "httpMethod": 9}}, "task.httpRequest.httpMethod must be"),
        ({"name": "order-7"}, f"task.name must be {PARENT}/tasks/TASK_ID"),
        ({"name": f"{PARENT}/tasks/a.b"}, f"task.name must be {PARENT}/tasks/TASK_ID"),
        ({"name": f"{PARENT}/tasks/{'x' * 300}"}, "task.name must have at most 255 characters"),
        ({"scheduleTime": "tomorrow"}, "task.scheduleTime must be a time as in RFC 3339"),
        ({"scheduleTime": "2030-01-01T00:00:00"}, "task.scheduleTime must be a time as in RFC"),
        ({"dispatchDeadline": "1m"}, "task.dispatchDeadline must be seconds with the unit s"),
        ({"dispatchDeadline": f"{10**12 - 1}s"}, "task.dispatchDeadline must be at most 100 years"),
        ({"retryConfig": {"maxAttempts": -2}}, "task.retryConfig.maxAttempts must be -1"),
        (
            {"retryConfig": {"maxAttempts": 3, "maxRetryDuration": "9s"}},
            "task.retryConfig.maxRetryDuration must not be given together with maxAttempts",
        ),
        ({"retryConfig": {"minBackoff": "fast"}}, "task.retryConfig.minBackoff must be seconds"),
        ({"retryConfig": {"maxDoublings": -1}}, "task.retryConfig.maxDoublings must be at least"),
        ({"retryConfig": {"maxDoublings": 1}}, "task.retryConfig.maxDoublings must be larger"),
    ],
)
def test_invalid_and_unsupported_fields(task: dict[str, Any], message: str) -> None:
    """The error names the field and what to do."""
    with pytest.raises(ApiError) as caught:
        fields_of(task)

    assert (caught.value.problem.detail or "").startswith(message)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"httpRequest": {"url": "http://127.0.0.1/"}}, "task.httpRequest.url "),
        (
            {"httpRequest": {"url": TARGET, "headers": {"Host": "x"}}},
            "task.httpRequest.headers.Host is set by the service itself.",
        ),
        ({"httpRequest": {"url": TARGET, "body": "?"}}, "task.httpRequest.body must be base64"),
        ({"dispatchDeadline": "600s"}, "task.dispatchDeadline must be more than 0 s and at most 6"),
        ({"dispatchDedline": "600s"}, "task.dispatchDedline is not a known field; did you mean di"),
        ({"httpRequest": {}}, "task.httpRequest.url is missing"),
    ],
)
async def test_errors_have_the_format_of_google(task: dict[str, Any], message: str) -> None:
    """An invalid task is INVALID_ARGUMENT with the names of Cloud Tasks."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    response = await create(api, task)
    error = response.json["error"]
    assert (400, 400, "INVALID_ARGUMENT") == (response.status, error["code"], error["status"])
    assert error["message"].startswith(message)
    assert 0 == await api.count_tasks()


async def test_name_can_be_used_once() -> None:
    """A name is the idempotency key; a second task with it is ALREADY_EXISTS."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    resource = await create_ok(api, {"name": NAME})
    assert NAME == resource["name"]
    assert resource == (await api.request("GET", f"/v2/{NAME}")).json
    other = {"name": NAME, "httpRequest": {"url": f"{TARGET}/other"}}
    for task in ({"name": NAME}, other):
        response = await create(api, task)
        assert (409, "ALREADY_EXISTS") == (response.status, response.json["error"]["status"])
    assert {} == (await api.request("DELETE", f"/v2/{NAME}")).json
    for method in ("GET", "DELETE"):
        response = await api.request(method, f"/v2/{NAME}")
        assert (404, "NOT_FOUND") == (response.status, response.json["error"]["status"])
        assert "CANCELLED" in response.json["error"]["message"]


async def test_tasks_of_other_queues_are_not_found() -> None:
    """A task is found only by the name of its queue, and a name of any length can be asked for."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    task_id = id_of(await create_ok(api))
    other = PATH.replace("orders", "mail")
    for path in (f"{other}/{task_id}", f"{PATH}/x", f"{PATH}/{'x' * 500}"):
        response = await api.request("GET", path)
        assert (404, "NOT_FOUND") == (response.status, response.json["error"]["status"])


async def test_policy_of_a_queue() -> None:
    """The policy `cloud-tasks.QUEUE` of the tenant applies to the tasks of the queue."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    policy = {"maxAttempts": 3}
    await api.request("PUT", "/retry-policies/cloud-tasks.orders", policy)
    task, _ = await api.stored_task(id_of(await create_ok(api)))
    assert "cloud-tasks.orders" == task.policy_id


async def test_run_makes_a_task_due() -> None:
    """`:run` makes the next attempt now; a finished task is a 404."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    await create_ok(api, {"name": NAME, "scheduleTime": LATER})
    run = await api.request("POST", f"/v2/{NAME}:run", {})
    assert (200, "2027-01-15T08:00:00.000Z") == (run.status, run.json["scheduleTime"])
    await api.exhaust_due_tasks()
    assert 404 == (await api.request("POST", f"/v2/{NAME}:run", {})).status
    assert 501 == (await api.request("POST", f"/v2/{NAME}:pause", {})).status


async def test_limits_of_the_tenant_apply() -> None:
    """A tenant at its quota of tasks or lanes gets RESOURCE_EXHAUSTED."""
    api = ApiHarness(compatibility=("cloud_tasks",), quota=2, lane_quota=1)
    await create_ok(api)
    lane = await create(api, path=PATH.replace("orders", "mail"))
    await create_ok(api)
    quota = await create(api)
    for response, setting in ((lane, "tenant_lanes"), (quota, "tenant_pending")):
        error = response.json["error"]
        assert (429, "RESOURCE_EXHAUSTED") == (response.status, error["status"])
        assert setting in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", PATH),
        ("POST", f"{PATH}:batchCreate"),
        ("GET", "/v2/projects/p/locations/europe-west1/queues"),
        ("PATCH", f"/v2/{PARENT}"),
        ("POST", f"/v2/{PARENT}:pause"),
    ],
)
async def test_other_methods_are_unimplemented(method: str, path: str) -> None:
    """Methods for queues and lists are UNIMPLEMENTED; QStash does not handle their paths."""
    api = ApiHarness(compatibility=("qstash", "cloud_tasks"))
    response = await api.request(method, path)
    assert (501, "UNIMPLEMENTED") == (response.status, response.json["error"]["status"])
    assert 400 == (await api.request("POST", "/v2/publish/x")).status


async def test_queue_ids_are_lane_keys() -> None:
    """A queue id of more than 64 characters is rejected."""
    api = ApiHarness(compatibility=("cloud_tasks",))
    response = await create(api, path=PATH.replace("orders", "x" * 65))
    assert response.json["error"]["message"].startswith("The queue id must be 1 to 64 letters")


async def test_authentication() -> None:
    """Without an API key of the service, a request is UNAUTHENTICATED."""
    api = ApiHarness(compatibility=("cloud_tasks",), keys=True)
    response = await create(api)
    assert (401, "UNAUTHENTICATED") == (response.status, response.json["error"]["status"])


def test_page_lists_every_field() -> None:
    """The page has each field of a request, except those that only responses have."""
    rows = table_of(DOCS / "moving-from-qstash-and-cloud-tasks.md", "field of the task")
    listed = {name for row in rows for name in re.findall(r"`(?:\w+\.)?(\w+)`", row[0])}
    known = {*HttpRequest.__struct_encode_fields__, *TaskRetryConfig.__struct_encode_fields__}
    known |= {*TaskFields.__struct_encode_fields__}
    containers = {"httpRequest", "retryConfig"}
    only_in_responses = {"responseCount", "firstAttempt", "lastAttempt"}

    assert set() == known - containers - only_in_responses - listed
