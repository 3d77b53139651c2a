"""`AsyncClient` on trio."""

from __future__ import annotations

import pytest
import trio

from tarry.client import AsyncClient
from tests.client.fake_service import FakeService, task_json

HOOK = "https://example.com/hook"


@pytest.mark.usefixtures("_no_wait")
def test_on_trio(service: FakeService) -> None:
    """Retries, pages and waits work on trio as on asyncio."""
    states = iter(["PENDING", "SUCCEEDED"])
    service.responses["GET /retry-tasks/a"] = lambda _: (200, task_json(1, status=next(states)))
    service.responses["GET /retry-tasks"] = (200, {"items": [task_json(1)], "nextCursor": None})
    service.faults.append("drop")

    async def main() -> None:
        async with AsyncClient(service.url) as client:
            task = await client.enqueue(HOOK)
            assert [task.idempotency_key] == list(service.tasks)
            assert "SUCCEEDED" == (await client.wait("a")).status
            assert [task.task_id] == [one.task_id async for one in client.tasks()]

    trio.run(main)
    assert 5 == len(service.requests)
