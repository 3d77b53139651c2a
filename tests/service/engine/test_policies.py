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
    """A new version is used within a second, also if another process wrote it."""

    async def main() -> None:
        from tarry.service.model import PolicyVersion

        target = FakeTarget(BUSY)
        harness = EngineHarness(target)
        await harness.engine.start()
        document = msgspec.json.encode({"maxAttempts": 50, "maxDelayMs": 1000})
        await harness.store.put_policy(
            PolicyVersion(tenant="default", id="p", version=1, document=document), replace=False
        )
        (task,) = await harness.add(harness.new_task(policy_id="p"))
        await asyncio.sleep(6)
        assert Status.EXHAUSTED is not (await harness.task(task)).status

        document = msgspec.json.encode({"maxAttempts": 2})
        await harness.store.put_policy(
            PolicyVersion(tenant="default", id="p", version=2, document=document), replace=True
        )
        await asyncio.sleep(60)
        ended = await harness.task(task)
        assert (Status.EXHAUSTED, "attempts") == (ended.status, ended.reason)
        assert ended.attempts < 20
        await harness.engine.stop(1)

    run(main)


def test_deleted_policy_is_replaced_by_the_default() -> None:
    """The task continues with the default policy, without a busy loop."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(BUSY))
        (task,) = await harness.add(harness.new_task(policy_id="gone"))
        await asyncio.sleep(60)

        ended = await harness.task(task)
        assert (Status.EXHAUSTED, 5) == (ended.status, ended.attempts)

    run(main)


def test_overrides_invalid_with_a_new_policy_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task uses the policy without them, and no other task is affected."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(OK))
        await harness.engine.start()
        document = msgspec.json.encode({"initialDelayMs": 5000, "maxDelayMs": 30_000})
        policy = PolicyVersion(tenant="default", id="p", version=1, document=document)
        await harness.store.put_policy(policy, replace=False)
        odd = harness.new_task(overrides={"maxDelayMs": 1000}, policy_id="p")

        tasks = await harness.add(odd, harness.new_task("http://b.example:80/"))
        await asyncio.sleep(5)

        assert [Status.SUCCEEDED] * 2 == [(await harness.task(task)).status for task in tasks]
        await harness.engine.stop(1)

    run(main)
    assert "policy overrides ignored" in caplog.text
