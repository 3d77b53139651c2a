"""`POST /retry-tasks` and `POST /retry-tasks/batch`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.api.context import ApiLimits
from tarry.service.delivery import DeliveryResult
from tarry.service.engine.reporting import FinishedTask
from tarry.service.model import Status
from tests.service.api.harness import NOW, TARGET, ApiHarness, FakePayloads

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_created_task_is_returned(api: ApiHarness) -> None:
    """The response is a 201 with `Location` and the task."""
    response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET})
    task_id = response.json["taskId"]
    assert 201 == response.status
    assert f"/retry-tasks/{task_id}" == response.header("location")
    assert "nosniff" == response.header("x-content-type-options")
    assert "no-store" == response.header("cache-control")
    expected = {
        "taskId": task_id,
        "status": "PENDING",
        "reason": None,
        "idempotencyKey": task_id,
        "targetUrl": TARGET,
        "method": "POST",
        "headers": {},
        "policyId": "default",
        "policyVersion": None,
        "policy": None,
        "lane": "https:example.com:443",
        "attemptNumber": 0,
        "nextAttemptAt": NOW,
        "createdAt": NOW,
        "finishedAt": None,
        "bodySize": 0,
        "bodyRef": None,
        "callbackUrl": None,
        "callbackPolicyId": None,
        "cancelling": False,
        "replays": 0,
        "version": 0,
        "response": None,
        "lastStatus": None,
        "lastError": None,
        "lastAttemptAt": None,
    }
    assert expected == response.json
    task, content = await api.stored_task(task_id)
    assert ("default/https:example.com:443", task_id) == (task.lane, task.key)
    assert (TARGET, "POST", b"", {}) == (content.url, content.method, content.body, content.headers)


@pytest.mark.parametrize(
    ("fields", "body", "headers"),
    [
        ({"body": "grüße"}, "grüße".encode(), {}),
        ({"body": ""}, b"", {}),
        ({"body": None}, b"", {}),
        ({"body": {"a": [1, None]}}, b'{"a":[1,null]}', {"Content-Type": "application/json"}),
        ({"body": 7}, b"7", {"Content-Type": "application/json"}),
        ({"body": False}, b"false", {"Content-Type": "application/json"}),
        (
            {"body": [], "headers": {"content-type": "application/x"}},
            b"[]",
            {"content-type": "application/x"},
        ),
        ({"bodyBase64": base64.b64encode(b"\x00\xff").decode()}, b"\x00\xff", {}),
        ({"headers": {"X-A": "b c", "x-empty": ""}}, b"", {"X-A": "b c", "x-empty": ""}),
    ],
)
async def test_a_body_is_encoded_by_its_type(
    api: ApiHarness, fields: dict[str, object], body: bytes, headers: dict[str, str]
) -> None:
    """A string is sent as UTF-8, other JSON as JSON with its content type, base64 as bytes."""
    task = await api.create(**fields)
    _, content = await api.stored_task(task["taskId"])
    assert (body, headers) == (content.body, content.headers)
    assert len(body) == task["bodySize"]


async def test_numbers_in_a_body_are_not_rounded(api: ApiHarness) -> None:
    """A JSON body is sent as it was written, except for whitespace."""
    body = b'{"targetUrl": "https://a.b/", "body": {"n": 12345678901234567890.10, "e": 1e400}}'
    response = await api.request("POST", "/retry-tasks", body=body)
    _, content = await api.stored_task(response.json["taskId"])
    assert b'{"n":12345678901234567890.10,"e":1e400}' == content.body


async def test_all_fields_are_stored(api: ApiHarness) -> None:
    """Method, time, policy, callback, idempotency key and trace are stored."""
    await api.request("PUT", "/retry-policies/slow", {"maxAttempts": 9})
    document = {
        "targetUrl": "https://EXAMPLE.com:443/a?b=c",
        "method": "PATCH",
        "policyId": "slow",
        "policyVersion": 1,
        "policy": {"maxAttempts": 3, "totalBudgetMs": None},
        "nextAttemptAt": NOW + 5_000,
        "callbackUrl": "https://example.org",
        "callbackPolicyId": "quick",
        "idempotencyKey": "a key",
        "priorAttempts": 3,
    }
    response = await api.request("POST", "/retry-tasks", document, headers={"traceparent": TRACE})
    task, content = await api.stored_task(response.json["taskId"])
    assert ("slow", 1, NOW + 5_000, "a key") == (
        task.policy_id,
        task.policy_version,
        task.next_attempt_at,
        task.key,
    )
    assert "https://example.com/a?b=c" == content.url
    assert {"maxAttempts": 3, "totalBudgetMs": None} == content.overrides
    assert "quick" == response.json["callbackPolicyId"]
    assert ("PATCH", "https://example.org/", "quick", 3, TRACE) == (
        content.method,
        content.callback_url,
        content.callback_policy_id,
        content.prior_attempts,
        content.trace,
    )


async def test_the_operator_can_allow_methods() -> None:
    """A method of the setting `allow_methods` is accepted; the error for others lists it."""
    api = ApiHarness(allowed_methods=("PURGE",))
    document = {"targetUrl": TARGET, "method": "PURGE"}
    response = await api.request("POST", "/retry-tasks", document)
    assert (201, "PURGE") == (response.status, response.json["method"])
    other = await api.request("POST", "/retry-tasks", {**document, "method": "BAN"})
    assert "QUERY, PURGE; the operator can" in other.problem["detail"]


async def test_a_delay_starts_when_the_task_is_added(api: ApiHarness) -> None:
    """`delayMs` is added to the store's clock; a past `nextAttemptAt` becomes the current time."""
    assert NOW + 1_500 == (await api.create(delayMs=1_500))["nextAttemptAt"]
    assert NOW == (await api.create(nextAttemptAt=NOW - 5))["nextAttemptAt"]


