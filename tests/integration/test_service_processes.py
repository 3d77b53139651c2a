"""Several real processes of the service on one store: roles, shared state, supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import run_command
from tests.integration.ports import free_port
from tests.integration.servers import postgres_server, redis_server
from tests.integration.service import Service, service, target

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store of each engine."""
    if request.param == "sqlite":
        yield f"sqlite:{tmp_path / 'tarry.db'}"
    elif request.param == "postgres":
        with postgres_server() as server:
            yield server.address
    else:
        with redis_server() as server:
            yield server.address.replace("unix://", "redis+unix://")


@contextmanager
def two_processes(
    folder: Path, *roles: str, store: str | None = None, flags: tuple[str, ...] = ()
) -> Iterator[list[Service]]:
    """Run a process for each role."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(service(folder, "--role", role, *flags, store=store))
            for role in roles
        ]


def lane_of(url: str) -> str:
    """Return the name of the downstream of a target."""
    return url.replace("://", ":")


def downstream(process: Service, url: str) -> dict[str, Any]:
    """Return the downstream of a target."""
    status, found = process.request("GET", f"/downstreams/{lane_of(url)}")
    assert 200 == status
    lane: dict[str, Any] = found
    return lane


def test_an_api_process_accepts_and_a_worker_delivers(tmp_path: Path, store: str) -> None:
    """A task that one process has accepted is delivered by the other, and both are listed."""
    with (
        target() as receiver,
        two_processes(tmp_path, "api", "worker", store=store) as (api, worker),
    ):
        status, task = api.request(
            "POST", "/retry-tasks", {"targetUrl": f"{receiver.url}/a"}, {"Prefer": "wait=30"}
        )
        assert (201, "SUCCEEDED") == (status, task["status"])
        rejected = worker.send("POST", "/retry-tasks", {"targetUrl": receiver.url})
        assert (421, "/docs#problem-wrong-role") == (rejected.status, rejected.body["type"])
        assert 421 == api.request("GET", "/events")[0]
        assert 200 == worker.request("GET", "/readyz")[0]

        listed = run_command("workers", "--json", "--server", f"http://127.0.0.1:{api.port}").json
        pids = {item["role"]: item["pid"] for item in listed["items"]}
        assert {"api": api.process.pid, "worker": worker.process.pid} == pids
        [attempt] = api.attempts(task["taskId"])
        [name] = [item["name"] for item in listed["items"] if item["role"] == "worker"]
        assert name.endswith(f"-{attempt['worker']}")

        assert 0 == worker.stop()
        remaining = api.request("GET", "/workers")[1]["items"]
        assert ["api"] == [item["role"] for item in remaining]


def test_a_pause_reaches_the_tasks_of_another_process(tmp_path: Path, store: str) -> None:
    """After a pause in one process, the other releases its tasks of the lane and starts none."""
    with (
        target() as paused_target,
        target() as other_target,
        two_processes(tmp_path, "api", "worker", store=store) as (api, worker),
    ):
        path = f"/downstreams/{lane_of(paused_target.url)}"
        api.request("PUT", f"{path}?create=true", {"ratePerSecond": 1})
        first = api.post(targetUrl=f"{paused_target.url}/first")
        api.wait_until_finished(first["taskId"])
        # The worker has loaded the limit.
        worker.wait_for(lambda: downstream(worker, paused_target.url)["limitsSource"] == "API")
        tasks = [{"targetUrl": f"{paused_target.url}/{number}"} for number in range(30)]
        assert 200 == api.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
        worker.wait_for(lambda: len(paused_target.received_requests) >= 2)
        assert "PAUSED" == api.request("POST", f"{path}/pause")[1]["state"]
        api.wait_for(lambda: downstream(api, paused_target.url)["inFlight"] == 0)
        sent_count = len(paused_target.received_requests)
        for number in range(3):  # the worker still delivers other tasks
            other = api.post(targetUrl=f"{other_target.url}/{number}", delayMs=1000 * number)
            api.wait_until_finished(other["taskId"])
        assert sent_count == len(paused_target.received_requests) < 31

        api.request("PUT", path, {})
        api.request("POST", f"{path}/resume")
        api.wait_for(lambda: len(paused_target.received_requests) == 31)


def test_processes_share_the_concurrency_of_a_downstream(tmp_path: Path, store: str) -> None:
    """With a limit of two attempts at a time, two processes together make at most two."""
    lock, running, most = threading.Lock(), 0, 0
    release = threading.Event()

    def respond(_path: str, _number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(0.05)
        with lock:
            running -= 1
        return 200

    with (
        target(respond) as receiver,
        two_processes(tmp_path, "all", "all", store=store) as (first, second),
    ):
        # Both processes have leased a task, so that each knows of the other.
        with target() as other_target:
            for process in (first, second):
                task = process.post(targetUrl=other_target.url)
                process.wait_until_finished(task["taskId"])
        path = f"/downstreams/{lane_of(receiver.url)}?create=true"
        assert 200 == first.request("PUT", path, {"concurrency": 2})[0]

        def limit_of(process: Service) -> int | None:
            process.post(targetUrl=f"{receiver.url}/probe")
            local = downstream(process, receiver.url)["local"]
            return None if local is None else local["concurrencyLimit"]

        for process in (first, second):
            process.wait_for(lambda process=process: limit_of(process) == 1)  # type: ignore[misc]
        with lock:
            most = 0
        tasks = [(first, second)[n % 2].post(targetUrl=f"{receiver.url}/{n}") for n in range(40)]
        for task in tasks:
            first.wait_until_finished(task["taskId"])
        assert most <= 2


def test_quotas_hold_for_all_processes(tmp_path: Path) -> None:
    """The number of unfinished tasks of a tenant is limited for all processes together."""
    flags = ("--set", "tenant_pending=4")
    with two_processes(tmp_path, "api", "api", flags=flags) as processes:
        statuses = [
            processes[n % 2].request(
                "POST", "/retry-tasks", {"targetUrl": "http://127.0.0.1:9/", "delayMs": 3_600_000}
            )[0]
            for n in range(6)
        ]
    assert [201] * 4 + [429] * 2 == statuses


def test_a_parked_downstream_is_parked_for_all_processes(tmp_path: Path, store: str) -> None:
    """When the breaker of one process opens, no other process claims tasks of the downstream."""
    with (
        target(lambda _path, _number: 503) as receiver,
        two_processes(tmp_path, "worker", "api", store=store) as (worker, api),
    ):
        for number in range(40):
            api.post(targetUrl=f"{receiver.url}/{number}", policy={"initialDelayMs": 50})
        api.wait_for(lambda: downstream(api, receiver.url)["state"] in {"PARKED", "PROBING"})
        assert 0 == worker.stop()
        with service(tmp_path, "--role", "worker", store=store) as other_worker:
            found = downstream(other_worker, receiver.url)
            assert found["state"] in {"PARKED", "PROBING"}
            assert found["consecutiveOpens"] >= 1


def children_of(process: Service) -> list[int]:
    """Return the process ids that the processes on the port report."""
    items = process.request("GET", "/workers")[1]["items"]
    return [item["pid"] for item in items]


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, or until the timeout of the test."""
    while not condition():
        threading.Event().wait(0.05)


