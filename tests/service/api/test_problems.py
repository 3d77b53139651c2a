"""Problems about JSON fields and query parameters."""

from __future__ import annotations

import pytest

from tests.service.api.harness import TARGET, ApiHarness


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("status=pending", "CANCELLED or EXHAUSTED or IN_FLIGHT or PENDING or SUCCEEDED"),
        ("reason=bogus", "permanent or overloaded or"),
    ],
)
async def test_the_problem_of_an_unknown_value_lists_the_valid_values(
    api: ApiHarness, query: str, values: str
) -> None:
    """An unknown filter value is an error, because an empty list would be misleading."""
    detail = (await api.request("GET", f"/retry-tasks?{query}")).problem["detail"]
    assert f"must be {values}" in detail


@pytest.mark.parametrize("name", ["body", "headers", "policy"])
async def test_deeply_nested_json_is_never_500(api: ApiHarness, name: str) -> None:
    """Nested JSON of any depth is accepted or rejected, alone and in a batch."""
    for depth in (10, 300, 500, 700, 800, 900, 950, 980, 1_000, 2_000):
        nested = "[" * depth + "]" * depth
        field = {"headers": "X-A", "policy": "maxAttempts"}.get(name)
        value = nested if field is None else f'{{"{field}": {nested}}}'
        task = f'{{"targetUrl": "{TARGET}", "{name}": {value}}}'
        alone = await api.request("POST", "/retry-tasks", body=task.encode())
        assert alone.status in {201, 400, 422}
        batch = await api.request(
            "POST", "/retry-tasks/batch", body=f'{{"tasks": [{task}]}}'.encode()
        )
        assert batch.status in {200, 400}
        if batch.status == 200:
            assert batch.json["results"][0]["status"] in {201, 400, 422}
