"""`tarry serve` with a store in PostgreSQL: several processes, crashes, and a server restart."""

from __future__ import annotations

import time
from pathlib import Path

from tests.integration.servers import postgres_server
from tests.integration.service import Service, service, target

SETTINGS = ("max_attempt_timeout_ms=1000", "lease_ms=6000", "drain_ms=1000")
FLAGS = [flag for setting in SETTINGS for flag in ("--set", setting)]
RETRY_POLICY = {
    "attemptTimeoutMs": 1000,
    "initialDelayMs": 50,
    "maxDelayMs": 500,
    "maxAttempts": 50,
}


def post_until_accepted(running_service: Service, url: str, key: str) -> str:
    """Create a task, and repeat the request with its key while the store is not available."""
    body = {"targetUrl": url, "idempotencyKey": key, "policy": RETRY_POLICY}
    while True:
        status, task = running_service.request("POST", "/retry-tasks", body)
        if status in {200, 201}:
            return str(task["taskId"])
        assert 503 == status, task
        time.sleep(0.1)


def test_no_accepted_task_is_lost(tmp_path: Path) -> None:
    """After kill -9 of one of two processes and a restart of PostgreSQL, all tasks succeed."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with (
        target(
            lambda path, number: 503 if number == 1 and path[-1] == "5" else 200
        ) as flaky_target,
        postgres_server() as server,
        service(folders[0], *FLAGS, store=server.address) as first,
        service(folders[1], *FLAGS, store=server.address) as second,
    ):
        task_ids = [
            post_until_accepted(running, f"{flaky_target.url}/{name}-{number}", f"{name}-{number}")
            for number in range(20)
            for name, running in (("first", first), ("second", second))
        ]
        first.kill()
        server.restart()
        task_ids += [
            post_until_accepted(second, f"{flaky_target.url}/later-{number}", f"later-{number}")
            for number in range(10)
        ]

        finished = [second.wait_until_finished(task_id) for task_id in task_ids]

        assert {"SUCCEEDED"} == {task["status"] for task in finished}
        assert len(set(task_ids)) == len(task_ids) == len(flaky_target.received_requests)
        assert "password" not in (folders[1] / "log").read_text()
