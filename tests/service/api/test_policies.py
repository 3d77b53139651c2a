"""`/retry-policies`: policies of a tenant and built-in policies."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.service.api.context import ApiLimits
from tarry.service.model import PolicyVersion
from tarry.service.store import POLICY_RETENTION_MS, Retention
from tarry.wire.policies import SERVICE_PRESETS
from tests.service.api.harness import NOW, TARGET, ApiHarness


async def test_an_existing_policy_can_be_posted_again(api: ApiHarness) -> None:
    """Equal fields, in any notation, get a 200, and different fields a 409."""
    document = {"policyId": "mine", "maxAttempts": 7, "totalBudgetMs": 60_000}
    first = await api.request("POST", "/retry-policies", document)
    assert (201, "/retry-policies/mine") == (first.status, first.header("location"))
    returned = first.json
    assert ("mine", 1, NOW, 7, 60_000) == (
        returned["policyId"],
        returned["version"],
        returned["createdAt"],
        returned["maxAttempts"],
        returned["totalBudgetMs"],
    )
    same = {"totalBudgetMs": 60_000.0, "maxAttempts": 7, "multiplier": 2, "policyId": "mine"}
    repeated = await api.request("POST", "/retry-policies", same)
    assert (200, returned) == (repeated.status, repeated.json)
    other = await api.request("POST", "/retry-policies", {**document, "maxAttempts": 8})
    assert (409, "policyId") == (other.status, other.problem["field"])


async def test_put_creates_a_new_version(api: ApiHarness) -> None:
    """A PUT with equal fields creates no version, and old versions can be read."""
    path = "/retry-policies/mine"
    first = await api.request("PUT", path, {"maxAttempts": 2})
    second = await api.request("PUT", path, {"maxAttempts": 3, "policyId": "mine"})
    same = await api.request("PUT", path, {"maxAttempts": 3})
    assert [201, 200, 200] == [first.status, second.status, same.status]
    assert [1, 2, 2] == [response.json["version"] for response in (first, second, same)]
    assert 3 == (await api.request("GET", path)).json["maxAttempts"]
    assert 2 == (await api.request("GET", f"{path}?version=1")).json["maxAttempts"]
    assert 404 == (await api.request("GET", f"{path}?version=9")).status
    loaded = await api.engine.policies.load("default", "mine")
    assert loaded is not None
    assert 3 == loaded.policy.max_attempts


async def test_too_many_policy_versions_are_429() -> None:
    """The 429 names the setting. Unchanged policies and other tenants are not affected."""
    api = ApiHarness(limits=ApiLimits(max_tenant_policy_versions=2))
    path = "/retry-policies/mine"
    for max_attempts in (2, 3):
        await api.request("PUT", path, {"maxAttempts": max_attempts})
    rejected = [
        await api.request("PUT", path, {"maxAttempts": 4}),
        await api.request("POST", "/retry-policies", {"policyId": "other"}),
    ]
    for response in rejected:
        assert (429, "60") == (response.status, response.header("retry-after"))
        assert "2 policy versions (setting tenant_policy_versions)" in response.problem["detail"]
    assert 200 == (await api.request("PUT", path, {"maxAttempts": 3})).status


async def test_a_removed_version_cannot_be_used(api: ApiHarness) -> None:
    """A new task cannot name a version that retention has removed, although it is cached."""
    for max_attempts in (2, 3):
        await api.request("PUT", "/retry-policies/mine", {"maxAttempts": max_attempts})
    created = await api.create(policyId="mine", policyVersion=1)
    await api.request("DELETE", f"/retry-tasks/{created['taskId']}")
    api.time.ms += POLICY_RETENTION_MS
    await api.store.sweep(Retention(0, 0), 10)
    task = {"targetUrl": TARGET, "policyId": "mine", "policyVersion": 1}
    rejected = await api.request("POST", "/retry-tasks", task)
    assert (422, "policyVersion") == (rejected.status, rejected.problem["field"])
    assert "the newest version of mine is 2" in rejected.problem["rule"]


async def test_a_deleted_policy_cannot_be_used(api: ApiHarness) -> None:
    """A policy in use cannot be deleted; a new task cannot use a deleted policy that is cached."""
    await api.request("PUT", "/retry-policies/mine", {})
    await api.create(policyId="mine")
    await api.request("DELETE", f"/retry-tasks/{(await api.create(policyId='mine'))['taskId']}")
    assert 409 == (await api.request("DELETE", "/retry-policies/mine")).status
    await api.exhaust_due_tasks()
    assert 204 == (await api.request("DELETE", "/retry-policies/mine")).status
    rejected = await api.request(
        "POST", "/retry-tasks", {"targetUrl": "https://a.b/", "policyId": "mine"}
    )
    assert "policyId" == rejected.problem["field"]


async def test_classes_of_statuses(api: ApiHarness) -> None:
    """The text "5xx" stands for all statuses from 500 to 599, also in the overrides of a task."""
    fields = {"retryableStatusCodes": [429, "5xx"]}
    stored = await api.request("PUT", "/retry-policies/mine", fields)
    assert [429, *range(500, 600)] == stored.json["retryableStatusCodes"]
    await api.create(policy=fields)


async def test_built_in_policies_are_listed_last(api: ApiHarness) -> None:
    """All pages together contain each policy once, also a replaced built-in policy."""
    await api.request("PUT", "/retry-policies/zebra", {})
    await api.request("PUT", "/retry-policies/webhook", {"maxAttempts": 2})
    expected: list[Any] = [("webhook", 1), ("zebra", 1)]
    expected += [(name, None) for name in sorted(SERVICE_PRESETS) if name != "webhook"]
    for limit in (1, 2, 3, 100):
        listed: list[Any] = []
        cursor = ""
        while cursor is not None:
            page = (await api.request("GET", f"/retry-policies?limit={limit}{cursor}")).json
            assert len(page["items"]) <= limit
            listed += [(policy["policyId"], policy["version"]) for policy in page["items"]]
            cursor = page["nextCursor"] and f"&cursor={page['nextCursor']}"
        assert expected == listed


async def test_a_built_in_policy_can_be_replaced_and_restored(api: ApiHarness) -> None:
    """Deleting the replacement restores the built-in policy, which cannot be deleted."""
    path = "/retry-policies/default"
    preset = (await api.request("GET", path)).json
    assert (None, 86_400_000) == (preset["version"], preset["totalBudgetMs"])
    assert 409 == (await api.request("DELETE", path)).status
    await api.request("PUT", path, {"maxAttempts": 2})
    assert 2 == (await api.request("GET", path)).json["maxAttempts"]
    assert 204 == (await api.request("DELETE", path)).status
    assert preset == (await api.request("GET", path)).json


async def test_a_policy_of_an_older_version_is_complete(api: ApiHarness) -> None:
    """Fields that did not exist when the policy was stored have the values of the default."""
    document = b'{"maxAttempts": 2}'
    old = PolicyVersion(tenant="default", id="old", version=1, document=document)
    await api.store.put_policy(old, replace=False)
    policy = (await api.request("GET", "/retry-policies/old")).json
    default = (await api.request("GET", "/retry-policies/default")).json
    own = {"policyId": "old", "version": 1, "createdAt": NOW, "maxAttempts": 2}
    assert {**default, **own} == policy


async def test_a_policy_in_use_cannot_be_deleted(api: ApiHarness) -> None:
    """The problem contains the requests that list the tasks and restore the built-in policy."""
    path = "/retry-policies/default"
    preset = (await api.request("GET", path)).json
    await api.request("PUT", path, {"maxAttempts": 2})
    await api.create()
    detail = (await api.request("DELETE", path)).problem["detail"]
    assert "GET /retry-tasks?policyId=default" in detail
    assert "PUT /retry-policies/default with {}" in detail
    repeated = (await api.request("PUT", path, {})).json
    assert {**preset, "version": 2, "createdAt": NOW} == repeated


async def test_the_problem_of_an_unknown_version_names_the_newest(api: ApiHarness) -> None:
    """The problem contains the newest version, for a new task and for a read."""
    for attempts in (2, 3):
        await api.request("PUT", "/retry-policies/mine", {"maxAttempts": attempts})
    newest_version = "the newest version of mine is 2"
    task = {"targetUrl": TARGET, "policyId": "mine", "policyVersion": 9}
    rejected = await api.request("POST", "/retry-tasks", task)
    assert (f"policyVersion must exist: {newest_version}, got 9.", "policyVersion") == (
        rejected.problem["detail"],
        rejected.problem["field"],
    )
    read = await api.request("GET", "/retry-policies/mine?version=9")
    assert (404, f"Version 9 does not exist: {newest_version}.") == (
        read.status,
        read.problem["detail"],
    )


async def test_a_schedule_is_returned_as_a_list(api: ApiHarness) -> None:
    """`scheduleMs` is returned as it was sent."""
    document = {"backoffType": "SCHEDULE", "scheduleMs": [1000, 5000]}
    response = await api.request("PUT", "/retry-policies/steps", document)
    assert ("SCHEDULE", [1000, 5000]) == (response.json["backoffType"], response.json["scheduleMs"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "policyId"),
        ({"policyId": 5}, "policyId"),
        ({"policyId": "a/b"}, "policyId"),
        ({"policyId": "x" * 101}, "policyId"),
        ({"policyId": "a", "maxAttempts": 0}, "maxAttempts"),
        ({"policyId": "a", "retryableStatusCodes": "503"}, "retryableStatusCodes"),
        ({"policyId": "a", "retryableStatusCodes": ["2xx"]}, "retryableStatusCodes[0]"),
        ({"policyId": "a", "attemptTimeoutMs": 10**9}, "attemptTimeoutMs"),
        ({"policyId": "a", "version": 3}, "version"),
        ({"policyId": "a", "jitter": "FULL"}, "jitter"),
    ],
)
async def test_an_invalid_policy_is_422_with_its_field(
    api: ApiHarness, fields: dict[str, object], field: str
) -> None:
    """An invalid policy is not stored."""
    response = await api.request("POST", "/retry-policies", fields)
    assert (422, field) == (response.status, response.problem["field"])
    assert [] == (await api.store.list_policies("default")).items


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/retry-policies/a", {"policyId": "b"}, "policyId"),
        ("/retry-policies/%20", {}, "policyId"),
        ("/retry-policies/a", {"maxAttempts": None}, "maxAttempts"),
    ],
)
async def test_an_invalid_new_version_is_422_with_its_field(
    api: ApiHarness, path: str, fields: dict[str, object], field: str
) -> None:
    """An invalid version is not stored."""
    response = await api.request("PUT", path, fields)
    assert (422, field) == (response.status, response.problem["field"])
    assert [] == (await api.store.list_policies("default")).items


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff"])
async def test_a_document_that_is_not_a_policy_is_rejected(api: ApiHarness, body: bytes) -> None:
    """The status is 400 or 422, as for tasks."""
    assert (await api.request("POST", "/retry-policies", body=body)).status in {400, 422}


async def test_an_unknown_policy_is_404(api: ApiHarness) -> None:
    """GET and DELETE of an unknown policy return 404."""
    assert 404 == (await api.request("GET", "/retry-policies/x")).status
    assert 404 == (await api.request("DELETE", "/retry-policies/x")).status


async def test_delays_of_a_policy_are_computed_without_storing_it(api: ApiHarness) -> None:
    """The schedule has the ceiling and the range of each delay, and what fits into the budget."""
    fields = {"maxAttempts": 4, "initialDelayMs": 100, "jitterType": "EQUAL"}
    response = await api.request("POST", "/policy-schedules", fields)
    assert 200 == response.status
    assert [[1, 100, 50, 100], [2, 200, 100, 200], [3, 400, 200, 400]] == [
        list(retry.values()) for retry in response.json["retries"]
    ]
    assert (3, 3, 700) == (
        response.json["maxRetries"],
        response.json["averageRetries"],
        response.json["longestWaitMs"],
    )
    names = [
        each["policyId"] for each in (await api.request("GET", "/retry-policies")).json["items"]
    ]
    assert sorted(SERVICE_PRESETS) == sorted(names)
    endless = {"maxAttempts": 100_000, "totalBudgetMs": None}
    response = await api.request("POST", "/policy-schedules", endless)
    assert (50, 99_999, None) == (
        len(response.json["retries"]),
        response.json["maxRetries"],
        response.json["averageRetries"],
    )
    invalid = await api.request("POST", "/policy-schedules", {"initialDelayMs": -1})
    assert (422, "initialDelayMs") == (invalid.status, invalid.problem["field"])
