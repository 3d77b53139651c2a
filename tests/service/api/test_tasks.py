from __future__ import annotations

from typing import Any

import pytest
from cryptography.fernet import Fernet

from tarry.service.encryption import EncryptedCodec
from tarry.service.model import AttemptRecord, Decision, Status
from tarry.service.store import TaskResult
from tests.service.api.harness import NOW, TARGET, Rig, with_rig

NOBODY = "01890000-0000-7000-8000-0000000000ff"


async def pages(rig: Rig, path: str) -> list[list[Any]]:
    """Follow the cursor to the end."""
    found: list[list[Any]] = []
    cursor = ""
    while True:
        page = (await rig.ask("GET", path + cursor)).json
        found.append(page["items"])
        if page["nextCursor"] is None:
            return found
        cursor = f"&cursor={page['nextCursor']}"


async def wait_once(rig: Rig, task_id: str, excerpt: str | None = None) -> None:
    """Let a task fail once and wait for its second attempt."""
    (task,) = [task for task in await rig.lease() if task.id == task_id]
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
    await rig.store.finish([
        TaskResult(task=task, attempt=attempt, status=Status.PENDING, next_attempt_at=NOW + 800)
    ])  # fmt: skip


def test_a_task_can_be_looked_at() -> None:
    """What was answered at first is what is told later."""

    async def test(rig: Rig) -> None:
        task = await rig.create(idempotencyKey="k")
        assert task == (await rig.ask("GET", f"/retry-tasks/{task['taskId']}")).json

    with_rig(test)


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
def test_a_task_that_is_not_there(task_id: str, method: str, rest: str) -> None:
    """404 for an id that is unknown or malformed."""

    async def test(rig: Rig) -> None:
        await rig.create()
        assert 404 == (await rig.ask(method, f"/retry-tasks/{task_id}{rest}")).status

    with_rig(test)


def test_tasks_are_listed_in_pages_newest_first() -> None:
    """Every task once, and null at the end."""

    async def test(rig: Rig) -> None:
        made = [(await rig.create())["taskId"] for _ in range(5)]
        found = await pages(rig, "/retry-tasks?limit=2")
        assert made[::-1] == [task["taskId"] for page in found for task in page]
        assert all(len(page) <= 2 for page in found)

    with_rig(test)


def test_a_list_can_be_narrowed() -> None:
    """By status, policy and lane, and all of them."""

    async def test(rig: Rig) -> None:
        first = await rig.create(policyId="webhook")
        await rig.ask("DELETE", f"/retry-tasks/{first['taskId']}")
        second = await rig.create(targetUrl="https://example.org/x")
        third = await rig.create(policyId="webhook")

        async def ids(query: str) -> list[str]:
            reply = await rig.ask("GET", f"/retry-tasks?{query}")
            return [task["taskId"] for task in reply.json["items"]]

        assert [first["taskId"]] == await ids("status=CANCELLED")
        assert [third["taskId"], second["taskId"]] == await ids("status=PENDING")
        assert [third["taskId"], first["taskId"]] == await ids("policyId=webhook")
        assert [second["taskId"]] == await ids("lane=https:example.org:443")
        assert [third["taskId"]] == await ids("policyId=webhook&status=PENDING")
        assert [] == await ids("lane=https:nobody:443")

    with_rig(test)


def test_cancelling() -> None:
    """200 while no attempt runs, 202 while one may, 409 when it has ended."""

    async def test(rig: Rig) -> None:
        waiting = await rig.create(delayMs=60_000)
        reply = await rig.ask("DELETE", f"/retry-tasks/{waiting['taskId']}")
        assert (200, "CANCELLED", None) == (
            reply.status,
            reply.json["status"],
            reply.json["nextAttemptAt"],
        )
        again = await rig.ask("DELETE", f"/retry-tasks/{waiting['taskId']}")
        assert (409, "CANCELLED") == (again.status, again.problem["taskStatus"])
        running = await rig.create()
        await rig.lease()
        reply = await rig.ask("DELETE", f"/retry-tasks/{running['taskId']}")
        assert (202, "IN_FLIGHT", True) == (
            reply.status,
            reply.json["status"],
            reply.json["cancelling"],
        )

    with_rig(test)


def test_retrying_now() -> None:
    """200 and due; 202 while an attempt runs; 409 when it has succeeded or was cancelled."""

    async def test(rig: Rig) -> None:
        path = f"/retry-tasks/{(await rig.create(delayMs=60_000))['taskId']}"
        now = await rig.ask("POST", f"{path}/retry")
        assert (200, NOW) == (now.status, now.json["nextAttemptAt"])
        await rig.lease()
        assert 202 == (await rig.ask("POST", f"{path}/retry")).status
        dead = f"/retry-tasks/{(await rig.create())['taskId']}"
        await rig.die()
        anew = await rig.ask("POST", f"{dead}/retry")
        assert (200, "PENDING", 1) == (anew.status, anew.json["status"], anew.json["replays"])
        await rig.ask("DELETE", dead)
        assert 409 == (await rig.ask("POST", f"{dead}/retry")).status

    with_rig(test)