async def test_a_task_may_have_its_own_traceparent(api: ApiHarness) -> None:
    """The `traceparent` of a task has priority over the header; tasks of a batch have their own."""
    traces = [TRACE.replace("-01", "-00"), f"00-{'1' * 32}-{'2' * 16}-01", None]
    documents = [{"targetUrl": TARGET, "traceparent": trace} for trace in traces]
    headers = {"traceparent": TRACE}
    single = await api.request("POST", "/retry-tasks", documents[0], headers=headers)
    batch = await api.request("POST", "/retry-tasks/batch", {"tasks": documents}, headers=headers)
    ids = [result["task"]["taskId"] for result in batch.json["results"]]
    contents = [(await api.stored_task(each))[1] for each in (single.json["taskId"], *ids)]
    assert [traces[0], *traces] == [content.trace for content in contents]


async def test_an_invalid_traceparent_is_ignored(api: ApiHarness) -> None:
    """A task is created without a trace, as W3C Trace Context requires."""
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"traceparent": "00-xyz"}
    )
    assert (await api.stored_task(response.json["taskId"]))[1].trace is None


async def test_a_repeated_key_returns_the_existing_task(api: ApiHarness) -> None:
    """Equal content, in any notation, gets a 200, and different content a 422."""
    first = await api.create(idempotencyKey="k", headers={"X-A": "1", "X-B": "2"}, body={"a": 1})
    repeated = {
        "body": {"a": 1},
        "headers": {"x-b": "2", "x-a": "1"},
        "targetUrl": "https://EXAMPLE.com/hook",
        "method": "POST",
        "idempotencyKey": "k",
        "policyId": "default",
    }
    response = await api.request("POST", "/retry-tasks", repeated)
    assert (200, first["taskId"]) == (response.status, response.json["taskId"])
    later = await api.request("POST", "/retry-tasks", {**repeated, "delayMs": 1})
    assert (200, first["taskId"]) == (later.status, later.json["taskId"])
    nothing = await api.request("POST", "/retry-tasks", {**repeated, "policy": {}, "delayMs": None})
    assert 200 == nothing.status
    others: list[dict[str, object]] = [
        {"body": {"a": 2}},
        {"method": "PUT"},
        {"policy": {"maxAttempts": 2}},
        {"callbackUrl": TARGET},
    ]
    for other in others:
        response = await api.request("POST", "/retry-tasks", {**repeated, **other})
        assert (422, "idempotencyKey") == (response.status, response.problem["field"])
    assert 1 == await api.count_tasks()


