from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.api.context import ApiLimits
from tarry.service.delivery.messages import DeliveryResult
from tarry.service.engine.reporting import TaskCompletion
from tarry.service.model import Status
from tests.service.api.harness import NOW, TARGET, FakePayloads, Rig, with_rig

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_task_is_taken_and_told() -> None:
    """201, `Location`, and the task in the words of the API."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET})
        task_id = reply.json["taskId"]
        assert 201 == reply.status
        assert f"/retry-tasks/{task_id}" == reply.header("location")
        assert "nosniff" == reply.header("x-content-type-options")
        assert "no-store" == reply.header("cache-control")
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
            "cancelling": False,
            "replays": 0,
            "version": 0,
            "response": None,
        }
        assert expected == reply.json
        task, content = await rig.stored(task_id)
        assert ("default/https:example.com:443", task_id) == (task.lane, task.key)
        assert (TARGET, "POST", b"", {}) == (
            content.url,
            content.method,
            content.body,
            content.headers,
        )

    with_rig(test)


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
def test_the_body_that_is_sent(
    fields: dict[str, object], body: bytes, headers: dict[str, str]
) -> None:
    """A string goes as UTF-8, other JSON as JSON with its content type, base64 as its bytes."""

    async def test(rig: Rig) -> None:
        task = await rig.create(**fields)
        _, content = await rig.stored(task["taskId"])
        assert (body, headers) == (content.body, content.headers)
        assert len(body) == task["bodySize"]

    with_rig(test)


def test_no_number_of_a_body_is_rounded() -> None:
    """A JSON body is sent as it was written, all but the blanks."""

    async def test(rig: Rig) -> None:
        body = b'{"targetUrl": "https://a.b/", "body": {"n": 12345678901234567890.10, "e": 1e400}}'
        reply = await rig.ask("POST", "/retry-tasks", body=body)
        _, content = await rig.stored(reply.json["taskId"])
        assert b'{"n":12345678901234567890.10,"e":1e400}' == content.body

    with_rig(test)


def test_everything_that_can_be_asked_for_is_kept() -> None:
    """Method, dates, policy, callback and trace arrive in the store."""

    async def test(rig: Rig) -> None:
        await rig.ask("PUT", "/retry-policies/slow", {"maxAttempts": 9})
        asked = {
            "targetUrl": "https://EXAMPLE.com:443/a?b=c",
            "method": "PURGE",
            "policyId": "slow",
            "policyVersion": 1,
            "policy": {"maxAttempts": 3, "totalBudgetMs": None},
            "nextAttemptAt": NOW + 5_000,
            "callbackUrl": "https://example.org",
            "idempotencyKey": "a key",
        }
        reply = await rig.ask("POST", "/retry-tasks", asked, headers={"traceparent": TRACE})
        task, content = await rig.stored(reply.json["taskId"])
        assert ("slow", 1, NOW + 5_000, "a key") == (
            task.policy_id,
            task.policy_version,
            task.next_attempt_at,
            task.key,
        )
        assert "https://example.com/a?b=c" == content.url
        assert {"maxAttempts": 3, "totalBudgetMs": None} == content.overrides
        assert ("PURGE", "https://example.org/", TRACE) == (
            content.method,
            content.callback_url,
            content.trace,
        )

    with_rig(test)


def test_a_delay_counts_from_the_moment_of_adding() -> None:
    """`delayMs` is a time on the store's clock when the task is added."""

    async def test(rig: Rig) -> None:
        assert NOW + 1_500 == (await rig.create(delayMs=1_500))["nextAttemptAt"]
        assert NOW == (await rig.create(nextAttemptAt=NOW - 5))["nextAttemptAt"]

    with_rig(test)