def test_a_task_that_is_being_cancelled_is_not_retried() -> None:
    """409: its attempt may finish, and none follows. When it has ended it is not ending."""

    async def test(rig: Rig) -> None:
        path = f"/retry-tasks/{(await rig.create())['taskId']}"
        (leased,) = await rig.lease()
        await rig.ask("DELETE", path)
        reply = await rig.ask("POST", f"{path}/retry")
        assert (409, "IN_FLIGHT") == (reply.status, reply.problem["taskStatus"])
        assert "being cancelled" in reply.problem["detail"]
        await rig.store.finish([TaskResult(task=leased, attempt=None, status=Status.PENDING)])
        ended = (await rig.ask("GET", path)).json
        assert ("CANCELLED", False) == (ended["status"], ended["cancelling"])

    with_rig(test)


def test_a_lease_ahead_of_its_time_is_no_attempt_yet() -> None:
    """People see PENDING until the attempt is due."""

    async def test(rig: Rig) -> None:
        path = f"/retry-tasks/{(await rig.create(delayMs=500))['taskId']}"
        await rig.lease()
        assert "PENDING" == (await rig.ask("GET", path)).json["status"]
        rig.time.ms += 500
        assert "IN_FLIGHT" == (await rig.ask("GET", path)).json["status"]

    with_rig(test)


def test_the_attempt_log_in_the_words_of_the_api() -> None:
    """Phases, outcome, and the decision with its reasons; every field is there."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        await wait_once(rig, task_id, excerpt="busy")
        reply = await rig.ask("GET", f"/retry-tasks/{task_id}/attempts")
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
        assert {"items": [expected], "nextCursor": None} == reply.json

    with_rig(test)


def test_the_attempt_log_comes_in_pages() -> None:
    """Each attempt once, in order."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        for _ in range(3):
            await rig.die()
            await rig.ask("POST", f"/retry-tasks/{task_id}/retry")
        found = await pages(rig, f"/retry-tasks/{task_id}/attempts?limit=1")
        assert [[1], [2], [3]] == [[one["attemptNumber"] for one in page] for page in found]
        bad = await rig.ask("GET", f"/retry-tasks/{task_id}/attempts?cursor=x")
        assert "cursor" == bad.problem["field"]

    with_rig(test)


def test_secrets_are_redacted_wherever_a_task_is_told() -> None:
    """In answers, lists, dead letters and in what a target echoes."""

    async def test(rig: Rig) -> None:
        task = await rig.create(
            targetUrl="https://example.com/hook?user=7&api_key=sesame-one",
            headers={"Authorization": "Bearer sesame-two", "X-Plain": "shown"},
            callbackUrl="https://example.com/done?token=sesame-three",
        )
        path = f"/retry-tasks/{task['taskId']}"
        assert "https://example.com/hook?user=7&api_key=[redacted]" == task["targetUrl"]
        assert {"Authorization": "[redacted]", "X-Plain": "shown"} == task["headers"]
        await rig.die(excerpt="bad credentials: sesame-two for sesame-one")
        for place in ("/retry-tasks", path, f"{path}/attempts", f"{path}/explain", "/dead-letters"):
            reply = await rig.ask("GET", place)
            assert 200 == reply.status
            assert b"sesame" not in reply.body
        _, content = await rig.stored(task["taskId"])
        assert "Bearer sesame-two" == content.headers["Authorization"]  # it is sent all the same

    with_rig(test)


def test_a_task_whose_key_is_gone_can_still_be_looked_at_and_cancelled() -> None:
    """Its content is left out, and what its target wrote, for nobody knows what is secret there."""

    async def test(rig: Rig) -> None:
        shown = (await rig.create(delayMs=1))["taskId"]
        rig.codec.pack = EncryptedCodec([Fernet.generate_key().decode()]).pack  # type: ignore[method-assign]
        headers = {"Authorization": "Bearer sesame-two"}
        sealed = (await rig.create(headers=headers, idempotencyKey="k"))["taskId"]
        path = f"/retry-tasks/{sealed}"
        await wait_once(rig, sealed, excerpt="no sesame-two here")
        listed = (await rig.ask("GET", "/retry-tasks")).json["items"]
        assert [(sealed, "[encrypted]", {}), (shown, TARGET, {})] == [
            (one["taskId"], one["targetUrl"], one["headers"]) for one in listed
        ]
        attempts = (await rig.ask("GET", f"{path}/attempts")).json["items"]
        assert "[redacted]" == attempts[0]["responseExcerpt"]
        assert "attempt 1 got 503" in (await rig.ask("GET", f"{path}/explain")).json["text"]
        assert "CANCELLED" == (await rig.ask("DELETE", path)).json["status"]

    with_rig(test)


def test_a_task_is_explained() -> None:
    """Each attempt and what followed, and what comes next and when."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create(policy={"maxAttempts": 2, "jitterType": "EQUAL"}))["taskId"]
        await wait_once(rig, task_id)
        told = (await rig.ask("GET", f"/retry-tasks/{task_id}/explain")).json
        assert (
            "attempt 1 got 503; waits 800 ms (ceiling 1 s, full jitter, retry-after asked for "
            "500 ms). Attempt 2 of 2 is due in 800 ms."
        ) == told["text"]
        assert {"text": "Attempt 2 of 2 is due in 800 ms.", "at": NOW + 800} == told["next"]
        assert [1] == [step["attempt"]["attemptNumber"] for step in told["steps"]]

    with_rig(test)
