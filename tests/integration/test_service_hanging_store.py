"""`/metrics` and `/readyz` while the server of the store hangs, or a table is locked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.postgres import connected
from tests.integration.servers import Server, postgres_server, redis_server
from tests.integration.service import Service, service

IN_AN_HOUR = {"targetUrl": "http://127.0.0.1:9/", "delayMs": 3_600_000}


@contextmanager
def store_server(kind: str) -> Generator[tuple[Server, str]]:
    """Start a server, and return it with the URL of a store."""
    if kind == "redis":
        with redis_server("--appendonly", "yes") as server:
            yield server, server.address.replace("unix://", "redis+unix://")
    else:
        with postgres_server() as server:
            yield server, server.address


def read_metrics(running_service: Service) -> dict[str, float]:
    """Return the metrics by name and labels."""
    lines = running_service.request("GET", "/metrics")[1].splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def is_unready(running_service: Service, pattern: str) -> bool:
    """Return whether readiness is 503 for a reason that matches this pattern."""
    status, problem = running_service.request("GET", "/readyz")
    return status == 503 and any(re.search(pattern, each) for each in problem["failing"].values())


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_a_suspended_server_does_not_stop_the_metrics(tmp_path: Path, kind: str) -> None:
    """The page has the last values of the store and their age; readiness is 503."""
    with store_server(kind) as (server, url), service(tmp_path, store=url) as running_service:
        running_service.post(**IN_AN_HOUR)
        pending = 'retry_tasks{status="PENDING"}'
        running_service.wait_for(lambda: read_metrics(running_service).get(pending) == 1)
        with server.suspended():
            running_service.wait_for(lambda: is_unready(running_service, "no (response|reply)"))
            metrics = read_metrics(running_service)
            assert 1 == metrics[pending]
            assert metrics["retry_store_values_age_seconds"] > 1
            assert 1 in {value for name, value in metrics.items() if "component_failing" in name}
        running_service.wait_for(lambda: running_service.request("GET", "/readyz")[0] == 200)


def test_a_locked_table_makes_the_service_unready(tmp_path: Path) -> None:
    """While another session locks a table that a new task needs, readiness is 503 and says why."""

    async def lock_table(dsn: str, running_service: Service) -> dict[str, Any]:
        async with connected(dsn) as connection, connection.transaction():
            await connection.execute("LOCK TABLE tarry.live")
            reason = "holds a lock on a table"
            while not await asyncio.to_thread(is_unready, running_service, reason):
                pass  # each request waits for a check, or for the response that was cached
            return await asyncio.to_thread(read_metrics, running_service)

    with store_server("postgres") as (_, url), service(tmp_path, store=url) as running_service:
        running_service.post(**IN_AN_HOUR)
        pending = 'retry_tasks{status="PENDING"}'
        running_service.wait_for(lambda: read_metrics(running_service).get(pending) == 1)
        metrics = asyncio.run(lock_table(url, running_service))
        assert 1 == metrics[pending]
        running_service.wait_for(lambda: running_service.request("GET", "/readyz")[0] == 200)
        running_service.post(**IN_AN_HOUR)
