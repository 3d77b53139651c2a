"""`/attempts`: the attempts of many tasks."""

from __future__ import annotations

import pytest

from tests.service.api.harness import NOW, ApiHarness
from tests.service.api.test_tasks import read_all_pages


async def test_attempts_of_all_tasks_are_listed(api: ApiHarness) -> None:
    """Attempts are listed without texts, in pages; filters select their tasks."""
    first = (await api.create(idempotencyKey="k"))["taskId"]
    await api.exhaust_due_tasks(excerpt="secret")
    await api.request("POST", f"/retry-tasks/{first}/retry")
    await api.exhaust_due_tasks()
    api.time.ms += 1_000
    second = (await api.create(targetUrl="https://example.org/", policyId="webhook"))["taskId"]
    await api.exhaust_due_tasks()
    await api.create()

    async def list_attempts(query: str) -> list[tuple[str, int]]:
        pages = await read_all_pages(api, f"/attempts?{query}")
        return [(item["taskId"], item["attemptNumber"]) for page in pages for item in page]

    for limit in (1, 2, 100):
        assert [(second, 1), (first, 1), (first, 2)] == await list_attempts(f"limit={limit}")
    assert [(second, 1)] == await list_attempts("lane=https:example.org:443")
    assert [(second, 1)] == await list_attempts("policyId=webhook")
    assert [(first, 1), (first, 2)] == await list_attempts("idempotencyKey=k")
    assert [(second, 1)] == await list_attempts(f"createdAfter={NOW + 1}")
    assert [] == await list_attempts("status=PENDING")
    items = (await api.request("GET", "/attempts")).json["items"]
    assert [None] * 3 == [item["responseExcerpt"] for item in items]
    assert [503] * 3 == [item["responseStatus"] for item in items]


@pytest.mark.parametrize(
    ("query", "field"),
    [("cursor=x", "cursor"), ("createdAfter=5", "createdAfter"), ("urlPrefix=x", "urlPrefix")],
)
async def test_an_invalid_query_is_422(api: ApiHarness, query: str, field: str) -> None:
    """The problem names the field."""
    response = await api.request("GET", f"/attempts?{query}")
    assert (422, field) == (response.status, response.problem["field"])
