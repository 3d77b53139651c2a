"""`GET /workers`, and the operations that the role of a process allows."""

from __future__ import annotations

import re

import pytest

from tarry.service.api.auth import api_key_digest
from tarry.service.model import ApiKeyRecord, WorkerRecord
from tarry.service.records.api_keys import put_api_key
from tarry.service.records.workers import record_worker
from tests.service.api.harness import ApiHarness

WORKER = WorkerRecord(
    name="node-1-7-x", host="node-1", pid=7, role="worker", version="1.0", started_at=5,
    running_attempts=2, leased_tasks=3,
)  # fmt: skip


async def test_processes_are_listed(api: ApiHarness) -> None:
    """Each process is listed with its load and the time of its last heartbeat."""
    await record_worker(api.store, WORKER)
    response = await api.request("GET", "/workers")
    assert 200 == response.status
    assert {"items": [{
        "name": "node-1-7-x", "host": "node-1", "pid": 7, "role": "worker", "version": "1.0",
        "startedAt": 5, "seenAt": api.time.ms, "runningAttempts": 2, "leasedTasks": 3,
    }], "nextCursor": None} == response.json  # fmt: skip
    assert 422 == (await api.request("GET", "/workers?limit=1")).status


async def test_only_the_operator_lists_processes() -> None:
    """With API keys, a key of another tenant gets a 403."""
    api = ApiHarness(keys=True, operator="ops")
    statuses = []
    for tenant in ("ops", "acme"):
        digest = api_key_digest(f"key of {tenant}")
        await put_api_key(api.store, ApiKeyRecord(id=tenant, tenant=tenant, digest=digest))
        headers = {"Authorization": f"Bearer key of {tenant}"}
        statuses.append((await api.request("GET", "/workers", headers=headers)).status)
    statuses.append((await api.request("GET", "/workers")).status)
    assert [200, 403, 401] == statuses


@pytest.mark.parametrize("role", ["all", "api", "worker"])
async def test_the_role_limits_the_operations(role: str) -> None:
    """A worker serves monitoring and downstreams only, an `api` process all except events."""
    api = ApiHarness(role=role)
    document = (await api.request("GET", "/openapi.json")).json
    misdirected = set()
    for path, methods in document["paths"].items():
        for method in methods:
            if path == "/events" and role != "api":
                continue  # the stream does not end
            url = re.sub(r"{\w+}", "x", path)
            response = await api.request(method.upper(), url)
            if response.status == 421:
                misdirected.add(path)
                assert "/docs#problem-wrong-role" == response.problem["type"]
                assert f"role {role}" in response.problem["detail"]
    expected = set()
    if role == "api":
        expected = {"/events"}
    elif role == "worker":
        monitoring = "/healthz", "/readyz", "/metrics", "/workers", "/whoami"
        served = (*monitoring, "/downstreams", "/events")
        expected = {path for path in document["paths"] if not path.startswith(served)}
        assert "/retry-tasks" in expected
    assert expected == misdirected
