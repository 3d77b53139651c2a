"""Headers that refer to a secret: which references are accepted, and what the API returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.service.delivery import DeliveryResult
from tarry.service.delivery.secret_sources import EnvironmentSource
from tarry.service.engine.reporting import FinishedTask
from tarry.service.engine.secrets import Secret
from tarry.service.model import Status
from tests.service.api.harness import TARGET, ApiHarness, run_with_api

SOURCE = EnvironmentSource("TOKEN", {})
SECRETS = [
    Secret("default", "orders", SOURCE, targets=["https:example.com:443", "grpc:*"]),
    Secret("other", "theirs", SOURCE),
    Secret("default", "partner", SOURCE, header="X-Partner-Key"),
    Secret("default", "reserved", SOURCE, header="grpc-x"),
]
REFERENCE = {"secret": "orders"}


async def create(api: ApiHarness, headers: dict[str, Any], **fields: Any) -> Any:
    """Create a task with these headers and return the response."""
    document = {"targetUrl": TARGET, "headers": headers, **fields}
    return await api.request("POST", "/retry-tasks", document)


async def test_task_is_stored_and_shown_with_the_name_of_its_secret() -> None:
    """The response has the reference as it was sent, and the other headers."""
    api = ApiHarness(secrets=SECRETS)
    headers = {"Authorization": REFERENCE, "X-Shop": "7"}
    response = await create(api, headers, body={"order": 7})
    shown = {"X-Shop": "7", "Content-Type": "application/json", "Authorization": REFERENCE}
    assert (201, shown) == (response.status, response.json["headers"])
    task_id = response.json["taskId"]
    stored = await api.request("GET", f"/retry-tasks/{task_id}")
    assert shown == stored.json["headers"]
    task = await api.store.get_task("default", task_id)
    assert task is not None
    content = api.codec.unpack(task.packed_content)
    assert {"Authorization": "orders"} == content.secret_headers
    assert "Authorization" not in content.headers


@pytest.mark.parametrize(
    ("headers", "field", "rule"),
    [
        ({"X": {"secret": "unknown"}}, "headers.X.secret", "in the setting `secrets`"),
        ({"X": {"secret": "theirs"}}, "headers.X.secret", "in the setting `secrets`"),
        ({"X": {"secret": "no name"}}, "headers.X.secret", "must consist of"),
        ({"X": {"secret": 7}}, "headers.X", 'or {"secret": NAME}'),
        ({"X": {"secret": "orders", "other": ""}}, "headers.X", 'or {"secret": NAME}'),
        ({"X": {}}, "headers.X", 'or {"secret": NAME}'),
        ({"X": ["orders"]}, "headers.X", 'or {"secret": NAME}'),
        ({"X": None}, "headers.X", 'or {"secret": NAME}'),
        ({"Host": REFERENCE}, "headers.Host", "is set by the service itself"),
        ({"Content-Type": REFERENCE}, "headers.Content-Type", "not a secret"),
        ({"X": REFERENCE, "x": "7"}, "headers.X", "is given twice"),
    ],
)
def test_invalid_reference_is_rejected(headers: dict[str, Any], field: str, rule: str) -> None:
    """The problem has the header and the rule; an unknown secret names the setting."""

    async def test(api: ApiHarness) -> None:
        response = await create(api, headers)
        assert (422, field) == (response.status, response.problem["field"])
        assert rule in response.problem["detail"]
        assert 0 == await api.count_tasks()

    run_with_api(test, secrets=SECRETS)


@pytest.mark.parametrize(
    ("url", "headers", "rule"),
    [
        ("https://example.com:444/", {"X": REFERENCE}, "may be sent to https:example.com:444"),
        ("http://example.com/", {"X": REFERENCE}, "may be sent to http:example.com:80"),
        ("https://example.com.b.example/", {"X": REFERENCE}, "https:example.com.b.example:443"),
        ("grpc://a.example:50051/p.S/M", {"x-bin": REFERENCE}, "not a secret"),
        ("grpc://a.example:50051/p.S/M", {"grpc-x": {"secret": "reserved"}}, "gRPC reserves"),
    ],
)
async def test_secret_is_only_sent_to_its_targets(url: str, headers: Any, rule: str) -> None:
    """A caller cannot choose another target to read the value of a secret."""
    api = ApiHarness(secrets=SECRETS)
    response = await create(api, headers, targetUrl=url)
    assert 422 == response.status
    assert rule in response.problem["detail"]


async def test_secret_is_only_sent_in_its_header() -> None:
    """Otherwise a caller could write the value into a header that the target stores and returns."""
    api = ApiHarness(secrets=SECRETS)
    for header, name in (
        ("x-amz-meta-note", "orders"),
        ("X-Request-Id", "orders"),
        ("Authorization", "partner"),
        ("X-Partner-Key2", "partner"),
    ):
        response = await create(api, {header: {"secret": name}})
        assert (422, f"headers.{header}.secret") == (response.status, response.problem["field"])
        assert "the operator can change `header`" in response.problem["detail"]
    for header, name in (("aUthorization", "orders"), ("x-partner-key", "partner")):
        assert 201 == (await create(api, {header: {"secret": name}})).status


async def test_same_key_with_another_secret_is_a_conflict() -> None:
    """The name of the secret is part of the request that an idempotency key identifies."""
    api = ApiHarness(secrets=SECRETS)
    statuses = [
        (await create(api, headers, idempotencyKey="k")).status
        for headers in (
            {"Authorization": REFERENCE},
            {"authorization": REFERENCE},
            {"Authorization": "orders"},
            {},
        )
    ]
    assert [201, 200, 422, 422] == statuses


async def test_values_are_redacted_in_a_response_that_is_waited_for() -> None:
    """A value that the target returns is not shown to the caller that waits for the result."""
    api = ApiHarness(secrets=SECRETS)
    task_id = (await create(api, {"Authorization": REFERENCE})).json["taskId"]
    path = f"/retry-tasks/{task_id}"
    request = asyncio.create_task(api.request("GET", path, headers={"Prefer": "wait=5"}))
    assert task_id == await api.engine.waited_for.get()
    delivered = DeliveryResult(
        status=200,
        headers=[("x-echo", "token-1")],
        excerpt=b"you sent Bearer token-1",
        sent_secrets=("Bearer token-1", "token-1"),
    )
    api.engine.reporter.notify_waiters(task_id, FinishedTask(Status.SUCCEEDED, None, delivered))
    shown = (await request).json["response"]
    assert ("you sent [redacted]", {"x-echo": "[redacted]"}) == (shown["body"], shown["headers"])


async def test_explanation_names_a_secret_that_is_not_available() -> None:
    """The tenant sees the name of the secret, but not why it is not available."""
    api = ApiHarness(secrets=SECRETS)
    task_id = (await create(api, {"Authorization": REFERENCE})).json["taskId"]
    path = f"/retry-tasks/{task_id}/explain"
    note = "It waits for the secret orders, which is not available."
    assert note not in (await api.request("GET", path)).json["text"]
    secret = SECRETS[0]
    secret.failure_count = 1
    try:
        assert note in (await api.request("GET", path)).json["text"]
    finally:
        secret.failure_count = 0


async def test_response_is_redacted_if_a_secret_of_the_lane_is_unknown() -> None:
    """The target may return a secret of another task whose value this process does not know."""
    api = ApiHarness(secrets=SECRETS)
    task_id = (await create(api, {})).json["taskId"]
    path = f"/retry-tasks/{task_id}"
    request = asyncio.create_task(api.request("GET", path, headers={"Prefer": "wait=5"}))
    assert task_id == await api.engine.waited_for.get()
    delivered = DeliveryResult(status=200, excerpt=b"any text", has_unknown_secrets=True)
    api.engine.reporter.notify_waiters(task_id, FinishedTask(Status.SUCCEEDED, None, delivered))
    assert "[redacted]" == (await request).json["response"]["body"]


async def test_openapi_document_describes_references() -> None:
    """A header is a string or a reference, in requests and in responses."""
    api = ApiHarness(secrets=SECRETS)
    schemas = (await api.request("GET", "/openapi.json")).json["components"]["schemas"]
    reference = {"$ref": "#/components/schemas/SecretReference"}
    assert ["secret"] == schemas["SecretReference"]["required"]
    [of_request, _] = schemas["RetryTaskRequest"]["properties"]["headers"]["anyOf"]
    assert reference in of_request["additionalProperties"]["anyOf"]
    of_task = schemas["RetryTask"]["properties"]["headers"]
    assert reference in of_task["additionalProperties"]["anyOf"]