def test_a_trace_that_makes_no_sense_is_ignored() -> None:
    """As the trace context's standard has it."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"traceparent": "00-xyz"}
        )
        assert (await rig.stored(reply.json["taskId"]))[1].trace is None

    with_rig(test)


def test_the_same_key_with_the_same_content_is_the_first_task() -> None:
    """200 and the first task, however the same thing is spelled; other content is 422."""

    async def test(rig: Rig) -> None:
        first = await rig.create(
            idempotencyKey="k", headers={"X-A": "1", "X-B": "2"}, body={"a": 1}
        )
        again = {
            "body": {"a": 1},
            "headers": {"x-b": "2", "x-a": "1"},
            "targetUrl": "https://EXAMPLE.com/hook",
            "method": "POST",
            "idempotencyKey": "k",
            "policyId": "default",
        }
        reply = await rig.ask("POST", "/retry-tasks", again)
        assert (200, first["taskId"]) == (reply.status, reply.json["taskId"])
        later = await rig.ask("POST", "/retry-tasks", {**again, "delayMs": 1})
        assert (200, first["taskId"]) == (later.status, later.json["taskId"])
        nothing = await rig.ask("POST", "/retry-tasks", {**again, "policy": {}, "delayMs": None})
        assert 200 == nothing.status
        others: list[dict[str, object]] = [
            {"body": {"a": 2}},
            {"method": "PUT"},
            {"policy": {"maxAttempts": 2}},
        ]
        for other in others:
            reply = await rig.ask("POST", "/retry-tasks", {**again, **other})
            assert (422, "idempotencyKey") == (reply.status, reply.problem["field"])
        assert 1 == await rig.count()

    with_rig(test)


@pytest.mark.parametrize("line", ['"order 7"', "order-7"])
def test_the_key_may_come_as_a_header(line: str) -> None:
    """In double quotes, as its draft has it, or bare."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET}
        headers = {"Idempotency-Key": line}
        first = await rig.ask("POST", "/retry-tasks", document, headers=headers)
        again = await rig.ask("POST", "/retry-tasks", document, headers=headers)
        assert line.strip('"') == first.json["idempotencyKey"]
        assert (200, first.json["taskId"]) == (again.status, again.json["taskId"])

    with_rig(test)


def test_fifty_with_one_key_make_one_task() -> None:
    """One is answered with 201, the others with 200 and the same task."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET, "idempotencyKey": "k", "body": "x" * 20_000}
        replies = await asyncio.gather(
            *(rig.ask("POST", "/retry-tasks", document) for _ in range(50))
        )
        assert [200] * 49 + [201] == sorted(reply.status for reply in replies)
        assert 1 == len({reply.json["taskId"] for reply in replies})
        assert 1 == await rig.count()
        assert 1 == len(rig.shelf.bodies)

    with_rig(test)


def test_a_large_body_lies_elsewhere() -> None:
    """It is put away before the task is added, which names it and its checksum."""

    async def test(rig: Rig) -> None:
        body = "x" * (16 * 1024 + 1)
        answer = await rig.create(body=body)
        task, content = await rig.stored(answer["taskId"])
        assert {task.body_ref: body.encode()} == rig.shelf.bodies
        assert (b"", task.body_ref, True) == (content.body, content.body_ref, content.owned)
        assert content.checksum is not None
        assert (len(body), None) == (answer["bodySize"], answer["bodyRef"])

    with_rig(test)


def test_the_body_of_a_task_that_is_not_added_is_deleted() -> None:
    """A conflict and a full quota leave no body behind."""

    async def test(rig: Rig) -> None:
        await rig.create(idempotencyKey="k")
        large = {"targetUrl": TARGET, "body": "x" * 20_000}
        conflict = await rig.ask("POST", "/retry-tasks", {**large, "idempotencyKey": "k"})
        full = await rig.ask("POST", "/retry-tasks", large)
        assert [422, 429] == [conflict.status, full.status]
        assert {} == rig.shelf.bodies

    with_rig(test, quota=1)


def test_a_body_by_reference_is_looked_at() -> None:
    """It must be there; its size and tag go with the task, and it stays the caller's."""

    async def test(rig: Rig) -> None:
        answer = await rig.create(bodyRef="default/a.json")
        task, content = await rig.stored(answer["taskId"])
        assert (None, "default/a.json", 7, "tag", False) == (
            task.body_ref,
            content.body_ref,
            content.body_size,
            content.etag,
            content.owned,
        )
        assert "default/a.json" == answer["bodyRef"]

    with_rig(test)