async def test_a_lane_key_gives_a_task_its_own_lane(api: ApiHarness) -> None:
    """The name of the lane has the key, in tasks, lists and downstreams, also after a batch."""
    lane = "https:example.com:443"
    assert lane == (await api.create())["lane"]
    assert f"{lane}@customer-7" == (await api.create(laneKey="customer-7"))["lane"]
    batch = {"tasks": [{"targetUrl": TARGET, "laneKey": "Customer_8.~-"}]}
    response = await api.request("POST", "/retry-tasks/batch", batch)
    assert f"{lane}@Customer_8.~-" == response.json["results"][0]["task"]["lane"]
    lanes = [lane, f"{lane}@Customer_8.~-", f"{lane}@customer-7"]
    listed = (await api.request("GET", "/downstreams")).json["items"]
    assert lanes == [downstream["lane"] for downstream in listed]
    for name in lanes:
        downstream = await api.request("POST", f"/downstreams/{name}/pause")
        assert (name, "PAUSED") == (downstream.json["lane"], downstream.json["state"])
        tasks = (await api.request("GET", f"/retry-tasks?lane={name}")).json["items"]
        assert [name] == [task["lane"] for task in tasks]


async def test_a_repeated_key_with_another_lane_key_is_a_conflict(api: ApiHarness) -> None:
    """The lane key is part of the task's content."""
    document = {"targetUrl": TARGET, "idempotencyKey": "k"}
    responses = [
        await api.request("POST", "/retry-tasks", {**document, "laneKey": lane_key})
        for lane_key in ("a", "a", None, "b")
    ]
    assert [201, 200, 422, 422] == [response.status for response in responses]


async def test_lane_keys_count_towards_the_limit_of_lanes() -> None:
    """The 429 names the setting; tasks with an existing key are accepted."""
    api = ApiHarness(lane_quota=2)
    documents = [{"targetUrl": TARGET, "laneKey": lane_key} for lane_key in ("a", "b", "c")]
    responses = [await api.request("POST", "/retry-tasks", each) for each in documents]
    assert [201, 201, 429] == [response.status for response in responses]
    assert "limit of 2 lanes (setting tenant_lanes)" in responses[2].problem["detail"]
    assert "b" == (await api.create(laneKey="b"))["lane"].partition("@")[2]


async def test_a_repeated_key_with_another_callback_policy_is_a_conflict(api: ApiHarness) -> None:
    """The policy of the callback is part of the task's content."""
    document = {"targetUrl": TARGET, "callbackUrl": TARGET, "idempotencyKey": "k"}
    policies = [None, "quick", None, "webhook"]
    responses = [
        await api.request("POST", "/retry-tasks", {**document, "callbackPolicyId": policy})
        for policy in policies
    ]
    assert [201, 422, 200, 422] == [response.status for response in responses]


@pytest.mark.parametrize("line", ['"order 7"', "order-7", "order 7"])
async def test_the_idempotency_key_can_be_a_header(api: ApiHarness, line: str) -> None:
    """The value can be quoted, as the draft standard requires, or unquoted."""
    document = {"targetUrl": TARGET}
    headers = {"Idempotency-Key": line}
    first = await api.request("POST", "/retry-tasks", document, headers=headers)
    repeated = await api.request("POST", "/retry-tasks", document, headers=headers)
    assert line.strip('"') == first.json["idempotencyKey"]
    assert (200, first.json["taskId"]) == (repeated.status, repeated.json["taskId"])


