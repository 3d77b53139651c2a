"""`GET /overview`: series of all tenants, and the current backlog."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.service.api.auth import api_key_digest
from tarry.service.api.overview import estimate_lag
from tarry.service.model import ApiKeyRecord, AttemptRecord, DecisionRecord
from tarry.service.records.api_keys import put_api_key
from tarry.service.records.series import SeriesPoint, record_series
from tests.service.api.harness import NOW, ApiHarness

LANE = "default/https:example.com:443"
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
SUMS = {
    "attempts.success": 3,
    "attempts.transient": 2,
    "finished.succeeded.first": 2,
    "finished.succeeded.retried": 1,
    "finished.exhausted.first": 1,
    "finished.exhausted.retried": 4,
    "finished.cancelled.first": 1,
    "lag.1": 50,
    "lag.5": 50,
    "delay.500": 1,
    "delay.1000": 1,
    "delay.inf": 2,
    "samples": 2,
    "backlog.PENDING": 5,
    "backlog.IN_FLIGHT": 2,
    "backlog.EXHAUSTED": 8,
    "backlog.age_ms": 3_000,
}
POINT = {
    "attempts": {"success": 3, "transient": 2},
    "succeededFirst": 2,
    "succeededRetried": 1,
    "exhausted": 5,
    "cancelled": 1,
    "lagP50Ms": 1.0,
    "lagP99Ms": 4.94,
    "pending": 2.5,
    "inFlight": 1.0,
    "deadLetters": 4.0,
    "oldestDueAgeMs": 1500.0,
}


async def get_overview(api: ApiHarness, query: str = "") -> dict[str, Any]:
    """Return the overview, which must not be a response that was built before."""
    api.time.ms += 1000
    response = await api.request("GET", f"/overview{query}")
    assert 200 == response.status, response.body
    found: dict[str, Any] = response.json
    return found


async def test_the_overview_has_a_point_for_each_interval(api: ApiHarness) -> None:
    """A point has attempts by outcome, finished tasks, lag, and averages of the backlog."""
    at = NOW - MINUTE_MS
    await record_series(
        api.store,
        [SeriesPoint(10_000, at, SUMS), SeriesPoint(10_000, NOW - 2 * HOUR_MS, {"lag.1": 1})],
    )
    await api.create()
    overview = await get_overview(api)
    assert [{"at": at, **POINT}] == overview["points"]
    assert ("1h", 10_000) == (overview["range"], overview["stepMs"])
    assert NOW - HOUR_MS <= overview["from"] < overview["to"] == NOW + 1000
    assert (1.0, 4.94) == (overview["lagP50Ms"], overview["lagP99Ms"])
    delays = [(bucket["upToMs"], bucket["count"]) for bucket in overview["delays"]]
    assert [(500, 1), (700, 0), (1000, 1)] == delays[:3]
    assert [(604_800_000, 0), (None, 2)] == delays[-2:]
    assert 1 == overview["current"]["pending"]


@pytest.mark.parametrize(
    ("time_range", "step_ms"),
    [("15m", 10_000), ("1h", 10_000), ("3h", 30_000), ("24h", 300_000), ("7d", 1_800_000)],
)
async def test_the_number_of_points_is_bounded(
    api: ApiHarness, time_range: str, step_ms: int
) -> None:
    """A longer range has longer intervals, whose sums are those of the stored intervals."""
    stored_step_ms = 10_000 if step_ms < 300_000 else 300_000
    await record_series(
        api.store,
        [
            SeriesPoint(stored_step_ms, NOW - number * stored_step_ms, {"attempts.success": 1})
            for number in range(2_500)
        ],
    )
    overview = await get_overview(api, f"?range={time_range}")
    points, start = overview["points"], overview["from"]
    assert step_ms == overview["stepMs"]
    assert 0 == start % step_ms
    assert (overview["to"] - start) // step_ms - 1 <= len(points) <= 362
    counts = {point["attempts"]["success"] for point in points[1:-1]}
    assert {step_ms // stored_step_ms} == counts
    assert points[0]["at"] >= start


async def test_the_overview_includes_counts_of_this_process_at_once(api: ApiHarness) -> None:
    """An attempt is in the overview before the process has added its counts to the store."""
    assert [] == (await get_overview(api))["points"]
    attempt = AttemptRecord(
        attempt_number=1, scheduled_at=NOW, started_at=NOW, duration_ms=1.0, outcome="transient",
        decision=DecisionRecord(action="wait", delay_ms=40.0),
    )  # fmt: skip
    api.engine.reporter.metrics.record_attempt(attempt, "default", LANE)
    overview = await get_overview(api)
    [point] = overview["points"]
    assert {"transient": 1} == point["attempts"]
    assert None is point["pending"]
    assert [{"upToMs": 50, "count": 1}] == overview["delays"]


async def test_a_response_is_used_again_for_a_moment(api: ApiHarness) -> None:
    """Requests within 0.4 seconds get the same response, so that many dashboards cost little."""
    first = await api.request("GET", "/overview")
    await api.create()
    assert first.body == (await api.request("GET", "/overview")).body
    assert 1 == (await get_overview(api))["current"]["pending"]


async def test_a_tenant_reads_only_its_own_figures() -> None:
    """With API keys, only the operator gets the series of all tenants; others their attempts."""
    api = ApiHarness(keys=True, operator="ops")
    found = {}
    await record_series(api.store, [SeriesPoint(10_000, NOW, SUMS)])
    for tenant in ("ops", "acme", "beta"):
        digest = api_key_digest(f"key of {tenant}")
        await put_api_key(api.store, ApiKeyRecord(id=tenant, tenant=tenant, digest=digest))
    headers = {"Authorization": "Bearer key of acme"}
    body = {"targetUrl": "https://example.com/"}
    await api.request("POST", "/retry-tasks", body, headers=headers)
    await api.exhaust_due_tasks()
    for tenant in ("ops", "acme", "beta"):
        headers = {"Authorization": f"Bearer key of {tenant}"}
        found[tenant] = (await api.request("GET", "/overview", headers=headers)).json
    assert 401 == (await api.request("GET", "/overview")).status
    assert ["all", "tenant", "tenant"] == [each["scope"] for each in found.values()]
    assert {"success": 3, "transient": 2} == found["ops"]["points"][0]["attempts"]
    [point] = found["acme"]["points"]
    assert (NOW, {"transient": 1}) == (point["at"], point["attempts"])
    assert {None} == {point[name] for name in POINT if name != "attempts"}
    assert (60_000, []) == (found["acme"]["stepMs"], found["beta"]["points"])
    dead_letters = [each["current"]["deadLetters"] for each in found.values()]
    assert [1, 1, 0] == dead_letters


async def test_the_number_of_cached_responses_is_bounded(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest response is dropped when responses of many tenants and ranges are cached."""
    monkeypatch.setattr("tarry.service.api.overview._MAX_CACHED_RESPONSES", 2)

    for time_range in ("15m", "1h", "3h"):
        await api.request("GET", f"/overview?range={time_range}")
    await api.create()
    pending = [
        (await api.request("GET", f"/overview?range={name}")).json["current"]["pending"]
        for name in ("3h", "1h", "15m")
    ]
    assert [0, 0, 1] == pending


