from __future__ import annotations

from typing import Any

import pytest

from tarry.wire.policies import SERVICE_PRESETS
from tests.service.api.harness import NOW, TARGET, Rig, with_rig


def test_a_policy_is_registered_once() -> None:
    """201, then 200 for the same however it is written, and 409 for another."""

    async def test(rig: Rig) -> None:
        asked = {"policyId": "mine", "maxAttempts": 7, "totalBudgetMs": 60_000}
        first = await rig.ask("POST", "/retry-policies", asked)
        assert (201, "/retry-policies/mine") == (first.status, first.header("location"))
        told = first.json
        assert ("mine", 1, NOW, 7, 60_000) == (
            told["policyId"],
            told["version"],
            told["createdAt"],
            told["maxAttempts"],
            told["totalBudgetMs"],
        )
        same = {"totalBudgetMs": 60_000.0, "maxAttempts": 7, "multiplier": 2, "policyId": "mine"}
        again = await rig.ask("POST", "/retry-policies", same)
        assert (200, told) == (again.status, again.json)
        other = await rig.ask("POST", "/retry-policies", {**asked, "maxAttempts": 8})
        assert (409, "policyId") == (other.status, other.problem["field"])

    with_rig(test)


def test_a_new_version_is_used_from_now_on() -> None:
    """PUT makes one, unless nothing changed; old ones can still be read."""

    async def test(rig: Rig) -> None:
        path = "/retry-policies/mine"
        first = await rig.ask("PUT", path, {"maxAttempts": 2})
        second = await rig.ask("PUT", path, {"maxAttempts": 3, "policyId": "mine"})
        same = await rig.ask("PUT", path, {"maxAttempts": 3})
        assert [201, 200, 200] == [first.status, second.status, same.status]
        assert [1, 2, 2] == [one.json["version"] for one in (first, second, same)]
        assert 3 == (await rig.ask("GET", path)).json["maxAttempts"]
        assert 2 == (await rig.ask("GET", f"{path}?version=1")).json["maxAttempts"]
        assert 404 == (await rig.ask("GET", f"{path}?version=9")).status
        chosen = await rig.engine.policies.read("default", "mine")
        assert chosen is not None
        assert 3 == chosen.policy.max_attempts

    with_rig(test)


def test_a_change_reaches_the_next_task() -> None:
    """What this process knew of a policy is forgotten when it changes."""

    async def test(rig: Rig) -> None:
        await rig.ask("PUT", "/retry-policies/mine", {})
        await rig.create(policyId="mine")
        await rig.ask("DELETE", f"/retry-tasks/{(await rig.create(policyId='mine'))['taskId']}")
        assert 409 == (await rig.ask("DELETE", "/retry-policies/mine")).status
        await rig.die()
        assert 204 == (await rig.ask("DELETE", "/retry-policies/mine")).status
        refused = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": "https://a.b/", "policyId": "mine"}
        )
        assert "policyId" == refused.problem["field"]

    with_rig(test)


def test_the_presets_are_listed_after_ones_own() -> None:
    """In pages, each once; one that the tenant laid his own over is only that."""

    async def test(rig: Rig) -> None:
        await rig.ask("PUT", "/retry-policies/zebra", {})
        await rig.ask("PUT", "/retry-policies/webhook", {"maxAttempts": 2})
        expected: list[Any] = [("webhook", 1), ("zebra", 1)]
        expected += [(name, None) for name in sorted(SERVICE_PRESETS) if name != "webhook"]
        for limit in (1, 2, 3, 100):
            found: list[Any] = []
            cursor = ""
            while cursor is not None:
                page = (await rig.ask("GET", f"/retry-policies?limit={limit}{cursor}")).json
                assert len(page["items"]) <= limit
                found += [(one["policyId"], one["version"]) for one in page["items"]]
                cursor = page["nextCursor"] and f"&cursor={page['nextCursor']}"
            assert expected == found

    with_rig(test)


def test_a_preset_can_be_laid_over_and_comes_back() -> None:
    """It cannot be deleted itself."""

    async def test(rig: Rig) -> None:
        path = "/retry-policies/default"
        preset = (await rig.ask("GET", path)).json
        assert (None, 5) == (preset["version"], preset["maxAttempts"])
        assert 409 == (await rig.ask("DELETE", path)).status
        await rig.ask("PUT", path, {"maxAttempts": 2})
        assert 2 == (await rig.ask("GET", path)).json["maxAttempts"]
        assert 204 == (await rig.ask("DELETE", path)).status
        assert 5 == (await rig.ask("GET", path)).json["maxAttempts"]

    with_rig(test)