async def test_concurrent_requests_with_one_key_create_one_task(api: ApiHarness) -> None:
    """One request gets a 201, the others a 200 with the same task."""
    document = {"targetUrl": TARGET, "idempotencyKey": "k", "body": "x" * 20_000}
    responses = await asyncio.gather(
        *(api.request("POST", "/retry-tasks", document) for _ in range(50))
    )
    assert [200] * 49 + [201] == sorted(response.status for response in responses)
    assert 1 == len({response.json["taskId"] for response in responses})
    assert 1 == await api.count_tasks()
    assert 1 == len(api.payloads.bodies)


async def test_a_large_body_is_stored_separately(api: ApiHarness) -> None:
    """The task has the reference and the checksum of the stored body."""
    body = "x" * (16 * 1024 + 1)
    answer = await api.create(body=body)
    task, content = await api.stored_task(answer["taskId"])
    assert {task.owned_body_ref: body.encode()} == api.payloads.bodies
    assert (b"", task.owned_body_ref, True) == (
        content.body,
        content.body_ref,
        content.body_stored_by_service,
    )
    assert content.checksum is not None
    assert (len(body), None) == (answer["bodySize"], answer["bodyRef"])


async def test_the_body_of_a_task_that_is_not_added_is_deleted() -> None:
    """The body is deleted after a conflict and when the quota is full."""
    api = ApiHarness(quota=1)
    await api.create(idempotencyKey="k")
    large = {"targetUrl": TARGET, "body": "x" * 20_000}
    conflict = await api.request("POST", "/retry-tasks", {**large, "idempotencyKey": "k"})
    full = await api.request("POST", "/retry-tasks", large)
    assert [422, 429] == [conflict.status, full.status]
    assert {} == api.payloads.bodies


async def test_a_task_refers_to_an_object_of_the_caller(api: ApiHarness) -> None:
    """The size and ETag of the object are stored; the task does not own the object."""
    answer = await api.create(bodyRef="default/a.json")
    task, content = await api.stored_task(answer["taskId"])
    assert (None, "default/a.json", 7, "tag", False) == (
        task.owned_body_ref,
        content.body_ref,
        content.body_size,
        content.etag,
        content.body_stored_by_service,
    )
    assert "default/a.json" == answer["bodyRef"]


async def test_a_request_can_wait_for_the_result(api: ApiHarness) -> None:
    """`Prefer: wait` returns the finished task and the target's response."""
    request = asyncio.create_task(
        api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=5"})
    )
    task_id = await api.engine.waited_for.get()
    delivered = DeliveryResult(status=200, headers=[("x-a", "1"), ("x-a", "2")], excerpt=b"done")
    api.engine.reporter.notify_waiters(task_id, FinishedTask(Status.SUCCEEDED, None, delivered))
    response = await request
    assert (201, "wait=5") == (response.status, response.header("preference-applied"))
    assert ("SUCCEEDED", None) == (response.json["status"], response.json["nextAttemptAt"])
    expected = {"status": 200, "headers": {"x-a": "1, 2"}, "body": "done"}
    assert expected == response.json["response"]


async def test_a_binary_response_is_returned_as_base64(api: ApiHarness) -> None:
    """A response body that is not UTF-8 is returned in `bodyBase64`."""

    async def wait_until_finished(task_id: str, seconds: float) -> FinishedTask:
        delivered = DeliveryResult(status=500, excerpt=b"\xff")
        return FinishedTask(Status.EXHAUSTED, "attempts", delivered)

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    headers = {"Prefer": 'respond-async, wait="3"'}
    response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, headers=headers)
    assert ("EXHAUSTED", "attempts") == (response.json["status"], response.json["reason"])
    assert {"status": 500, "headers": {}, "bodyBase64": "/w=="} == response.json["response"]


