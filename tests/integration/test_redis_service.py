"""Services that share a Redis server: processes and servers are killed, and no task is lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import redis_server
from tests.integration.service import Service, service, target

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
SETTINGS = ("strict_durability=true", "max_attempt_timeout_ms=1000", "lease_ms=6000")
POLICY = {"initialDelayMs": 50, "maxDelayMs": 500, "maxAttempts": 20, "attemptTimeoutMs": 1000}


def flags_for(address: str, *settings: str) -> list[str]:
    """Return the flags of a service on a Redis server with a Unix socket."""
    flags = ["--store", address.replace("unix://", "redis+unix://")]
    return flags + [flag for setting in settings for flag in ("--set", setting)]


def post_until_created(running_service: Service, **fields: Any) -> str:
    """Create a task; repeat the request while the store is unavailable, and return its id."""
    while True:
        status, created = running_service.request("POST", "/retry-tasks", fields)
        if status != 503:
            assert status in {200, 201}, created
            return str(created["taskId"])


def test_acknowledged_tasks_are_delivered_after_crashes(tmp_path: Path) -> None:
    """One of two services and then the Redis server are killed; all tasks are delivered."""

    def fail_once(path: str, number: int) -> int:
        # Few attempts fail, so that the breaker of the target stays closed.
        return 503 if number == 1 and path.endswith("0") else 200

    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with (
        redis_server(*DURABLE, stop_with=signal.SIGKILL) as server,
        target(fail_once) as failing_target,
        service(folders[0], *flags_for(server.address, *SETTINGS)) as first,
        service(folders[1], *flags_for(server.address, *SETTINGS)) as second,
    ):

        def post(running_service: Service, number: int) -> str:
            return post_until_created(
                running_service,
                targetUrl=f"{failing_target.url}/{number}",
                idempotencyKey=f"order {number}",
                policy=POLICY,
            )

        task_ids = [post((first, second)[number % 2], number) for number in range(30)]
        first.kill()
        task_ids += [post(second, number) for number in range(30, 40)]
        server.restart()
        task_ids += [post(second, number) for number in range(40, 50)]

        assert 50 == len(set(task_ids))
        for task_id in task_ids:
            assert "SUCCEEDED" == second.wait_until_finished(task_id)["status"]
        received = [len(failing_target.received_requests[f"/{number}"]) for number in range(50)]
        assert min(received) >= 1
        assert min(received[::10]) >= 2


def test_a_worker_delivers_what_another_process_has_accepted(
    tmp_path: Path, redis_url: str
) -> None:
    """Processes with the roles `api` and `worker` share a store, and are listed."""
    flags = flags_for(f"{redis_url}?prefix=roles")
    for name in ("api", "worker"):
        (tmp_path / name).mkdir()
    with (
        target() as working_target,
        service(tmp_path / "api", *flags, "--role", "api") as api,
        service(tmp_path / "worker", *flags, "--role", "worker") as worker,
    ):
        task_id = api.post(targetUrl=f"{working_target.url}/1")["taskId"]
        assert "SUCCEEDED" == api.wait_until_finished(task_id)["status"]
        workers = api.request("GET", "/workers")[1]["items"]
        assert {"api", "worker"} == {process["role"] for process in workers}
        assert 0 == worker.stop()
        assert ["api"] == [each["role"] for each in api.request("GET", "/workers")[1]["items"]]


def test_a_service_does_not_start_on_a_server_that_may_lose_tasks(tmp_path: Path) -> None:
    """With `--strict-durability`, the error names the setting of Redis."""
    with redis_server() as server:
        flags = [*flags_for(server.address), "--strict-durability"]
        with pytest.raises(AssertionError, match="appendonly is no: tasks are lost"):
            Service(tmp_path, *flags).start()
