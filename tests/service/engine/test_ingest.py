from __future__ import annotations

import asyncio
from typing import Any

from tarry.service.model import Status
from tests.service.engine.harness import (
    OK,
    EngineHarness,
    FakeTarget,
    run,
)


def test_new_task_is_sent_without_a_claim() -> None:
    """A due task is sent at once, with its idempotency key and attempt number."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(body=b"hello", headers={"x-a": "1"}))
        await asyncio.sleep(0.1)

        (request,) = target.requests
        assert ("http://a.example:80/", "POST", b"hello") == (
            request.url,
            request.method,
            request.body,
        )
        ours = [("Idempotency-Key", f'"{task.key}"'), ("X-Retry-Attempt", "1")]
        assert [("x-a", "1"), *ours] == request.headers
        assert Status.SUCCEEDED is (await harness.task(task)).status
        assert ["added", "attempt", "succeeded"] == harness.event_kinds()

    run(main)


def test_cancelled_caller_does_not_stop_its_task() -> None:
    """The task is leased to this process, so this process sends it at once."""

    async def main() -> None:
        target = FakeTarget(OK)
        harness = EngineHarness(target)
        add, written = harness.store.add, asyncio.Event()

        async def add_slowly(*args: Any, **options: Any) -> Any:
            await written.wait()
            return await add(*args, **options)

        harness.store.add = add_slowly  # type: ignore[method-assign]
        adding = asyncio.ensure_future(harness.add(harness.new_task()))
        await asyncio.sleep(1)
        adding.cancel()
        await asyncio.wait([adding])
        written.set()
        await asyncio.sleep(1)

        assert adding.cancelled()
        assert 1 == len(target.requests)

    run(main)
