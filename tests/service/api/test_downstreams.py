"""`/downstreams`: the state of lanes, and the actions pause, resume and reset."""

from __future__ import annotations

import pytest

from tarry.service.api.auth import make_api_key
from tarry.service.model import BreakerChangeRecord
from tarry.service.records.api_keys import put_api_key
from tarry.service.records.lane_activity import (
    LATENCY_WINDOW_MS,
    latency_bucket,
    record_breaker_change,
    record_latencies,
)
from tarry.service.store import Retention
from tests.service.api.harness import NOW, ApiHarness

LANE = "https:example.com:443"


async def test_downstreams_are_listed_with_their_local_state(api: ApiHarness) -> None:
    """A downstream has its stored counts and, in `local`, the state of this process."""
    await api.create()
    await api.create(targetUrl="https://example.org/")
    response = await api.request("GET", "/downstreams")
    expected = {
        "tenant": "default",
        "lane": LANE,
        "state": "ACTIVE",
        "parkedUntil": None,
        "consecutiveOpens": 0,
        "pending": 1,
        "inFlight": 0,
        "dead": 0,
        "lastClaimAt": None,
        "local": {
            "breaker": "closed",
            "budget": 9.5,
            "running": 1,
            "leased": 2,
            "p50Ms": 12.0,
            "p95Ms": None,
            "waitReason": None,
            "ratePerSecond": None,
            "concurrencyLimit": None,
        },
        "waitingFor": None,
        "limits": {},
        "limitsSource": "DEFAULT",
        "breaker": "closed",
        "breakerChangedAt": None,
        "breakerHistory": None,
        "latency": None,
    }
    assert expected == response.json["items"][0]
    assert [LANE, "https:example.org:443"] == [
        downstream["lane"] for downstream in response.json["items"]
    ]
    first = (await api.request("GET", "/downstreams?limit=1")).json
    action = (await api.request("GET", f"/downstreams?cursor={first['nextCursor']}")).json
    assert response.json["items"] == first["items"] + action["items"]


async def test_a_process_without_attempts_has_no_local_state() -> None:
    """With the role `api`, `local` is null, also after a request that changed the downstream."""
    api = ApiHarness(role="api")
    await api.create()
    paused = await api.request("POST", f"/downstreams/{LANE}/pause")
    assert ("PAUSED", None) == (paused.json["state"], paused.json["local"])


async def test_pause_resume_and_reset_return_the_new_state(api: ApiHarness) -> None:
    """A lane is PAUSED after pause, and ACTIVE after resume or reset."""
    await api.create()
    states = [
        (await api.request("POST", f"/downstreams/{LANE}/{action}")).json["state"]
        for action in ("pause", "resume", "pause", "reset")
    ]
    assert ["PAUSED", "ACTIVE", "PAUSED", "ACTIVE"] == states


async def test_a_lane_whose_target_no_process_allows_is_parked(api: ApiHarness) -> None:
    """The state is PARKED, although the store would lease its tasks."""
    await api.create()
    api.engine.blocked_lanes[f"default/{LANE}"] = "The host name has no allowed address"
    assert "PARKED" == (await api.request("GET", f"/downstreams/{LANE}")).json["state"]


async def test_a_parked_lane_is_probed_after_its_time(api: ApiHarness) -> None:
    await api.create()
    await api.store.park(f"default/{LANE}", NOW + 1_000, probes=1, consecutive_opens=2)
    parked = (await api.request("GET", f"/downstreams/{LANE}")).json
    assert ("PARKED", "open", NOW + 1_000, 2) == (
        parked["state"],
        parked["breaker"],
        parked["parkedUntil"],
        parked["consecutiveOpens"],
    )
    api.time.ms += 1_000
    probing = (await api.request("GET", f"/downstreams/{LANE}")).json
    assert ("PROBING", "half-open") == (probing["state"], probing["breaker"])
    await api.store.park(f"default/{LANE}", NOW + 9_000, probes=1, consecutive_opens=0)
    waiting = (await api.request("GET", f"/downstreams/{LANE}")).json
    assert ("PARKED", "closed") == (waiting["state"], waiting["breaker"])