def test_a_caller_can_wait_for_the_outcome() -> None:
    """`Prefer: wait` answers with the end of the task and the target's response."""

    async def test(rig: Rig) -> None:
        asking = asyncio.create_task(
            rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=5"})
        )
        task_id = await rig.engine.waited_for.get()
        delivered = DeliveryResult(
            status=200, headers=[("x-a", "1"), ("x-a", "2")], excerpt=b"done"
        )
        rig.engine.waiters.notify(task_id, TaskCompletion(Status.SUCCEEDED, None, delivered))
        reply = await asking
        assert (201, "wait=5") == (reply.status, reply.header("preference-applied"))
        assert ("SUCCEEDED", None) == (reply.json["status"], reply.json["nextAttemptAt"])
        expected = {"status": 200, "headers": {"x-a": "1, 2"}, "body": "done"}
        assert expected == reply.json["response"]

    with_rig(test)


def test_a_response_that_is_no_text_comes_in_base64() -> None:
    """Every byte of it arrives."""

    async def test(rig: Rig) -> None:
        async def settled(task_id: str, seconds: float) -> TaskCompletion:
            delivered = DeliveryResult(status=500, excerpt=b"\xff")
            return TaskCompletion(Status.EXHAUSTED, "attempts", delivered)

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        headers = {"Prefer": 'respond-async, wait="3"'}
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET}, headers=headers)
        assert ("EXHAUSTED", "attempts") == (reply.json["status"], reply.json["reason"])
        assert {"status": 500, "headers": {}, "bodyBase64": "/w=="} == reply.json["response"]

    with_rig(test)


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
def test_a_response_that_was_cut_says_so(
    delivered: DeliveryResult, expected: dict[str, Any]
) -> None:
    """Also where that was within a character: it is text all the same."""

    async def test(rig: Rig) -> None:
        async def settled(task_id: str, seconds: float) -> TaskCompletion:
            return TaskCompletion(Status.SUCCEEDED, None, delivered)

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        reply = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=1"}
        )
        assert {"status": 200, "headers": {}, **expected} == reply.json["response"]

    with_rig(test)


def test_an_outcome_that_does_not_come_leaves_the_pending_task() -> None:
    """The task is taken all the same, and no more than the longest wait is promised."""

    async def test(rig: Rig) -> None:
        waits: list[float] = []

        async def settled(task_id: str, seconds: float) -> None:
            waits.append(seconds)

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        for prefer, applied in (("wait=0", "wait=0"), ("wait=99999", "wait=60")):
            reply = await rig.ask(
                "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": prefer}
            )
            assert (201, "PENDING") == (reply.status, reply.json["status"])
            assert applied == reply.header("preference-applied")
            assert reply.json["response"] is None
        assert 60 == sum(waits)

    with_rig(test)


@pytest.mark.parametrize("prefer", ["wait=soon", "wait", "wait=-1", "await=5", "return=minimal"])
def test_a_preference_that_is_not_understood_is_not_applied(prefer: str) -> None:
    """As RFC 7240 has it, it is no error."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": prefer}
        )
        assert (201, None) == (reply.status, reply.header("preference-applied"))

    with_rig(test)


def test_only_so_many_may_wait() -> None:
    """The preference of the others is not applied."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=5"}
        )
        assert (201, None) == (reply.status, reply.header("preference-applied"))

    with_rig(test, limits=ApiLimits(max_waiting_requests=0))


def test_a_task_that_has_ended_is_told_at_once() -> None:
    """To wait for an existing task that is terminal waits for nothing."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET, "idempotencyKey": "k"}
        await rig.ask("POST", "/retry-tasks", document)
        await rig.die()
        headers = {"Prefer": "wait=30"}
        reply = await rig.ask("POST", "/retry-tasks", document, headers=headers)
        assert (200, "EXHAUSTED") == (reply.status, reply.json["status"])

    with_rig(test)


def test_a_full_quota_asks_to_come_back() -> None:
    """429 with Retry-After; the key of a task that is there is told first."""

    async def test(rig: Rig) -> None:
        await rig.create(idempotencyKey="k")
        full = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET})
        there = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET, "idempotencyKey": "k"})
        assert [429, 200] == [full.status, there.status]
        assert "10" == full.header("retry-after")
        assert "(tenant_pending)" in full.problem["detail"]

    with_rig(test, quota=1)


def test_a_tenant_that_is_too_fast_is_told_when_to_come_back() -> None:
    """Tasks count, also those of a batch; tokens come back with time."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET}
        batch = await rig.ask("POST", "/retry-tasks/batch", {"tasks": [document] * 4})
        refused = await rig.ask("POST", "/retry-tasks", document)
        assert [200, 429] == [batch.status, refused.status]
        assert "2" == refused.header("retry-after")  # 1 - (2 - 4) = 3 tokens, 2 a second
        rig.time.ms += 1_500
        assert 201 == (await rig.ask("POST", "/retry-tasks", document)).status
        assert 5 == await rig.count()

    with_rig(test, limits=ApiLimits(tenant_tasks_per_s=2.0, tenant_burst=2.0))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(Overloaded("10 tasks wait", retry_after=2.5), "3"), (StoreUnavailable("away"), "1")],
)
def test_a_service_that_cannot_take_it_says_so(error: Exception, seconds: str) -> None:
    """503 with Retry-After, and no word of the store's own."""

    async def test(rig: Rig) -> None:
        rig.engine.error = error
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET})
        assert (503, seconds) == (reply.status, reply.header("retry-after"))
        assert "away" not in reply.problem["detail"]

    with_rig(test)


