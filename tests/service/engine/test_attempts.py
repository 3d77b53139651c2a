from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.model import Status
from tests.service.engine.harness import (
    BUSY,
    OK,
    EngineHarness,
    FakeTarget,
    decision_fields,
)


async def test_failure_is_retried_with_the_same_key() -> None:
    """After a 503 and the policy's delay, attempt 2 is sent; the log has both attempts."""
    target = FakeTarget(BUSY, OK)
    harness = EngineHarness(target)
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(5)

    first, second = target.requests
    assert ["Idempotency-Key", "X-Retry-Attempt"] == list(first.headers)
    assert "1" == first.headers["X-Retry-Attempt"]
    assert first.headers | {"X-Retry-Attempt": "2"} == second.headers
    finished = await harness.get_task(task)
    assert (Status.SUCCEEDED, 2) == (finished.status, finished.attempts)
    log = await harness.list_attempts(task)
    assert ["transient", "success"] == [attempt.outcome for attempt in log]
    assert "wait" == decision_fields(log[0])["action"]
    assert log[1].started_at >= log[1].scheduled_at
    waited_ms = log[1].scheduled_at - log[0].started_at
    assert 0 <= waited_ms - decision_fields(log[0])["delay_ms"] < 2


async def test_attempts_of_the_caller_are_counted() -> None:
    """The number in `X-Retry-Attempt` includes the attempts that the caller made itself."""
    target = FakeTarget(BUSY, OK)
    harness = EngineHarness(target)
    (task,) = await harness.add(harness.new_task(prior_attempts=2))
    await asyncio.sleep(5)

    numbers = [dict(request.headers)["X-Retry-Attempt"] for request in target.requests]
    assert ["3", "4"] == numbers
    assert [1, 2] == [attempt.attempt_number for attempt in await harness.list_attempts(task)]


@pytest.mark.parametrize(
    ("key", "overrides", "header"),
    [
        ("order-7", {}, ("Idempotency-Key", "order-7")),
        ("order 7", {}, ("Idempotency-Key", "order 7")),
        ('"order-7"', {}, ("Idempotency-Key", '"order-7"')),
        ("order-7", {"idempotencyKeyFormat": "QUOTED"}, ("Idempotency-Key", '"order-7"')),
        ('a"7', {"idempotencyKeyFormat": "QUOTED"}, ("Idempotency-Key", '"a\\"7"')),
        ('"order-7"', {"idempotencyKeyFormat": "QUOTED"}, ("Idempotency-Key", '"order-7"')),
        ("order-7", {"idempotencyKeyHeader": "X-Request-Id"}, ("X-Request-Id", "order-7")),
    ],
)
async def test_key_is_sent_as_written(
    key: str, overrides: dict[str, Any], header: tuple[str, str]
) -> None:
    """The key has quotes only if the caller wrote them or the policy requires them."""
    target = FakeTarget()
    harness = EngineHarness(target)
    await harness.add(harness.new_task(key=key, overrides=overrides))
    await asyncio.sleep(1)

    (request,) = target.requests
    assert [header, ("X-Retry-Attempt", "1")] == list(request.headers.items())


@pytest.mark.parametrize("name", ["x-request-id", "X-Request-ID", "X_Request_Id"])
async def test_header_of_the_task_does_not_replace_the_key(name: str) -> None:
    """If the policy names a header that the task also has, only the key is sent."""
    target = FakeTarget()
    harness = EngineHarness(target)
    overrides = {"idempotencyKeyHeader": "X-Request-Id"}
    headers = {"x-a": "1", name: "other"}
    await harness.add(harness.new_task(key="k", overrides=overrides, headers=headers))
    await asyncio.sleep(1)

    (request,) = target.requests
    assert [("x-a", "1"), ("X-Request-Id", "k")] == list(request.headers.items())[:2]