def wait_until_all_are_ready(folder: Path) -> None:
    """Wait until the supervisor prints its greeting, because all processes are ready."""
    wait_for(lambda: "tarry serves" in (folder / "log").read_text())


def test_the_supervisor_restarts_processes(tmp_path: Path, store: str) -> None:
    """A killed process is replaced, no connection is refused meanwhile, and SIGTERM stops all."""
    flags = ("--workers", "2", "--set", "max_attempt_timeout_ms=1000", "--set", "lease_ms=6000")
    with target() as receiver, service(tmp_path, *flags, store=store) as supervisor:
        wait_until_all_are_ready(tmp_path)
        first, second = children_of(supervisor)
        assert supervisor.process.pid not in {first, second}
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not is_alive(first))
        tasks = [supervisor.post(targetUrl=f"{receiver.url}/{n}") for n in range(20)]
        wait_for(lambda: len({*children_of(supervisor)} - {first, second}) == 1)
        for task in tasks:
            assert "SUCCEEDED" == supervisor.wait_until_finished(task["taskId"])["status"]
        [replacement] = {*children_of(supervisor)} - {first, second}
        assert 0 == supervisor.stop()
        assert [] == [pid for pid in (second, replacement) if is_alive(pid)]
    log = (tmp_path / "log").read_text()
    assert 1 == log.count("tarry serves")
    assert 1 == log.count("process exited")
    assert "signal SIGKILL; restarting in 0 s" in log
    assert "Traceback" not in log


def test_processes_stop_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """The processes stop gracefully, so that another supervisor can use the port."""
    with service(tmp_path, "--workers", "2") as supervisor:
        wait_until_all_are_ready(tmp_path)
        pids = children_of(supervisor)
        supervisor.kill()
        wait_for(lambda: not any(map(is_alive, pids)))
    assert 2 == (tmp_path / "log").read_text().count("supervisor exited")


def test_processes_have_their_own_ports(tmp_path: Path) -> None:
    """With `process_port`, the metrics of each process can be read."""
    base = free_port(1)
    flags = ("--workers", "2", "--set", f"process_port={base}")
    with service(tmp_path, *flags) as supervisor:
        wait_until_all_are_ready(tmp_path)
        for number in range(2):
            supervisor.port = base + number
            assert 200 == supervisor.request("GET", "/metrics")[0]


def test_a_failing_start_is_reported_once(tmp_path: Path) -> None:
    """If the processes cannot start, the supervisor exits as a single process would."""
    (tmp_path / "tarry.db").write_text("not a database, but long enough to have a header")
    command = [sys.executable, "-m", "tarry", "serve", "--workers", "2", "--port", "0"]
    command += ["--store", str(tmp_path / "tarry.db")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 4 == result.returncode
    assert "is not a SQLite file" in result.stderr
    assert "the service did not start" in result.stderr
