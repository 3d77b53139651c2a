"""Services that share a Redis server: processes and servers are killed, and no task is lost."""

from __future__ import annotations

import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import redis_server
from tests.integration.service import Service, service, target

redis = import_module("redis")

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


def test_a_full_server_is_one_failure_while_stored_tasks_are_delivered(tmp_path: Path) -> None:
    """Refused POSTs and accepted results do not make the log and `/readyz` change in turn."""
    with (
        redis_server() as server,
        target() as working_target,
        redis.Redis.from_url(server.address) as client,
        service(tmp_path, *flags_for(server.address)) as running_service,
    ):
        task: dict[str, Any] = {"targetUrl": f"{working_target.url}/1"}
        delays = [{"delayMs": 50 * number} for number in range(160)]  # results all the time
        batch = {"tasks": [task | delay for delay in delays]}
        assert 200 == running_service.request("POST", "/retry-tasks/batch", batch)[0]
        client.config_set("maxmemory", 1)
        end = time.monotonic() + 6
        ready: list[int] = []
        while time.monotonic() < end:
            status, _ = running_service.request("POST", "/retry-tasks", task)
            assert 503 == status
            ready.append(running_service.request("GET", "/readyz")[0])
            time.sleep(0.05)
        assert {503} == set(ready)
        failing = running_service.request("GET", "/readyz")[1]["failing"]
        assert ["adding"] == list(failing)
        client.config_set("maxmemory", 0)
        while running_service.request("GET", "/readyz")[0] != 200:
            time.sleep(0.1)
        lines = (tmp_path / "log").read_text().splitlines()
    changes = [line for line in lines if " is failing" in line or "has recovered" in line]
    assert 2 == len(changes), changes
    assert "adding is failing" in changes[0]
    assert "adding has recovered" in changes[1]


def test_a_flushed_server_makes_the_service_not_ready(tmp_path: Path) -> None:
    """API keys that are lost get 503 and not 401; one log line says what was lost."""
    with (
        redis_server() as server,
        redis.Redis.from_url(server.address) as client,
        service(tmp_path, *flags_for(server.address)) as running_service,
    ):
        assert 200 == running_service.request("GET", "/readyz")[0]
        client.flushall()
        running_service.wait_for(lambda: running_service.request("GET", "/readyz")[0] == 503)
        assert "data" in running_service.request("GET", "/readyz")[1]["failing"]
        for _ in range(5):
            key = {"Authorization": "Bearer unknown"}
            assert 503 == running_service.send("GET", "/retry-tasks", headers=key).status
            assert (
                503
                == running_service.request("POST", "/retry-tasks", {"targetUrl": "http://a.b/"})[0]
            )
        page = running_service.request("GET", "/metrics")[1]
        assert 'retry_component_failing{component="data"} 1.0' in page
        assert 0 == client.dbsize()
        lines = (tmp_path / "log").read_text().splitlines()
    assert 1 == sum("data is failing: tarry:{0} on Redis" in line for line in lines)
