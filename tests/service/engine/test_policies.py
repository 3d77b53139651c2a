from __future__ import annotations

import asyncio

import msgspec
import pytest

from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.model import PolicyVersion, Status
from tarry.service.store import StoredTaskFilter
from tests.service.engine.harness import (
    BUSY,
    OK,
    EngineHarness,
    FakeTarget,
)


@pytest.mark.parametrize("outage_s", [5, 600])
async def test_default_policy_outlasts_an_outage(outage_s: float) -> None:
    """A task without a policy and its callback are delivered after an outage of their targets."""
    first_request_at: dict[str, float] = {}

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        now = asyncio.get_running_loop().time()
        return BUSY if now < first_request_at.setdefault(request.url, now) + outage_s else OK

    harness = EngineHarness(FakeTarget(respond))
    await harness.engine.start()
    await harness.add(harness.new_task(callback_url="http://callback.example/"))
    await asyncio.sleep(3600)
    page = await harness.store.list_tasks("default", StoredTaskFilter())
    assert [Status.SUCCEEDED] * 2 == [task.status for task in page.items]
    await harness.engine.stop(1)


async def test_changed_policy_applies_to_the_next_decision() -> None:
    """A version that was written to the store directly applies to the next decision."""
    target = FakeTarget(BUSY)
    harness = EngineHarness(target)
    await harness.engine.start()
    document = msgspec.json.encode({"maxAttempts": 50, "maxDelayMs": 1000})
    await harness.store.put_policy(
        PolicyVersion(tenant="default", id="p", version=1, document=document), replace=False
    )
    (task,) = await harness.add(harness.new_task(policy_id="p"))
    await asyncio.sleep(6)
    assert Status.EXHAUSTED is not (await harness.get_task(task)).status

    document = msgspec.json.encode({"maxAttempts": 2})
    await harness.store.put_policy(
        PolicyVersion(tenant="default", id="p", version=2, document=document), replace=True
    )
    await asyncio.sleep(60)
    finished = await harness.get_task(task)
    assert (Status.EXHAUSTED, "attempts") == (finished.status, finished.reason)
    assert finished.attempts < 20
    await harness.engine.stop(1)


async def test_missing_policy_is_replaced_by_the_default() -> None:
    """A task whose policy does not exist uses the default policy."""
    harness = EngineHarness(FakeTarget(BUSY))
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(policy_id="missing"))
    await asyncio.sleep(60)

    unfinished = await harness.get_task(task)
    assert unfinished.status in {Status.PENDING, Status.IN_FLIGHT}
    assert unfinished.attempts > 5
    await harness.engine.stop(1)


async def test_stored_policies_without_limits_are_loaded() -> None:
    """Numbers that an older version has stored in policies and overrides are limited when read."""
    document = b'{"maxAttempts": 200000, "initialDelayMs": 0.0001}'

    harness = EngineHarness(FakeTarget(OK))
    stored = PolicyVersion(tenant="default", id="p", version=1, document=document)
    await harness.store.put_policy(stored, replace=False)
    task = harness.new_task(policy_id="p").task
    policies = harness.engine.policies
    await policies.load_for_task(task)
    for overrides in (None, msgspec.json.decode(document)):
        effective_policy = policies.get_cached(task, overrides)
        assert effective_policy is not None
        policy = effective_policy.policy
        assert (100_000, 1e-6) == (policy.max_attempts, policy.initial_delay)


async def test_overrides_that_are_invalid_with_the_policy_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = EngineHarness(FakeTarget(OK))
    await harness.engine.start()
    policy = PolicyVersion(tenant="default", id="p", version=1, document=b"{}")
    await harness.store.put_policy(policy, replace=False)
    # Valid when the policy of the task had a schedule.
    invalid = harness.new_task(overrides={"backoffType": "SCHEDULE"}, policy_id="p")

    tasks = await harness.add(invalid, harness.new_task("http://b.example:80/"))
    await asyncio.sleep(5)

    assert [Status.SUCCEEDED] * 2 == [(await harness.get_task(task)).status for task in tasks]
    await harness.engine.stop(1)
    assert "policy overrides ignored" in caplog.text


async def test_task_waits_while_its_policy_cannot_be_decoded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task is released, so that it is started when a valid policy is stored."""
    harness = EngineHarness(FakeTarget(OK))
    await harness.engine.start()
    newer = PolicyVersion(tenant="default", id="p", version=1, document=b'{"newField": 1}')
    await harness.store.put_policy(newer, replace=False)

    (task,) = await harness.add(harness.new_task(policy_id="p"))
    await asyncio.sleep(5)
    waiting = await harness.get_task(task)
    assert (Status.PENDING, 0) == (waiting.status, waiting.attempts)

    valid = PolicyVersion(tenant="default", id="p", version=2, document=b"{}")
    await harness.store.put_policy(valid, replace=True)
    await asyncio.sleep(61)
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await harness.engine.stop(1)
    (message,) = caplog.messages
    assert message.startswith("policy or secrets could not be loaded, will retry, tenant=default")
