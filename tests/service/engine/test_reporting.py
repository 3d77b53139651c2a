from __future__ import annotations

from tarry.service.delivery import DeliveryResult
from tarry.service.model import Status
from tests.service.engine.harness import (
    BUSY,
    EngineHarness,
    FakeTarget,
)


async def test_waiting_caller_gets_the_status_and_the_response() -> None:
    """A caller gets the finished task and its response, or None after a timeout."""
    harness = EngineHarness(FakeTarget(BUSY, DeliveryResult(status=201, excerpt=b"created")))
    (task,) = await harness.add(harness.new_task())
    assert await harness.engine.wait_until_finished(task.id, 0.0) is None
    finished_task = await harness.engine.wait_until_finished(task.id, 60)
    assert finished_task is not None
    assert finished_task.delivery_result is not None
    assert (Status.SUCCEEDED, b"created") == (
        finished_task.status,
        finished_task.delivery_result.excerpt,
    )


async def test_cancel_publishes_an_event() -> None:
    """Listeners get an event for a cancelled task, whether it is leased or in the store."""
    harness = EngineHarness(FakeTarget())
    near, far = await harness.add(
        harness.new_task(delay_ms=500), harness.new_task(delay_ms=500_000)
    )
    for task in (near, far):
        await harness.engine.cancel("default", task.id)

    assert ["added", "added", "cancelled", "cancelled"] == harness.event_kinds()