@pytest.mark.parametrize("query", ["?range=2h", "?range=", "?since=0"])
async def test_an_unknown_range_is_rejected(api: ApiHarness, query: str) -> None:
    """A range or parameter that does not exist gets a 422."""
    assert 422 == (await api.request("GET", f"/overview{query}")).status


async def test_the_error_of_an_unknown_range_lists_the_ranges(api: ApiHarness) -> None:
    """The problem of an invalid range says which ranges exist."""
    response = await api.request("GET", "/overview?range=2h")
    assert "range must be 15m or 1h or 3h or 24h or 7d." == response.problem["detail"]


@pytest.mark.parametrize(
    ("sums", "p50", "p99"),
    [
        ({}, None, None),
        ({"lag.1": 4}, 0.5, 0.99),
        ({"lag.1": 50, "lag.10": 50}, 1.0, 9.9),
        ({"lag.60000": 1, "lag.inf": 99}, 60_000.0, 60_000.0),
        ({"lag.inf": 1}, 60_000.0, 60_000.0),
    ],
)
def test_lag_is_estimated_from_a_histogram(
    sums: dict[str, int], p50: float | None, p99: float | None
) -> None:
    """A quantile is interpolated within its bucket; above the largest bound, it is that bound."""
    assert (p50, p99) == (estimate_lag(sums, 0.5), estimate_lag(sums, 0.99))