def test_a_mistake_of_ours_is_a_problem_too(caplog: pytest.LogCaptureFixture) -> None:
    """500 without details, which are in the log."""

    async def test(rig: Rig) -> None:
        rig.engine.error = RuntimeError("secret details")
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET})
        assert 500 == reply.status
        assert "secret" not in str(reply.problem)

    with_rig(test)
    assert "secret details" in caplog.text


@pytest.mark.parametrize("more", [[], [5]], ids=["well formed", "not"])
def test_a_batch_gets_one_verdict_each_in_order(more: list[int]) -> None:
    """Each task fares as if it had been sent alone, also beside one that is no task at all."""

    async def test(rig: Rig) -> None:
        tasks = [
            {"targetUrl": TARGET, "idempotencyKey": "a"},
            {"targetUrl": "nonsense"},
            {"targetUrl": TARGET, "idempotencyKey": "a"},
            {"targetUrl": TARGET, "idempotencyKey": "a", "body": "other"},
            {"targetUrl": TARGET, "headers": {"Host": "x"}},
            {"targetUrl": TARGET, "idempotencyKey": "b"},
            *more,
        ]
        reply = await rig.ask("POST", "/retry-tasks/batch", {"tasks": tasks})
        results = reply.json["results"]
        statuses = [201, 422, 200, 422, 422, 201, *(422 for _ in more)]
        assert statuses == [one["status"] for one in results]
        assert results[0]["task"]["taskId"] == results[2]["task"]["taskId"]
        fields = [one["problem"]["field"] for one in results if "problem" in one]
        assert ["targetUrl", "idempotencyKey", "headers.Host", *("" for _ in more)] == fields
        assert 2 == await rig.count()

    with_rig(test)