@pytest.mark.parametrize(
    ("delivered", "expected"),
    [
        (
            DeliveryResult(status=200, excerpt=b"abc", truncated=True),
            {"body": "abc", "truncated": True},
        ),
        (
            DeliveryResult(status=200, excerpt=b"a\xc3", truncated=True),
            {"body": "a", "truncated": True},
        ),
        (DeliveryResult(status=200, excerpt=b"a\xc3"), {"bodyBase64": "YcM="}),
        (DeliveryResult(status=200, excerpt=b"", truncated=True), {"body": "", "truncated": True}),
    ],
)
async def test_a_truncated_response_is_marked(
    api: ApiHarness, delivered: DeliveryResult, expected: dict[str, Any]
) -> None:
    """An incomplete UTF-8 character at the cut is dropped, and the body stays a string."""

    async def wait_until_finished(task_id: str, seconds: float) -> FinishedTask:
        return FinishedTask(Status.SUCCEEDED, None, delivered)

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=1"}
    )
    assert {"status": 200, "headers": {}, **expected} == response.json["response"]


async def test_a_wait_that_times_out_returns_the_pending_task(api: ApiHarness) -> None:
    """The requested wait is limited to the maximum of 60 s."""
    waits: list[float] = []

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        waits.append(seconds)

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    for prefer, applied in (("wait=0", "wait=0"), ("wait=99999", "wait=60")):
        response = await api.request(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": prefer}
        )
        assert (201, "PENDING") == (response.status, response.json["status"])
        assert applied == response.header("preference-applied")
        assert response.json["response"] is None
    assert 60 == sum(waits)


@pytest.mark.parametrize("prefer", ["wait=soon", "wait", "wait=-1", "await=5", "return=minimal"])
async def test_an_unknown_preference_is_ignored(api: ApiHarness, prefer: str) -> None:
    """The task is created and no preference is applied, as RFC 7240 requires."""
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": prefer}
    )
    assert (201, None) == (response.status, response.header("preference-applied"))


async def test_the_number_of_waiting_requests_is_limited() -> None:
    """A request above the limit is answered without a wait."""
    api = ApiHarness(limits=ApiLimits(max_waiting_requests=0))
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=5"}
    )
    assert (201, None) == (response.status, response.header("preference-applied"))


async def test_a_finished_task_is_not_waited_for(api: ApiHarness) -> None:
    """An existing task that is finished is returned without a wait."""
    document = {"targetUrl": TARGET, "idempotencyKey": "k"}
    await api.request("POST", "/retry-tasks", document)
    await api.exhaust_due_tasks()
    headers = {"Prefer": "wait=30"}
    response = await api.request("POST", "/retry-tasks", document, headers=headers)
    assert (200, "EXHAUSTED") == (response.status, response.json["status"])


@pytest.mark.parametrize("number", ["5000", "5000.0", "5e3", "5E+3"])
async def test_whole_numbers_can_be_written_as_floats(api: ApiHarness, number: str) -> None:
    """Times, versions, counts and statuses accept every form of a whole number."""
    await api.request("POST", "/retry-policies", {"policyId": "p"})
    fields = f'"targetUrl": "{TARGET}", "policyId": "p", "policyVersion": 1.0'
    policy = '{"maxAttempts": 1e2, "retryableStatusCodes": [503.0]}'
    documents = (
        f'{{{fields}, "delayMs": {number}, "policy": {policy}}}',
        f'{{{fields}, "nextAttemptAt": {NOW}.0, "priorAttempts": {number}, "body": 5e3}}',
    )
    for document, due in zip(documents, (NOW + 5_000, NOW), strict=True):
        response = await api.request("POST", "/retry-tasks", body=document.encode())
        assert 201 == response.status, response.body
        task, content = await api.stored_task(response.json["taskId"])
        assert content.body in {b"", b"5e3"}  # the body stays as it is
        assert (due, 1) == (task.next_attempt_at, task.policy_version)
        assert isinstance(task.next_attempt_at, int)
        assert isinstance(task.policy_version, int)
    replay = f'{{"filter": {{"before": {NOW}.0, "createdAfter": {NOW - 1}.0}}}}'.encode()
    response = await api.request("POST", "/dead-letters/replays", body=replay)
    assert 201 == response.status, response.body
    times = [response.json["filter"][name] for name in ("before", "createdAfter")]
    assert [NOW, NOW - 1] == times
    assert {int} == set(map(type, times))
    limits = f'{{"concurrency": 4.0, "breaker": {{"minCalls": {number}}}}}'.encode()
    path = "/downstreams/https:a.example:443?create=true"
    response = await api.request("PUT", path, body=limits)
    expected = {"concurrency": 4, "breaker": {"minCalls": 5000}}
    assert (200, expected) == (response.status, response.json["limits"])


