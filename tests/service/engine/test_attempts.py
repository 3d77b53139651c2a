from __future__ import annotations

import asyncio

import pytest

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.model import Status
from tests.service.engine.harness import (
    BUSY,
    OK,
    EngineHarness,
    FakeTarget,
    decision_fields,
    run,
)


def test_failure_is_retried_with_the_same_key() -> None:
    """A 503 is followed by the policy's delay and attempt 2; the log has both."""

    async def main() -> None:
        target = FakeTarget(BUSY, OK)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(5)

        first, second = target.requests
        assert first.headers[0] == second.headers[0]
        assert [("X-Retry-Attempt", "1")] == first.headers[1:]
        assert [("X-Retry-Attempt", "2")] == second.headers[1:]
        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 2) == (ended.status, ended.attempts)
        log = await harness.attempts(task)
        assert ["transient", "success"] == [attempt.outcome for attempt in log]
        assert "wait" == decision_fields(log[0])["action"]
        assert log[1].started_at >= log[1].scheduled_at
        waited = log[1].scheduled_at - log[0].started_at
        assert 0 <= waited - decision_fields(log[0])["delay_ms"] < 2

    run(main)


def test_task_is_exhausted_after_the_last_attempt() -> None:
    """After the last attempt the task is a dead letter, with the core's reason."""

    async def main() -> None:
        target = FakeTarget(BUSY)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(overrides={"maxAttempts": 3}))
        await asyncio.sleep(60)

        ended = await harness.task(task)
        assert (Status.EXHAUSTED, "attempts", 3) == (ended.status, ended.reason, ended.attempts)
        assert 3 == len(target.requests)
        assert "stop" == decision_fields((await harness.attempts(task))[-1])["action"]
        assert "exhausted" == harness.event_kinds()[-1]

    run(main)


def test_permanent_responses_end_a_task() -> None:
    """A 404, a 410, a redirect and x-should-retry: false end a task at once."""

    async def main() -> None:
        responses_by_reason = {
            "permanent": [
                DeliveryResult(status=404),
                DeliveryResult(status=302),
                DeliveryResult(status=410),
            ],
            "overloaded": [DeliveryResult(status=503, headers=[("x-should-retry", "false")])],
        }
        for reason, answers in responses_by_reason.items():
            for answer in answers:
                harness = EngineHarness(FakeTarget(answer))
                (task,) = await harness.add(harness.new_task())
                await asyncio.sleep(60)
                ended = await harness.task(task)
                assert (Status.EXHAUSTED, reason) == (ended.status, ended.reason)
                assert 1 == ended.attempts

    run(main)


def test_success_status_that_the_policy_retries_is_a_failure() -> None:
    """A 202 in retryable_statuses is retried; the log has the jitter that applied."""

    async def main() -> None:
        target = FakeTarget(DeliveryResult(status=202), DeliveryResult(status=200))
        harness = EngineHarness(target)
        overrides = {"retryableStatusCodes": [202], "jitterType": "EQUAL"}
        (task,) = await harness.add(harness.new_task(overrides=overrides))
        await asyncio.sleep(60)

        assert (Status.SUCCEEDED, 2) == (
            (await harness.task(task)).status,
            (await harness.task(task)).attempts,
        )
        assert "equal" == decision_fields((await harness.attempts(task))[0])["jitter"]

    run(main)


def test_blocked_address_is_not_retried() -> None:
    """A target that the guard refuses ends the task."""

    async def main() -> None:
        harness = EngineHarness(
            FakeTarget(DeliveryResult(fault=Fault.BLOCKED, error="10.0.0.1 is private"))
        )
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(60)

        assert (Status.EXHAUSTED, "permanent") == (
            (await harness.task(task)).status,
            (await harness.task(task)).reason,
        )
        (attempt,) = await harness.attempts(task)
        assert ("blocked", "10.0.0.1 is private") == (attempt.error_class, attempt.error)

    run(main)


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        (DeliveryResult(status=404, excerpt=b"gone"), ("gone", False)),
        (DeliveryResult(status=404, excerpt=b"g" * 512), ("g" * 512, False)),
        (DeliveryResult(status=404, excerpt=b"g" * 513), ("g" * 512, True)),
        (DeliveryResult(status=404, excerpt=b"go\nne", truncated=True), ("go ne", True)),
        (DeliveryResult(status=404), (None, False)),
        (DeliveryResult(status=200, excerpt=b"fine", truncated=True), (None, False)),
    ],
)
def test_attempt_log_marks_a_truncated_excerpt(
    answer: DeliveryResult, logged: tuple[str | None, bool]
) -> None:
    """It has 512 characters of a failed response, and none of a successful one."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(answer))
        [task] = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        [attempt] = await harness.attempts(task)
        assert logged == (attempt.excerpt, attempt.truncated)

    run(main)