async def test_task_is_exhausted_after_the_last_attempt() -> None:
    """After its last attempt, a task is a dead letter with the reason `attempts`."""
    target = FakeTarget(BUSY)
    harness = EngineHarness(target)
    overrides = {"maxAttempts": 3, "initialDelayMs": 100}
    (task,) = await harness.add(harness.new_task(overrides=overrides))
    await asyncio.sleep(60)

    finished = await harness.get_task(task)
    assert (Status.EXHAUSTED, "attempts", 3) == (
        finished.status,
        finished.reason,
        finished.attempts,
    )
    assert 3 == len(target.requests)
    assert "stop" == decision_fields((await harness.list_attempts(task))[-1])["action"]
    assert "exhausted" == harness.event_kinds()[-1]


async def test_permanent_responses_end_a_task() -> None:
    """A 404, a 410, a redirect or `x-should-retry: false` ends a task after one attempt."""
    responses_by_reason = {
        "permanent": [
            DeliveryResult(status=404),
            DeliveryResult(status=302),
            DeliveryResult(status=410),
        ],
        "overloaded": [DeliveryResult(status=503, headers=[("x-should-retry", "false")])],
    }
    for reason, responses in responses_by_reason.items():
        for response in responses:
            harness = EngineHarness(FakeTarget(response))
            (task,) = await harness.add(harness.new_task())
            await asyncio.sleep(60)
            finished = await harness.get_task(task)
            assert (Status.EXHAUSTED, reason) == (finished.status, finished.reason)
            assert 1 == finished.attempts


async def test_success_status_that_the_policy_retries_is_a_failure() -> None:
    """A 202 in `retryableStatusCodes` is retried; the log has the jitter that was applied."""
    target = FakeTarget(DeliveryResult(status=202), DeliveryResult(status=200))
    harness = EngineHarness(target)
    overrides = {"retryableStatusCodes": [202], "jitterType": "EQUAL"}
    (task,) = await harness.add(harness.new_task(overrides=overrides))
    await asyncio.sleep(60)

    assert (Status.SUCCEEDED, 2) == (
        (await harness.get_task(task)).status,
        (await harness.get_task(task)).attempts,
    )
    assert "equal" == decision_fields((await harness.list_attempts(task))[0])["jitter"]


async def test_blocked_address_is_not_retried() -> None:
    """A task whose target address is blocked ends after one attempt."""
    harness = EngineHarness(
        FakeTarget(DeliveryResult(fault=Fault.BLOCKED, error="10.0.0.1 is private"))
    )
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(60)

    assert (Status.EXHAUSTED, "permanent") == (
        (await harness.get_task(task)).status,
        (await harness.get_task(task)).reason,
    )
    (attempt,) = await harness.list_attempts(task)
    assert ("blocked", "10.0.0.1 is private") == (attempt.error_class, attempt.error_message)


@pytest.mark.parametrize(
    ("response", "logged"),
    [
        (DeliveryResult(status=404, excerpt=b"gone"), ("gone", False)),
        (DeliveryResult(status=404, excerpt=b"g" * 512), ("g" * 512, False)),
        (DeliveryResult(status=404, excerpt=b"g" * 513), ("g" * 512, True)),
        (DeliveryResult(status=404, excerpt=b"go\nne", truncated=True), ("go ne", True)),
        (DeliveryResult(status=404), (None, False)),
        (DeliveryResult(status=200, excerpt=b"fine", truncated=True), (None, False)),
    ],
)
async def test_attempt_log_has_an_excerpt_of_a_failed_response(
    response: DeliveryResult, logged: tuple[str | None, bool]
) -> None:
    """The log has up to 512 characters of a failed response, and marks a truncated excerpt."""
    harness = EngineHarness(FakeTarget(response))
    [task] = await harness.add(harness.new_task())
    await asyncio.sleep(1)
    [attempt] = await harness.list_attempts(task)
    assert logged == (attempt.response_excerpt, attempt.response_truncated)