async def test_a_full_quota_is_429() -> None:
    """The 429 has Retry-After, and a repeated idempotency key still returns its task."""
    api = ApiHarness(quota=1)
    await api.create(idempotencyKey="k")
    full = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET})
    existing = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET, "idempotencyKey": "k"}
    )
    assert [429, 200] == [full.status, existing.status]
    assert "10" == full.header("retry-after")
    assert "1 unfinished tasks (setting tenant_pending)" in full.problem["detail"]


async def test_a_target_above_the_limit_of_lanes_is_429() -> None:
    """The detail names the setting; tasks of a batch to hosts that have a lane are added."""
    api = ApiHarness(lane_quota=1)
    await api.create()
    other = {"targetUrl": "https://other.example/"}
    full = await api.request("POST", "/retry-tasks", other)
    assert (429, "60") == (full.status, full.header("retry-after"))
    assert "its limit of 1 lanes (setting tenant_lanes)" in full.problem["detail"]
    batch = await api.request(
        "POST", "/retry-tasks/batch", {"tasks": [other, {"targetUrl": TARGET}]}
    )
    assert [429, 201] == [result["status"] for result in batch.json["results"]]


async def test_a_request_above_the_rate_limit_is_429() -> None:
    """The 429 has Retry-After; each task of a batch takes a token; tokens are refilled."""
    api = ApiHarness(rate=2.0, burst=2.0)
    document = {"targetUrl": TARGET}
    batch = await api.request("POST", "/retry-tasks/batch", {"tasks": [document] * 4})
    rejected = await api.request("POST", "/retry-tasks", document)
    assert [200, 429] == [batch.status, rejected.status]
    assert "2" == rejected.header("retry-after")  # 1 - (2 - 4) = 3 tokens, 2 a second
    api.time.ms += 1_500
    assert 201 == (await api.request("POST", "/retry-tasks", document)).status
    assert 5 == await api.count_tasks()


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(Overloaded("10 tasks wait", retry_after=2.5), "3"), (StoreUnavailable("disk full"), "1")],
)
async def test_an_unavailable_store_is_503(api: ApiHarness, error: Exception, seconds: str) -> None:
    """The 503 has Retry-After and does not contain the message of the store."""
    api.engine.error = error
    response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET})
    assert (503, seconds) == (response.status, response.header("retry-after"))
    assert "disk full" not in response.problem["detail"]


async def test_an_unexpected_error_is_500(caplog: pytest.LogCaptureFixture) -> None:
    """The details of the error are logged and are not part of the response."""
    api = ApiHarness()
    api.engine.error = RuntimeError("secret details")
    response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET})
    assert 500 == response.status
    assert "secret" not in str(response.problem)
    assert "secret details" in caplog.text


