"""`/retry-tasks`: read, list, cancel and retry tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cryptography.fernet import Fernet

from tarry.service.encryption import Codec
from tarry.service.model import AttemptRecord, DecisionRecord, Status
from tarry.service.store import TaskResult
from tests.service.api.harness import NOW, TARGET, ApiHarness

UNKNOWN_ID = "01890000-0000-7000-8000-0000000000ff"


async def read_all_pages(api: ApiHarness, path: str) -> list[list[Any]]:
    """Return the items of all pages."""
    pages: list[list[Any]] = []
    cursor = ""
    while True:
        page = (await api.request("GET", path + cursor)).json
        pages.append(page["items"])
        if page["nextCursor"] is None:
            return pages
        cursor = f"&cursor={page['nextCursor']}"


async def fail_once(api: ApiHarness, task_id: str, excerpt: str | None = None) -> None:
    """Finish the first attempt of a task as failed; its second attempt is pending."""
    (task,) = [task for task in await api.lease_due_tasks() if task.id == task_id]
    decision = DecisionRecord(
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
        attempt_number=1,
        scheduled_at=NOW,
        started_at=NOW,
        duration_ms=12.5,
        response_status=503,
        outcome="transient",
        decision=decision,
        response_excerpt=excerpt,
        response_truncated=True,
        remote_address="93.184.216.34",
        worker="host-7-w",
    )
    await api.store.finish([
        TaskResult(task=task, attempt=attempt, status=Status.PENDING, next_attempt_at=NOW + 800)
    ])  # fmt: skip


async def test_a_task_can_be_read(api: ApiHarness) -> None:
    """GET returns the same task as the POST that created it."""
    task = await api.create(idempotencyKey="k")
    assert task == (await api.request("GET", f"/retry-tasks/{task['taskId']}")).json


@pytest.mark.parametrize(
    "task_id", [UNKNOWN_ID, "x", "%00", "01890000-0000-7000-8000-00000000000G"]
)
@pytest.mark.parametrize(
    ("method", "suffix"),
    [("GET", ""), ("DELETE", ""), ("GET", "/attempts"), ("GET", "/explain"), ("POST", "/retry")],
)
async def test_an_unknown_task_is_404(
    api: ApiHarness, task_id: str, method: str, suffix: str
) -> None:
    """An unknown or malformed id returns 404 for all operations."""
    await api.create()
    assert 404 == (await api.request(method, f"/retry-tasks/{task_id}{suffix}")).status


async def test_tasks_are_listed_in_pages_newest_first(api: ApiHarness) -> None:
    """All pages together contain each task once."""
    created = [(await api.create())["taskId"] for _ in range(5)]
    pages = await read_all_pages(api, "/retry-tasks?limit=2")
    assert created[::-1] == [task["taskId"] for page in pages for task in page]
    assert all(len(page) <= 2 for page in pages)


async def test_tasks_can_be_filtered(api: ApiHarness) -> None:
    """Filters for status, policy and lane can be combined."""
    first = await api.create(policyId="webhook")
    await api.request("DELETE", f"/retry-tasks/{first['taskId']}")
    second = await api.create(targetUrl="https://example.org/x")
    third = await api.create(policyId="webhook")

    async def list_ids(query: str) -> list[str]:
        response = await api.request("GET", f"/retry-tasks?{query}")
        return [task["taskId"] for task in response.json["items"]]

    assert [first["taskId"]] == await list_ids("status=CANCELLED")
    assert [third["taskId"], second["taskId"]] == await list_ids("status=PENDING")
    assert [third["taskId"], first["taskId"]] == await list_ids("policyId=webhook")
    assert [second["taskId"]] == await list_ids("lane=https:example.org:443")
    assert [third["taskId"]] == await list_ids("policyId=webhook&status=PENDING")
    assert [] == await list_ids("lane=https:unknown:443")


async def test_a_list_has_the_last_result_of_each_task(api: ApiHarness) -> None:
    """Status, error and time of the last attempt are in lists; the error has no secrets."""
    await api.create(headers={"Authorization": "Bearer sesame-two"})
    (leased,) = await api.lease_due_tasks()
    attempt = AttemptRecord(
        attempt_number=1,
        scheduled_at=NOW,
        started_at=NOW + 5,
        outcome="transient",
        error_class="tls",
        error_message="certificate of sesame-two",
    )
    await api.store.finish([
        TaskResult(task=leased, attempt=attempt, status=Status.EXHAUSTED, reason="attempts")
    ])  # fmt: skip
    second = await api.create()
    await fail_once(api, second["taskId"])
    third = await api.create()
    items = (await api.request("GET", "/retry-tasks")).json["items"]
    assert third == items[0]
    assert [
        (None, None, None),
        (503, None, NOW),
        (None, "tls: certificate of [redacted]", NOW + 5),
    ] == [(task["lastStatus"], task["lastError"], task["lastAttemptAt"]) for task in items]


@pytest.mark.parametrize("wait", [None, "wait=5"])
async def test_a_single_task_has_its_last_result(api: ApiHarness, wait: str | None) -> None:
    """A dead letter without a response has its cause in its own response, without secrets."""
    headers = {"Authorization": "Bearer sesame-two"}
    task = await api.create(headers=headers, idempotencyKey="k")
    (leased,) = await api.lease_due_tasks()
    attempt = AttemptRecord(
        attempt_number=1,
        scheduled_at=NOW,
        started_at=NOW + 5,
        outcome="transient",
        error_class="tls",
        error_message="certificate of sesame-two",
    )
    await api.store.finish([
        TaskResult(task=leased, attempt=attempt, status=Status.EXHAUSTED, reason="attempts")
    ])  # fmt: skip
    prefer = {} if wait is None else {"Prefer": wait}
    path = f"/retry-tasks/{task['taskId']}"
    responses = [await api.request("GET", path, headers=prefer)]
    if wait is not None:
        body = {"targetUrl": TARGET, "headers": headers, "idempotencyKey": "k"}
        responses.append(await api.request("POST", "/retry-tasks", body, headers=prefer))
    responses.append(await api.request("POST", f"{path}/retry"))
    responses.append(await api.request("DELETE", path))
    for response in responses:
        assert 200 == response.status
        fields = ("lastStatus", "lastError", "lastAttemptAt")
        expected = (None, "tls: certificate of [redacted]", NOW + 5)
        assert expected == tuple(response.json[field] for field in fields)


async def test_a_task_without_attempts_is_read_without_its_last_attempt(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single read of the store is enough for a task that no attempt was made for."""
    monkeypatch.delattr(type(api.store), "last_attempts")
    task = await api.create()
    assert 200 == (await api.request("GET", f"/retry-tasks/{task['taskId']}")).status