def test_a_body_that_cannot_be_kept_is_the_trouble_of_its_task_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of a batch is taken; after three in a row no more bodies are tried."""
    caplog.set_level("INFO", "tarry.service")

    async def test(rig: Rig) -> None:
        keep = rig.shelf.put
        tried: list[bytes] = []

        async def put(tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
            tried.append(body)
            if body.startswith(b"bad"):
                raise StoreUnavailable("the disk is full")
            return await keep(tenant, task_id, body)

        monkeypatch.setattr(rig.shelf, "put", put)
        good, bad = ({"targetUrl": TARGET, "body": word * 10_000} for word in ("good", "bad!"))
        small = {"targetUrl": TARGET}
        tasks = [bad, bad, good, bad, small, bad, bad, good, small]
        reply = await rig.ask("POST", "/retry-tasks/batch", {"tasks": tasks})
        results = reply.json["results"]
        statuses = [503, 503, 201, 503, 201, 503, 503, 503, 201]
        assert (200, statuses) == (reply.status, [one["status"] for one in results])
        assert "send it again" in results[0]["problem"]["detail"]
        assert (6, 3, 1) == (len(tried), await rig.count(), len(rig.shelf.bodies))

    with_rig(test)
    assert "index=0: the disk is full" in caplog.text


def test_without_a_key_nothing_is_the_same_again() -> None:
    """No digest is made; the id of such a task is nobody's key, also not for the same content."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET, "body": "x"}
        first = (await rig.ask("POST", "/retry-tasks", document)).json["taskId"]
        second = (await rig.ask("POST", "/retry-tasks", document)).json["taskId"]
        assert first != second
        stored = await rig.store.get_task("default", first)
        assert stored is not None
        assert b"" == stored.fingerprint
        again = await rig.ask("POST", "/retry-tasks", {**document, "idempotencyKey": first})
        assert (422, "idempotencyKey") == (again.status, again.problem["field"])
        large = {"targetUrl": TARGET, "body": "x" * 40_000}
        third = (await rig.ask("POST", "/retry-tasks", large)).json["taskId"]
        elsewhere = await rig.store.get_task("default", third)
        assert elsewhere is not None
        assert b"" == elsewhere.fingerprint

    with_rig(test)


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
def test_a_batch_is_answered_with_ids_alone_for_who_prefers_it(
    prefer: str, is_minimal: bool
) -> None:
    """A hint that was followed is told (RFC 7240, 4.2); problems are told in full all the same."""

    async def test(rig: Rig) -> None:
        tasks = [
            {"targetUrl": TARGET, "idempotencyKey": "a"},
            {"targetUrl": TARGET, "idempotencyKey": "a"},
            {"targetUrl": TARGET, "idempotencyKey": "a", "body": "other"},
        ]
        headers = {"Prefer": prefer}
        reply = await rig.ask("POST", "/retry-tasks/batch", {"tasks": tasks}, headers=headers)
        added, again, other = reply.json["results"]
        if is_minimal:
            assert "return=minimal" == reply.header("preference-applied")
            assert {"status": 201, "taskId": added["taskId"]} == added
            assert {"status": 200, "taskId": added["taskId"]} == again
            assert (await rig.ask("GET", f"/retry-tasks/{added['taskId']}")).status == 200
        else:
            assert reply.header("preference-applied") is None
            assert added["task"]["taskId"] == again["task"]["taskId"]
            assert "taskId" not in added
        assert (422, "idempotencyKey") == (other["status"], other["problem"]["field"])

    with_rig(test)


def test_a_batch_has_bounds() -> None:
    """1,000 tasks and no more; one that is too large for itself is refused alone."""

    async def test(rig: Rig) -> None:
        one = {"targetUrl": TARGET}
        most = await rig.ask("POST", "/retry-tasks/batch", {"tasks": [one] * 1000})
        assert [201] * 1000 == [result["status"] for result in most.json["results"]]
        more = await rig.ask("POST", "/retry-tasks/batch", {"tasks": [one] * 1001})
        assert (422, "tasks") == (more.status, more.problem["field"])
        none = await rig.ask("POST", "/retry-tasks/batch", {"tasks": []})
        assert (200, []) == (none.status, none.json["results"])
        assert 1000 == await rig.count()
        large = {"targetUrl": TARGET, "body": "x" * (1 << 20)}
        mixed = await rig.ask("POST", "/retry-tasks/batch", {"tasks": [large, one]})
        assert [413, 201] == [result["status"] for result in mixed.json["results"]]

    with_rig(test, limits=ApiLimits(max_request_bytes=1 << 20))


def test_a_store_that_fails_after_the_wait_does_not_undo_the_answer() -> None:
    """The task is durable, so the answer is 201 with what is known."""

    async def test(rig: Rig) -> None:
        async def settled(task_id: str, seconds: float) -> None:
            return None

        async def get(tenant: str, task_id: str) -> None:
            msg = "away"
            raise StoreUnavailable(msg)

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        rig.store.get_task = get  # type: ignore[method-assign]
        reply = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"Prefer": "wait=1"}
        )
        assert (201, "PENDING") == (reply.status, reply.json["status"])

    with_rig(test)


def test_a_body_that_cannot_be_deleted_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that is there is told; what is left of the second is swept."""

    async def away(_shelf: FakePayloads, _refs: Sequence[str]) -> None:
        raise StoreUnavailable("away")

    async def test(rig: Rig) -> None:
        first = await rig.create(body="x" * 20_000, idempotencyKey="k")
        monkeypatch.setattr(FakePayloads, "delete", away)
        task = {"targetUrl": TARGET, "body": "x" * 20_000, "idempotencyKey": "k"}
        again = await rig.ask("POST", "/retry-tasks", task)
        batch = await rig.ask("POST", "/retry-tasks/batch", {"tasks": [task]})
        assert (200, first["taskId"]) == (again.status, again.json["taskId"])
        assert [200] == [one["status"] for one in batch.json["results"]]

    with_rig(test)