async def test_a_large_batch_yields_to_other_requests(api: ApiHarness) -> None:
    """Tasks are built, and results too, fifty at a time; in between, the event loop runs."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    response = await api.request(
        "POST", "/retry-tasks/batch", {"tasks": [{"targetUrl": TARGET}] * 1_000}
    )
    counter.cancel()
    assert 1_000 == len(response.json["results"])
    assert turns >= 2 * 1_000 // 50


@pytest.mark.parametrize("malformed", [[], [5]], ids=["all objects", "with a number"])
async def test_each_task_of_a_batch_has_its_own_result(
    api: ApiHarness, malformed: list[int]
) -> None:
    """Each result is that of a single request, also if another entry is malformed."""
    tasks = [
        {"targetUrl": TARGET, "idempotencyKey": "a"},
        {"targetUrl": "nonsense"},
        {"targetUrl": TARGET, "idempotencyKey": "a"},
        {"targetUrl": TARGET, "idempotencyKey": "a", "body": "other"},
        {"targetUrl": TARGET, "headers": {"Host": "x"}},
        {"targetUrl": TARGET, "idempotencyKey": "b"},
        *malformed,
    ]
    response = await api.request("POST", "/retry-tasks/batch", {"tasks": tasks})
    results = response.json["results"]
    statuses = [201, 422, 200, 422, 422, 201, *(422 for _ in malformed)]
    assert statuses == [result["status"] for result in results]
    assert results[0]["task"]["taskId"] == results[2]["task"]["taskId"]
    fields = [result["problem"]["field"] for result in results if "problem" in result]
    assert ["targetUrl", "idempotencyKey", "headers.Host", *("" for _ in malformed)] == fields
    assert 2 == await api.count_tasks()


async def test_a_body_that_cannot_be_stored_fails_only_its_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After three consecutive failures no more bodies of the batch are stored."""
    caplog.set_level("INFO", "tarry.service")

    api = ApiHarness()
    original_put = api.payloads.put
    tried: list[bytes] = []

    async def put(tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
        tried.append(body)
        if body.startswith(b"bad"):
            raise StoreUnavailable("the disk is full")
        return await original_put(tenant, task_id, body)

    monkeypatch.setattr(api.payloads, "put", put)
    good, bad = ({"targetUrl": TARGET, "body": word * 10_000} for word in ("good", "bad!"))
    small = {"targetUrl": TARGET}
    tasks = [bad, bad, good, bad, small, bad, bad, good, small]
    response = await api.request("POST", "/retry-tasks/batch", {"tasks": tasks})
    results = response.json["results"]
    statuses = [503, 503, 201, 503, 201, 503, 503, 503, 201]
    assert (200, statuses) == (response.status, [result["status"] for result in results])
    assert "send it again" in results[0]["problem"]["detail"]
    assert (6, 3, 1) == (len(tried), await api.count_tasks(), len(api.payloads.bodies))
    assert "index=0: the disk is full" in caplog.text


async def test_fingerprint_stays_the_same_in_later_versions(api: ApiHarness) -> None:
    """A POST that is repeated after an upgrade finds the task of the older version."""
    document = {"targetUrl": "https://example.com/a", "body": "x", "idempotencyKey": "k"}
    created = (await api.request("POST", "/retry-tasks", document)).json["taskId"]
    stored_task = await api.store.get_task("default", created)
    assert stored_task is not None
    assert "6cbb01b40ffcd417dc65da481cd22a48" == stored_task.fingerprint.hex()


async def test_tasks_without_an_idempotency_key_are_never_equal(api: ApiHarness) -> None:
    """Such tasks have no fingerprint, and the id of such a task is not a valid key."""
    document = {"targetUrl": TARGET, "body": "x"}
    first = (await api.request("POST", "/retry-tasks", document)).json["taskId"]
    second = (await api.request("POST", "/retry-tasks", document)).json["taskId"]
    assert first != second
    stored_task = await api.store.get_task("default", first)
    assert stored_task is not None
    assert b"" == stored_task.fingerprint
    repeated = await api.request("POST", "/retry-tasks", {**document, "idempotencyKey": first})
    assert (422, "idempotencyKey") == (repeated.status, repeated.problem["field"])
    large = {"targetUrl": TARGET, "body": "x" * 40_000}
    third = (await api.request("POST", "/retry-tasks", large)).json["taskId"]
    with_stored_body = await api.store.get_task("default", third)
    assert with_stored_body is not None
    assert b"" == with_stored_body.fingerprint


@pytest.mark.parametrize(
    ("prefer", "is_minimal"),
    [
        ("return=minimal", True),
        ('wait=5, Return = "minimal"; why=not', True),
        ("return=minimal, return=representation", True),
        ("return=representation, return=minimal", False),
        ("return=minimalist", False),
        ("return=representation", False),
        ("wait=1", False),
    ],
)
async def test_a_minimal_batch_response_has_only_ids(
    api: ApiHarness, prefer: str, is_minimal: bool
) -> None:
    """`Preference-Applied` confirms the preference (RFC 7240, 4.2); problems are complete."""
    tasks = [
        {"targetUrl": TARGET, "idempotencyKey": "a"},
        {"targetUrl": TARGET, "idempotencyKey": "a"},
        {"targetUrl": TARGET, "idempotencyKey": "a", "body": "other"},
    ]
    headers = {"Prefer": prefer}
    response = await api.request("POST", "/retry-tasks/batch", {"tasks": tasks}, headers=headers)
    added, repeated, conflict = response.json["results"]
    if is_minimal:
        assert "return=minimal" == response.header("preference-applied")
        assert {"status": 201, "taskId": added["taskId"]} == added
        assert {"status": 200, "taskId": added["taskId"]} == repeated
        assert (await api.request("GET", f"/retry-tasks/{added['taskId']}")).status == 200
    else:
        assert response.header("preference-applied") is None
        assert added["task"]["taskId"] == repeated["task"]["taskId"]
        assert "taskId" not in added
    assert (422, "idempotencyKey") == (conflict["status"], conflict["problem"]["field"])


async def test_invalid_tasks_of_a_batch_are_rejected_cheaply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The types of the fields are inspected once, and not for each invalid task (0.9 ms)."""
    type_info = msgspec.inspect.type_info
    inspected: list[object] = []

    def record_type(type_: object) -> msgspec.inspect.Type:
        inspected.append(type_)
        return type_info(type_)

    monkeypatch.setattr(msgspec.inspect, "type_info", record_type)

    api = ApiHarness()
    response = await api.request("POST", "/retry-tasks/batch", {"tasks": [None] * 9})
    assert [422] * 9 == [result["status"] for result in response.json["results"]]
    assert len(inspected) <= 1


async def test_the_size_of_a_batch_is_limited() -> None:
    """A batch has at most 1,000 tasks, and a task that is too large is rejected alone."""
    api = ApiHarness(limits=ApiLimits(max_request_bytes=1 << 20))
    one = {"targetUrl": TARGET}
    largest = await api.request("POST", "/retry-tasks/batch", {"tasks": [one] * 1000})
    assert [201] * 1000 == [result["status"] for result in largest.json["results"]]
    too_many = await api.request("POST", "/retry-tasks/batch", {"tasks": [one] * 1001})
    assert (422, "tasks") == (too_many.status, too_many.problem["field"])
    empty = await api.request("POST", "/retry-tasks/batch", {"tasks": []})
    assert (200, []) == (empty.status, empty.json["results"])
    assert 1000 == await api.count_tasks()
    large = {"targetUrl": TARGET, "body": "x" * (1 << 20)}
    mixed = await api.request("POST", "/retry-tasks/batch", {"tasks": [large, one]})
    assert [413, 201] == [result["status"] for result in mixed.json["results"]]


async def test_a_store_failure_after_the_wait_does_not_change_the_status(api: ApiHarness) -> None:
    """The task is stored, so the response is a 201 with the last known state."""

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        return None

    async def get(tenant: str, task_id: str) -> None:
        msg = "disk full"
        raise StoreUnavailable(msg)

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    api.store.get_task = get  # type: ignore[method-assign]
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=1"}
    )
    assert (201, "PENDING") == (response.status, response.json["status"])


async def test_a_body_that_cannot_be_deleted_is_not_an_error(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The existing task is returned; maintenance deletes the unreferenced body."""

    async def fail(_payloads: FakePayloads, _refs: Sequence[str]) -> None:
        raise StoreUnavailable("disk full")

    first = await api.create(body="x" * 20_000, idempotencyKey="k")
    monkeypatch.setattr(FakePayloads, "delete", fail)
    task = {"targetUrl": TARGET, "body": "x" * 20_000, "idempotencyKey": "k"}
    repeated = await api.request("POST", "/retry-tasks", task)
    batch = await api.request("POST", "/retry-tasks/batch", {"tasks": [task]})
    assert (200, first["taskId"]) == (repeated.status, repeated.json["taskId"])
    assert [200] == [result["status"] for result in batch.json["results"]]
