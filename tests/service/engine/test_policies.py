from __future__ import annotations

import asyncio

import msgspec
import pytest

from tarry.service.model import PolicyVersion, Status
from tests.service.engine.harness import (
    BUSY,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)


def test_changed_policy_applies_to_the_next_decision() -> None:
    """A version that was written to the store directly applies to the next decision."""

    async def main() -> None:
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

    run(main)


def test_missing_policy_is_replaced_by_the_default() -> None:
    """A task whose policy does not exist uses the default policy."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(BUSY))
        (task,) = await harness.add(harness.new_task(policy_id="missing"))
        await asyncio.sleep(60)

        finished = await harness.get_task(task)
        assert (Status.EXHAUSTED, 5) == (finished.status, finished.attempts)

    run(main)


def test_overrides_that_are_invalid_with_the_policy_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Overrides that are invalid with the policy are logged and ignored."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(OK))
        await harness.engine.start()
        document = msgspec.json.encode({"initialDelayMs": 5000, "maxDelayMs": 30_000})
        policy = PolicyVersion(tenant="default", id="p", version=1, document=document)
        await harness.store.put_policy(policy, replace=False)
        invalid = harness.new_task(overrides={"maxDelayMs": 1000}, policy_id="p")

        tasks = await harness.add(invalid, harness.new_task("http://b.example:80/"))
        await asyncio.sleep(5)

        assert [Status.SUCCEEDED] * 2 == [(await harness.get_task(task)).status for task in tasks]
        await harness.engine.stop(1)

    run(main)
    assert "policy overrides ignored" in caplog.text