async def test_downstream_has_the_history_of_its_breaker_and_latencies(api: ApiHarness) -> None:
    """A downstream has the changes of its breaker, newest first; in a list, only the last time."""
    await api.create()
    name = f"default/{LANE}"
    for at, after, reason in ((5, "open", "<b>503</b>"), (7, "half-open", None)):
        change = BreakerChangeRecord(at=at, before="closed", after=after, reason=reason)
        await record_breaker_change(api.store, name, change)
    counts = {str(latency_bucket(ms)): number for ms, number in ((1, 50), (8, 45), (2_000, 5))}
    await record_latencies(api.store, {name: counts})
    [listed] = (await api.request("GET", "/downstreams")).json["items"]
    downstream = (await api.request("GET", f"/downstreams/{LANE}")).json

    assert downstream | {"breakerHistory": None} == listed
    assert 7 == listed["breakerChangedAt"]
    assert [
        {"at": 7, "from": "open", "to": "half-open", "reason": None},
        {"at": 5, "from": "closed", "to": "open", "reason": "<b>503</b>"},
    ] == downstream["breakerHistory"]
    latency = downstream["latency"]
    assert (100, NOW - NOW % LATENCY_WINDOW_MS) == (latency["attempts"], latency["since"])
    quantiles = [latency[name] for name in ("p50Ms", "p90Ms", "p99Ms")]
    assert quantiles == pytest.approx([1, 8, 2_000], rel=0.2)


async def test_downstream_can_be_paused_before_its_first_task(api: ApiHarness) -> None:
    """Pausing creates the lane, under its canonical name; the first task waits."""
    paused = await api.request("POST", "/downstreams/https:Example.com/pause?create=true")
    assert (200, LANE, "PAUSED") == (paused.status, paused.json["lane"], paused.json["state"])
    await api.create()
    downstream = (await api.request("GET", f"/downstreams/{LANE}")).json
    assert ("PAUSED", 1) == (downstream["state"], downstream["pending"])


@pytest.mark.parametrize(
    ("method", "action", "document", "verb"),
    [("POST", "/pause", None, "pause"), ("PUT", "", {"concurrency": 1}, "limit")],
)
async def test_a_lane_of_another_tenant_is_not_created_by_mistake(
    method: str, action: str, document: object, verb: str
) -> None:
    """With the key of another tenant, pausing or limiting the lane of a task is a 404."""
    api = ApiHarness(keys=True)
    keys: dict[str, dict[str, str]] = {}
    for tenant in ("ops", "globex"):
        secret, record = make_api_key(tenant, tenant)
        await put_api_key(api.store, record)
        keys[tenant] = {"X-API-Key": secret}
    task = {"targetUrl": "https://example.com/"}
    await api.request("POST", "/retry-tasks", task, headers=keys["globex"])
    path = f"/downstreams/{LANE}{action}"

    refused = await api.request(method, path, document, headers=keys["ops"])
    assert (404, f"Tenant ops has no downstream {LANE}.") == (
        refused.status,
        refused.problem["detail"].partition(" Check")[0],
    )
    assert f"To {verb} it before its first task, add ?create=true" in refused.problem["detail"]
    assert [] == (await api.store.list_lanes("ops")).items

    created = await api.request(method, f"{path}?create=true", document, headers=keys["ops"])
    changed = await api.request(method, path, document, headers=keys["globex"])
    assert [(200, "ops"), (200, "globex")] == [
        (each.status, each.json["tenant"]) for each in (created, changed)
    ]


