"""Errors of JSON and query parameters name the field and the valid values."""

from __future__ import annotations

import pytest

from tests.service.api.harness import TARGET, ApiHarness, run_with_api


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("status=pending", "CANCELLED or EXHAUSTED or IN_FLIGHT or PENDING or SUCCEEDED"),
        ("reason=bogus", "permanent or overloaded or"),
    ],
)
def test_an_unknown_value_lists_the_valid_ones(query: str, values: str) -> None:
    """An empty list would look as if there were no such tasks."""

    async def test(api: ApiHarness) -> None:
        detail = (await api.request("GET", f"/retry-tasks?{query}")).problem["detail"]
        assert f"must be {values}" in detail

    run_with_api(test)


@pytest.mark.parametrize("place", ["body", "headers", "policy"])
def test_deeply_nested_json_is_never_500(place: str) -> None:
    """It is accepted or rejected, alone and in a batch."""

    async def test(api: ApiHarness) -> None:
        for depth in (10, 300, 500, 700, 800, 900, 950, 980, 1_000, 2_000):
            nested = "[" * depth + "]" * depth
            field = {"headers": "X-A", "policy": "maxAttempts"}.get(place)
            value = nested if field is None else f'{{"{field}": {nested}}}'
            task = f'{{"targetUrl": "{TARGET}", "{place}": {value}}}'
            alone = await api.request("POST", "/retry-tasks", body=task.encode())
            assert alone.status in {201, 400, 422}
            batch = await api.request(
                "POST", "/retry-tasks/batch", body=f'{{"tasks": [{task}]}}'.encode()
            )
            assert batch.status in {200, 400}
            if batch.status == 200:
                assert batch.json["results"][0]["status"] in {201, 400, 422}

    run_with_api(test)