async def test_the_status_of_a_cancel_depends_on_the_task(api: ApiHarness) -> None:
    """A pending task gets a 200, a task with a running attempt 202, a finished task 409."""
    waiting = await api.create(delayMs=60_000)
    response = await api.request("DELETE", f"/retry-tasks/{waiting['taskId']}")
    assert (200, "CANCELLED", None) == (
        response.status,
        response.json["status"],
        response.json["nextAttemptAt"],
    )
    repeated = await api.request("DELETE", f"/retry-tasks/{waiting['taskId']}")
    assert (409, "CANCELLED") == (repeated.status, repeated.problem["taskStatus"])
    running = await api.create()
    await api.lease_due_tasks()
    response = await api.request("DELETE", f"/retry-tasks/{running['taskId']}")
    assert (202, "IN_FLIGHT", True) == (
        response.status,
        response.json["status"],
        response.json["cancelling"],
    )


async def test_matching_tasks_are_cancelled(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished tasks that match the filter are cancelled, in parts; a dry run counts them."""
    monkeypatch.setattr("tarry.service.api.tasks._CANCEL_CHUNK_TASKS", 2)
    monkeypatch.setattr("tarry.service.api.tasks._MAX_CANCEL_CHUNKS", 2)

    await api.create(targetUrl="https://example.com/orders/dead")
    await api.exhaust_due_tasks()
    await api.create(targetUrl="https://example.com/orders/running")
    await api.lease_due_tasks()
    for number in range(5):
        await api.create(targetUrl=f"https://example.com/orders/{number}")
    await api.create(targetUrl="https://example.com/users")
    document = {"filter": {"urlPrefix": "https://example.com/orders"}}

    async def cancel(**fields: Any) -> Any:
        response = await api.request("POST", "/retry-tasks/cancellations", {**document, **fields})
        assert 200 == response.status, response.body
        return response.json

    nothing = {"cancelled": 0, "running": 0, "nextCursor": None}
    assert {"matched": 6, **nothing} == await cancel(dryRun=True)
    first = await cancel()
    assert (4, 3, 1) == (first["matched"], first["cancelled"], first["running"])
    second = await cancel(cursor=first["nextCursor"])
    assert {"matched": 2, "cancelled": 2, "running": 0, "nextCursor": None} == second
    assert {"matched": 1, "cancelled": 0, "running": 1, "nextCursor": None} == await cancel()
    document = {}
    assert {"matched": 2, **nothing} == await cancel(dryRun=True)
    assert (1, 1) == ((rest := await cancel(all=True))["cancelled"], rest["running"])


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"filter": {"urlPrefix": "orders"}}, "filter.urlPrefix"),
        ({"filter": {"urlPrefix": "https://a.example/?token=s"}}, "filter.urlPrefix"),
        ({"filter": {"reason": "attempts"}}, "filter.reason"),
        ({"filter": {"createdAfter": 5}}, "filter.createdAfter"),
        ({"all": True, "cursor": "x"}, "cursor"),
        ({"dryRun": "yes"}, "dryRun"),
        ({}, "all"),
        ({"filter": {}}, "all"),
        ({"filter": {"lane": None}, "all": False}, "all"),
    ],
)
async def test_an_invalid_cancellation_is_422(
    api: ApiHarness, document: dict[str, Any], field: str
) -> None:
    """Nothing is cancelled if a field is invalid."""
    await api.create()
    response = await api.request("POST", "/retry-tasks/cancellations", document)
    assert (422, field) == (response.status, response.problem["field"])
    assert 1 == len((await api.request("GET", "/retry-tasks?status=PENDING")).json["items"])


async def test_an_invalid_last_status_is_explained_without_a_regular_expression(
    api: ApiHarness,
) -> None:
    """The problem describes the format of `lastStatus` in words."""
    response = await api.request("GET", "/retry-tasks?lastStatus=9xx")
    detail = "lastStatus must be 503, a class such as 5xx, or a gRPC code."
    assert (422, detail) == (response.status, response.problem["detail"])


async def test_the_status_of_a_retry_depends_on_the_task(api: ApiHarness) -> None:
    """A pending, dead or cancelled task gets a 200, a running attempt 202, a succeeded one 409."""
    path = f"/retry-tasks/{(await api.create(delayMs=60_000))['taskId']}"
    now = await api.request("POST", f"{path}/retry")
    assert (200, NOW) == (now.status, now.json["nextAttemptAt"])
    await api.lease_due_tasks()
    assert 202 == (await api.request("POST", f"{path}/retry")).status
    dead = f"/retry-tasks/{(await api.create())['taskId']}"
    await api.exhaust_due_tasks()
    replayed = await api.request("POST", f"{dead}/retry")
    assert (200, "PENDING", 1) == (
        replayed.status,
        replayed.json["status"],
        replayed.json["replays"],
    )
    await api.request("DELETE", dead)
    replayed = await api.request("POST", f"{dead}/retry")
    assert (200, "PENDING", 2) == (
        replayed.status,
        replayed.json["status"],
        replayed.json["replays"],
    )
    [leased] = await api.lease_due_tasks()
    await api.store.finish([TaskResult(task=leased, attempt=None, status=Status.SUCCEEDED)])
    assert 409 == (await api.request("POST", f"{dead}/retry")).status


async def test_the_key_of_a_cancelled_task_can_be_used_again(api: ApiHarness) -> None:
    """The new task gets a 201 and another id, also with other content."""
    first = await api.create(idempotencyKey="order-7", delayMs=60_000)
    await api.request("DELETE", f"/retry-tasks/{first['taskId']}")
    second = await api.create(idempotencyKey="order-7", body={"changed": True})
    assert first["taskId"] != second["taskId"]
    assert 404 == (await api.request("GET", f"/retry-tasks/{first['taskId']}")).status


async def test_a_retry_above_a_limit_of_the_tenant_is_429() -> None:
    """A retry takes a token like a new task, and a dead letter needs quota to be replayed."""
    api = ApiHarness(quota=1, rate=2.0, burst=4.0)
    dead = f"/retry-tasks/{(await api.create())['taskId']}/retry"
    await api.exhaust_due_tasks()
    pending = f"/retry-tasks/{(await api.create(delayMs=60_000))['taskId']}/retry"
    over_quota = await api.request("POST", dead)
    assert (429, "10") == (over_quota.status, over_quota.header("retry-after"))
    assert "1 unfinished tasks (setting tenant_pending)" in over_quota.problem["detail"]
    assert 200 == (await api.request("POST", pending)).status
    over_rate = await api.request("POST", pending)
    assert (429, "1") == (over_rate.status, over_rate.header("retry-after"))
    assert "2 tasks per second (setting tenant_rate)" in over_rate.problem["detail"]


async def test_a_task_that_is_being_cancelled_is_not_retried(api: ApiHarness) -> None:
    """A retry gets a 409 while the last attempt runs; then the task is no longer cancelling."""
    path = f"/retry-tasks/{(await api.create())['taskId']}"
    (leased,) = await api.lease_due_tasks()
    await api.request("DELETE", path)
    response = await api.request("POST", f"{path}/retry")
    assert (409, "IN_FLIGHT") == (response.status, response.problem["taskStatus"])
    assert "being cancelled" in response.problem["detail"]
    await api.store.finish([TaskResult(task=leased, attempt=None, status=Status.PENDING)])
    finished = (await api.request("GET", path)).json
    assert ("CANCELLED", False) == (finished["status"], finished["cancelling"])


async def test_a_task_leased_early_is_still_pending(api: ApiHarness) -> None:
    """A leased task is PENDING until its attempt is due."""
    path = f"/retry-tasks/{(await api.create(delayMs=500))['taskId']}"
    await api.lease_due_tasks()
    assert "PENDING" == (await api.request("GET", path)).json["status"]
    api.time.ms += 500
    assert "IN_FLIGHT" == (await api.request("GET", path)).json["status"]


async def test_the_attempt_log_has_all_fields(api: ApiHarness) -> None:
    """An attempt has durations, outcome and decision; fields without a value are null."""
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


async def test_the_attempt_log_is_paged(api: ApiHarness) -> None:
    """All pages together contain each attempt once, in order; a bad cursor is an error."""
    task_id = (await api.create())["taskId"]
    for _ in range(3):
        await api.exhaust_due_tasks()
        await api.request("POST", f"/retry-tasks/{task_id}/retry")
    pages = await read_all_pages(api, f"/retry-tasks/{task_id}/attempts?limit=1")
    assert [[1], [2], [3]] == [[attempt["attemptNumber"] for attempt in page] for page in pages]
    path = f"/retry-tasks/{task_id}/attempts"
    assert [] == (await api.request("GET", f"{path}?cursor=99999999")).json["items"]
    for cursor in ("x", "999999999"):
        invalid = await api.request("GET", f"{path}?cursor={cursor}")
        assert "cursor" == invalid.problem["field"]


async def test_pages_yield_to_other_requests(api: ApiHarness) -> None:
    """Tasks and attempts are formatted ten at a time; in between, the event loop runs."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task_id = (await api.create())["taskId"]
    for _ in range(199):
        await api.create()
        await api.exhaust_due_tasks()
        await api.request("POST", f"/retry-tasks/{task_id}/retry")
    for path in ("/retry-tasks", f"/retry-tasks/{task_id}/attempts"):
        counter = asyncio.create_task(count_turns())
        turns_before = turns
        response = await api.request("GET", f"{path}?limit=200")
        counter.cancel()
        assert len(response.json["items"]) > 190
        assert turns - turns_before >= 20


async def test_a_page_that_the_store_has_shortened_is_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of tasks and attempts have a cursor if the store returns fewer items than requested."""
    monkeypatch.setattr("tests.service.stores.reference_store.store.MAX_PAGE_BYTES", 1)
    api = ApiHarness()

    task_id = (await api.create())["taskId"]
    await api.create()
    for _ in range(2):
        await api.exhaust_due_tasks()
        await api.request("POST", f"/retry-tasks/{task_id}/retry")
    attempts = await read_all_pages(api, f"/retry-tasks/{task_id}/attempts?limit=100")
    assert [[1], [2]] == [[attempt["attemptNumber"] for attempt in page] for page in attempts]
    tasks = await read_all_pages(api, "/retry-tasks?limit=100")
    assert [1, 1] == [len(page) for page in tasks]


async def test_secrets_are_redacted_in_every_response(api: ApiHarness) -> None:
    """Secrets are redacted in tasks, attempts, explanations and dead letters."""
    task = await api.create(
        targetUrl="https://example.com/hook?user=7&api_key=sesame-one",
        headers={"Authorization": "Bearer sesame-two", "X-Plain": "plain"},
        callbackUrl="https://example.com/done?token=sesame-three",
    )
    path = f"/retry-tasks/{task['taskId']}"
    assert "https://example.com/hook?user=7&api_key=[redacted]" == task["targetUrl"]
    assert {"Authorization": "[redacted]", "X-Plain": "plain"} == task["headers"]
    await api.exhaust_due_tasks(excerpt="bad credentials: sesame-two for sesame-one")
    for read_path in ("/retry-tasks", path, f"{path}/attempts", f"{path}/explain", "/dead-letters"):
        response = await api.request("GET", read_path)
        assert 200 == response.status
        assert b"sesame" not in response.body
    _, content = await api.stored_task(task["taskId"])
    assert "Bearer sesame-two" == content.headers["Authorization"]  # sent unredacted


async def test_a_task_that_cannot_be_decrypted_can_be_read_and_cancelled(api: ApiHarness) -> None:
    """The content and the excerpts of the target are not shown: they may contain secrets."""
    plain = (await api.create(delayMs=1))["taskId"]
    api.codec.pack = Codec([Fernet.generate_key().decode()]).pack  # type: ignore[method-assign]
    headers = {"Authorization": "Bearer sesame-two"}
    encrypted = (await api.create(headers=headers, idempotencyKey="k"))["taskId"]
    path = f"/retry-tasks/{encrypted}"
    await fail_once(api, encrypted, excerpt="no sesame-two here")
    listed = (await api.request("GET", "/retry-tasks")).json["items"]
    assert [(encrypted, "[encrypted]", {}), (plain, TARGET, {})] == [
        (task["taskId"], task["targetUrl"], task["headers"]) for task in listed
    ]
    attempts = (await api.request("GET", f"{path}/attempts")).json["items"]
    assert "[redacted]" == attempts[0]["responseExcerpt"]
    assert "attempt 1 got 503" in (await api.request("GET", f"{path}/explain")).json["text"]
    assert "CANCELLED" == (await api.request("DELETE", path)).json["status"]


async def test_a_task_can_be_explained(api: ApiHarness) -> None:
    """The explanation has each attempt and decision, and the next step with its time."""
    task_id = (await api.create(policy={"maxAttempts": 2, "jitterType": "EQUAL"}))["taskId"]
    await fail_once(api, task_id)
    returned = (await api.request("GET", f"/retry-tasks/{task_id}/explain")).json
    assert (
        "attempt 1 got 503; waits 800 ms (ceiling 1 s, full jitter, retry-after asked for "
        "500 ms). Attempt 2 of 2 is due in 800 ms."
    ) == returned["text"]
    assert {"text": "Attempt 2 of 2 is due in 800 ms.", "at": NOW + 800} == returned["next"]
    assert [1] == [step["attempt"]["attemptNumber"] for step in returned["steps"]]
