"""`/retry-tasks`: read, list, cancel and retry tasks."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.fernet import Fernet

from tarry.service.encryption import Codec
from tarry.service.model import AttemptRecord, Decision, Status
from tarry.service.store import TaskResult
from tests.service.api.harness import NOW, TARGET, ApiHarness, run_with_api

NOBODY = "01890000-0000-7000-8000-0000000000ff"


async def read_all_pages(api: ApiHarness, path: str) -> list[list[Any]]:
    """Follow the cursor to the last page."""
    found: list[list[Any]] = []
    cursor = ""
    while True:
        page = (await api.request("GET", path + cursor)).json
        found.append(page["items"])
        if page["nextCursor"] is None:
            return found
        cursor = f"&cursor={page['nextCursor']}"


async def fail_once(api: ApiHarness, task_id: str, excerpt: str | None = None) -> None:
    """Finish the first attempt of a task as failed; its second attempt is pending."""
    (task,) = [task for task in await api.lease_due_tasks() if task.id == task_id]
    decision = Decision(
        action="wait",
        delay_ms=800.0,
        ceiling_ms=1000.0,
        jitter="full",
        hint_ms=500.0,
        hint_source="retry-after",
        budget=3.0,
        breaker="closed",
    )
    attempt = AttemptRecord(
        number=1,
        scheduled_at=NOW,
        started_at=NOW,
        duration_ms=12.5,
        status=503,
        outcome="transient",
        decision=decision,
        excerpt=excerpt,
        truncated=True,
        remote="93.184.216.34",
        worker="w",
    )
    await api.store.finish([
        TaskResult(task=task, attempt=attempt, status=Status.PENDING, next_attempt_at=NOW + 800)
    ])  # fmt: skip


def test_reading_a_task() -> None:
    """The response equals that of its creation."""

    async def test(api: ApiHarness) -> None:
        task = await api.create(idempotencyKey="k")
        assert task == (await api.request("GET", f"/retry-tasks/{task['taskId']}")).json

    run_with_api(test)


@pytest.mark.parametrize("task_id", [NOBODY, "x", "%00", "01890000-0000-7000-8000-00000000000G"])
@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/attempts"),
        ("GET", "/explain"),
        ("POST", "/retry"),
    ],
)
def test_an_unknown_task_is_404(task_id: str, method: str, rest: str) -> None:
    """For an unknown and for a malformed id."""

    async def test(api: ApiHarness) -> None:
        await api.create()
        assert 404 == (await api.request(method, f"/retry-tasks/{task_id}{rest}")).status

    run_with_api(test)


def test_tasks_are_listed_in_pages_newest_first() -> None:
    """Each task once; the last page has no cursor."""

    async def test(api: ApiHarness) -> None:
        made = [(await api.create())["taskId"] for _ in range(5)]
        found = await read_all_pages(api, "/retry-tasks?limit=2")
        assert made[::-1] == [task["taskId"] for page in found for task in page]
        assert all(len(page) <= 2 for page in found)

    run_with_api(test)


def test_filters() -> None:
    """By status, policy and lane, and combined."""

    async def test(api: ApiHarness) -> None:
        first = await api.create(policyId="webhook")
        await api.request("DELETE", f"/retry-tasks/{first['taskId']}")
        second = await api.create(targetUrl="https://example.org/x")
        third = await api.create(policyId="webhook")

        async def ids(query: str) -> list[str]:
            response = await api.request("GET", f"/retry-tasks?{query}")
            return [task["taskId"] for task in response.json["items"]]

        assert [first["taskId"]] == await ids("status=CANCELLED")
        assert [third["taskId"], second["taskId"]] == await ids("status=PENDING")
        assert [third["taskId"], first["taskId"]] == await ids("policyId=webhook")
        assert [second["taskId"]] == await ids("lane=https:example.org:443")
        assert [third["taskId"]] == await ids("policyId=webhook&status=PENDING")
        assert [] == await ids("lane=https:nobody:443")

    run_with_api(test)


def test_cancelling() -> None:
    """200 without a running attempt, 202 with one, 409 for a finished task."""

    async def test(api: ApiHarness) -> None:
        waiting = await api.create(delayMs=60_000)
        response = await api.request("DELETE", f"/retry-tasks/{waiting['taskId']}")
        assert (200, "CANCELLED", None) == (
            response.status,
            response.json["status"],
            response.json["nextAttemptAt"],
        )
        again = await api.request("DELETE", f"/retry-tasks/{waiting['taskId']}")
        assert (409, "CANCELLED") == (again.status, again.problem["taskStatus"])
        running = await api.create()
        await api.lease_due_tasks()
        response = await api.request("DELETE", f"/retry-tasks/{running['taskId']}")
        assert (202, "IN_FLIGHT", True) == (
            response.status,
            response.json["status"],
            response.json["cancelling"],
        )

    run_with_api(test)


def test_retrying_now() -> None:
    """200 and due; 202 while an attempt runs; 409 if it succeeded or was cancelled."""

    async def test(api: ApiHarness) -> None:
        path = f"/retry-tasks/{(await api.create(delayMs=60_000))['taskId']}"
        now = await api.request("POST", f"{path}/retry")
        assert (200, NOW) == (now.status, now.json["nextAttemptAt"])
        await api.lease_due_tasks()
        assert 202 == (await api.request("POST", f"{path}/retry")).status
        dead = f"/retry-tasks/{(await api.create())['taskId']}"
        await api.exhaust_due_tasks()
        anew = await api.request("POST", f"{dead}/retry")
        assert (200, "PENDING", 1) == (anew.status, anew.json["status"], anew.json["replays"])
        await api.request("DELETE", dead)
        assert 409 == (await api.request("POST", f"{dead}/retry")).status

    run_with_api(test)


def test_a_task_that_is_being_cancelled_is_not_retried() -> None:
    """409: its running attempt is the last one. A finished task is not `cancelling`."""

    async def test(api: ApiHarness) -> None:
        path = f"/retry-tasks/{(await api.create())['taskId']}"
        (leased,) = await api.lease_due_tasks()
        await api.request("DELETE", path)
        response = await api.request("POST", f"{path}/retry")
        assert (409, "IN_FLIGHT") == (response.status, response.problem["taskStatus"])
        assert "being cancelled" in response.problem["detail"]
        await api.store.finish([TaskResult(task=leased, attempt=None, status=Status.PENDING)])
        ended = (await api.request("GET", path)).json
        assert ("CANCELLED", False) == (ended["status"], ended["cancelling"])

    run_with_api(test)


def test_a_task_leased_early_is_still_pending() -> None:
    """Until its attempt is due."""

    async def test(api: ApiHarness) -> None:
        path = f"/retry-tasks/{(await api.create(delayMs=500))['taskId']}"
        await api.lease_due_tasks()
        assert "PENDING" == (await api.request("GET", path)).json["status"]
        api.time.ms += 500
        assert "IN_FLIGHT" == (await api.request("GET", path)).json["status"]

    run_with_api(test)


def test_the_attempt_log() -> None:
    """Phases, outcome, and the decision with its reasons; every field is present."""

    async def test(api: ApiHarness) -> None:
        task_id = (await api.create())["taskId"]
        await fail_once(api, task_id, excerpt="busy")
        response = await api.request("GET", f"/retry-tasks/{task_id}/attempts")
        expected = {
            "taskId": task_id,
            "attemptNumber": 1,
            "scheduledAt": NOW,
            "startedAt": NOW,
            "durationMs": 12.5,
            "dnsMs": None,
            "connectMs": None,
            "tlsMs": None,
            "firstByteMs": None,
            "remoteAddress": "93.184.216.34",
            "responseStatus": 503,
            "errorMessage": None,
            "errorClass": None,
            "outcome": "transient",
            "decision": {
                "action": "wait",
                "reason": None,
                "delayMs": 800.0,
                "ceilingMs": 1000.0,
                "jitter": "full",
                "hintMs": 500.0,
                "hintSource": "retry-after",
                "policyVersion": None,
                "budget": 3.0,
                "breaker": "closed",
            },
            "responseExcerpt": "busy",
            "responseTruncated": True,
            "worker": "w",
        }
        assert {"items": [expected], "nextCursor": None} == response.json

    run_with_api(test)


def test_the_attempt_log_is_paged() -> None:
    """Each attempt once, in order."""

    async def test(api: ApiHarness) -> None:
        task_id = (await api.create())["taskId"]
        for _ in range(3):
            await api.exhaust_due_tasks()
            await api.request("POST", f"/retry-tasks/{task_id}/retry")
        found = await read_all_pages(api, f"/retry-tasks/{task_id}/attempts?limit=1")
        assert [[1], [2], [3]] == [[one["attemptNumber"] for one in page] for page in found]
        bad = await api.request("GET", f"/retry-tasks/{task_id}/attempts?cursor=x")
        assert "cursor" == bad.problem["field"]

    run_with_api(test)


def test_secrets_are_redacted_in_every_response() -> None:
    """In tasks, lists, dead letters and texts of the target."""

    async def test(api: ApiHarness) -> None:
        task = await api.create(
            targetUrl="https://example.com/hook?user=7&api_key=sesame-one",
            headers={"Authorization": "Bearer sesame-two", "X-Plain": "shown"},
            callbackUrl="https://example.com/done?token=sesame-three",
        )
        path = f"/retry-tasks/{task['taskId']}"
        assert "https://example.com/hook?user=7&api_key=[redacted]" == task["targetUrl"]
        assert {"Authorization": "[redacted]", "X-Plain": "shown"} == task["headers"]
        await api.exhaust_due_tasks(excerpt="bad credentials: sesame-two for sesame-one")
        for place in ("/retry-tasks", path, f"{path}/attempts", f"{path}/explain", "/dead-letters"):
            response = await api.request("GET", place)
            assert 200 == response.status
            assert b"sesame" not in response.body
        _, content = await api.stored_task(task["taskId"])
        assert "Bearer sesame-two" == content.headers["Authorization"]  # it is sent all the same

    run_with_api(test)


def test_a_task_that_cannot_be_decrypted_can_be_read_and_cancelled() -> None:
    """Without its content and text of its target, which may contain secrets."""

    async def test(api: ApiHarness) -> None:
        shown = (await api.create(delayMs=1))["taskId"]
        api.codec.pack = Codec([Fernet.generate_key().decode()]).pack  # type: ignore[method-assign]
        headers = {"Authorization": "Bearer sesame-two"}
        sealed = (await api.create(headers=headers, idempotencyKey="k"))["taskId"]
        path = f"/retry-tasks/{sealed}"
        await fail_once(api, sealed, excerpt="no sesame-two here")
        listed = (await api.request("GET", "/retry-tasks")).json["items"]
        assert [(sealed, "[encrypted]", {}), (shown, TARGET, {})] == [
            (one["taskId"], one["targetUrl"], one["headers"]) for one in listed
        ]
        attempts = (await api.request("GET", f"{path}/attempts")).json["items"]
        assert "[redacted]" == attempts[0]["responseExcerpt"]
        assert "attempt 1 got 503" in (await api.request("GET", f"{path}/explain")).json["text"]
        assert "CANCELLED" == (await api.request("DELETE", path)).json["status"]

    run_with_api(test)


def test_explaining_a_task() -> None:
    """Each attempt and decision, and the next step with its time."""

    async def test(api: ApiHarness) -> None:
        task_id = (await api.create(policy={"maxAttempts": 2, "jitterType": "EQUAL"}))["taskId"]
        await fail_once(api, task_id)
        returned = (await api.request("GET", f"/retry-tasks/{task_id}/explain")).json
        assert (
            "attempt 1 got 503; waits 800 ms (ceiling 1 s, full jitter, retry-after asked for "
            "500 ms). Attempt 2 of 2 is due in 800 ms."
        ) == returned["text"]
        assert {"text": "Attempt 2 of 2 is due in 800 ms.", "at": NOW + 800} == returned["next"]
        assert [1] == [step["attempt"]["attemptNumber"] for step in returned["steps"]]

    run_with_api(test)