def test_what_helps_while_tasks_use_a_policy_is_said() -> None:
    """Which tasks they are and, for the service's own, how to have that again at once."""

    async def test(rig: Rig) -> None:
        path = "/retry-policies/default"
        preset = (await rig.ask("GET", path)).json
        await rig.ask("PUT", path, {"maxAttempts": 2})
        await rig.create()
        detail = (await rig.ask("DELETE", path)).problem["detail"]
        assert "GET /retry-tasks?policyId=default" in detail
        assert "PUT /retry-policies/default with {}" in detail
        again = (await rig.ask("PUT", path, {})).json
        assert {**preset, "version": 2, "createdAt": NOW} == again

    with_rig(test)


def test_a_version_that_there_is_not_is_told_those_that_there_are() -> None:
    """When a task pins it, and when it is looked at."""

    async def test(rig: Rig) -> None:
        for attempts in (2, 3):
            await rig.ask("PUT", "/retry-policies/mine", {"maxAttempts": attempts})
        versions = "the newest version of mine is 2"
        task = {"targetUrl": TARGET, "policyId": "mine", "policyVersion": 9}
        refused = await rig.ask("POST", "/retry-tasks", task)
        assert (f"policyVersion must exist: {versions}, got 9.", "policyVersion") == (
            refused.problem["detail"],
            refused.problem["field"],
        )
        looked_at = await rig.ask("GET", "/retry-policies/mine?version=9")
        assert (404, f"Version 9 does not exist: {versions}.") == (
            looked_at.status,
            looked_at.problem["detail"],
        )

    with_rig(test)


def test_a_schedule_is_told_as_one() -> None:
    """The list of delays goes in and comes out."""

    async def test(rig: Rig) -> None:
        asked = {"backoffType": "SCHEDULE", "scheduleMs": [1000, 5000]}
        reply = await rig.ask("PUT", "/retry-policies/steps", asked)
        assert ("SCHEDULE", [1000, 5000]) == (
            reply.json["backoffType"],
            reply.json["scheduleMs"],
        )

    with_rig(test)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "policyId"),
        ({"policyId": 5}, "policyId"),
        ({"policyId": "a/b"}, "policyId"),
        ({"policyId": "x" * 101}, "policyId"),
        ({"policyId": "a", "maxAttempts": 0}, "maxAttempts"),
        ({"policyId": "a", "maxDelayMs": 1, "initialDelayMs": 2}, "maxDelayMs"),
        ({"policyId": "a", "retryableStatusCodes": "503"}, "retryableStatusCodes"),
        ({"policyId": "a", "attemptTimeoutMs": 10**9}, "attemptTimeoutMs"),
        ({"policyId": "a", "version": 3}, "version"),
        ({"policyId": "a", "jitter": "FULL"}, "jitter"),
    ],
)
def test_a_bad_policy_is_refused_by_its_field(fields: dict[str, object], field: str) -> None:
    """422, and nothing is stored."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/retry-policies", fields)
        assert (422, field) == (reply.status, reply.problem["field"])
        assert [] == (await rig.store.list_policies("default")).items

    with_rig(test)


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/retry-policies/a", {"policyId": "b"}, "policyId"),
        ("/retry-policies/%20", {}, "policyId"),
        ("/retry-policies/a", {"maxAttempts": None}, "maxAttempts"),
    ],
)
def test_a_bad_version_is_refused_by_its_field(
    path: str, fields: dict[str, object], field: str
) -> None:
    """422, and nothing is stored."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("PUT", path, fields)
        assert (422, field) == (reply.status, reply.problem["field"])
        assert [] == (await rig.store.list_policies("default")).items

    with_rig(test)


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff"])
def test_what_is_no_policy_is_refused(body: bytes) -> None:
    """400 or 422, as for tasks."""

    async def test(rig: Rig) -> None:
        assert (await rig.ask("POST", "/retry-policies", body=body)).status in {400, 422}

    with_rig(test)


def test_a_policy_that_is_not_there() -> None:
    """404 to look at it and to delete it."""

    async def test(rig: Rig) -> None:
        assert 404 == (await rig.ask("GET", "/retry-policies/x")).status
        assert 404 == (await rig.ask("DELETE", "/retry-policies/x")).status

    with_rig(test)