async def test_a_lane_may_be_removed_when_it_is_resumed(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response has the state of an empty lane if a sweep removes the lane meanwhile."""
    resume = api.engine.resume

    async def resume_and_sweep(lane: str) -> None:
        await resume(lane)
        await api.store.sweep(Retention(0, 0), 10)
        assert await api.store.get_lane(lane) is None

    monkeypatch.setattr(api.engine, "resume", resume_and_sweep)
    await api.request("POST", f"/downstreams/{LANE}/pause?create=true")
    resumed = await api.request("POST", f"/downstreams/{LANE}/resume")
    assert (200, LANE, "ACTIVE") == (resumed.status, resumed.json["lane"], resumed.json["state"])
    assert 404 == (await api.request("GET", f"/downstreams/{LANE}")).status


async def test_limits_can_be_set_before_the_first_task(api: ApiHarness) -> None:
    """PUT replaces all limits of a downstream and creates its lane; `{}` removes the limits."""
    limits = {
        "ratePerSecond": 0.5,
        "concurrency": 3,
        "breaker": {"failureRate": 0.5, "openForMs": 5000},
        "budget": {"enabled": False},
    }
    response = await api.request("PUT", "/downstreams/https:EXAMPLE.com:443?create=true", limits)
    assert (200, LANE, limits, "API", 0) == (
        response.status,
        response.json["lane"],
        response.json["limits"],
        response.json["limitsSource"],
        response.json["pending"],
    )
    await api.request("PUT", f"/downstreams/{LANE}", {"concurrency": 4})
    downstream = (await api.request("GET", f"/downstreams/{LANE}")).json
    assert {"concurrency": 4} == downstream["limits"]

    removed = (await api.request("PUT", f"/downstreams/{LANE}", {})).json
    assert ({}, "DEFAULT") == (removed["limits"], removed["limitsSource"])


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"ratePerSecond": 0}, "ratePerSecond"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 1.5}, "concurrency"),
        ({"breaker": {"failureRate": 1.1}}, "breaker.failureRate"),
        ({"breaker": {"failurerate": 0.5}}, "breaker.failurerate"),
        ({"budget": {"ratio": 0}}, "budget.ratio"),
        ({"rate": 5}, "rate"),
    ],
)
async def test_invalid_limits_are_rejected(
    api: ApiHarness, limits: dict[str, object], field: str
) -> None:
    """The error names the field, and no lane is created."""
    response = await api.request("PUT", f"/downstreams/{LANE}", limits)
    assert (422, field) == (response.status, response.problem["field"])
    assert [] == (await api.store.list_lanes(None)).items


async def test_number_of_downstreams_with_limits_is_bounded(api: ApiHarness) -> None:
    """The tenant limit is a 429; the harness allows two downstreams with limits."""
    paths = [f"/downstreams/https:{number}.example:443?create=true" for number in range(3)]
    statuses = [(await api.request("PUT", path, {"concurrency": 1})).status for path in paths]
    assert [200, 200, 429] == statuses


async def test_a_new_downstream_above_the_limit_of_lanes_is_429() -> None:
    """It cannot be paused or get limits, and the 429 names the setting; existing ones can."""
    api = ApiHarness(lane_quota=1)
    await api.create()
    new = "/downstreams/https:example.org:443"
    for response in (
        await api.request("POST", f"{new}/pause?create=true"),
        await api.request("PUT", f"{new}?create=true", {"concurrency": 1}),
    ):
        assert (429, "60") == (response.status, response.header("retry-after"))
        assert "limit of 1 lanes (setting tenant_lanes)" in response.problem["detail"]
    assert 404 == (await api.request("GET", new)).status
    assert 200 == (await api.request("PUT", f"{new}?create=true", {})).status
    assert 200 == (await api.request("POST", f"/downstreams/{LANE}/pause")).status
    limits = await api.request("PUT", f"/downstreams/{LANE}", {"concurrency": 1})
    assert 200 == limits.status


@pytest.mark.parametrize(
    ("lane", "rule"),
    [
        ("x", "must be scheme:host:port, such as https:example.com:443"),
        ("ftp:example.com:21", "must be scheme:host:port, such as https:example.com:443"),
        ("https:example.com:0", "must have a port from 1 to 65535"),
        ("https:user@example.com:443", "must have a lane key after the @"),
        ("grpc:example.com", "must name the port of a gRPC server"),
    ],
)
async def test_name_of_a_paused_lane_is_checked(api: ApiHarness, lane: str, rule: str) -> None:
    """A name that no lane can have is rejected, and no lane is created."""
    response = await api.request("POST", f"/downstreams/{lane}/pause")
    assert (422, "lane") == (response.status, response.problem["field"])
    assert response.problem["rule"].startswith(rule)
    assert [] == (await api.store.list_lanes(None)).items


@pytest.mark.parametrize("lane", ["x", "a/b/c", "https://example.com", "default%2Fx"])
@pytest.mark.parametrize("action", ["", "/resume", "/reset"])
async def test_an_unknown_downstream_is_404(api: ApiHarness, lane: str, action: str) -> None:
    """A request for an unknown lane does not create the lane."""
    method = "POST" if action else "GET"
    assert 404 == (await api.request(method, f"/downstreams/{lane}{action}")).status
    assert [] == (await api.store.list_lanes(None)).items
