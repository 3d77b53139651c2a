"""One dead and two healthy downstreams of a running service."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tarry.service.delivery.targets import parse_target
from tarry.service.encryption import Codec
from tarry.service.model import Task, TaskContent
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.integration.ports import free_port
from tests.integration.service import Service, service, target

DEAD_LANE_TASKS = 100_000
HEALTHY_LANE_TASKS = 100
BATCH_SIZE = 1_000
PROBES = 3
MAX_ATTEMPTS_BEFORE_PARKING = 30
"""The breaker opens after 20 failures, and 8 attempts run at a time."""
MAX_FIRST_SECOND_ATTEMPTS = 60
"""After a recovery the rate is 10 per second, and doubles about every half second."""
RAMPED_UP_ATTEMPTS = 16


def _build_task(url: str) -> NewTask:
    target = parse_target(url)
    task_id = str(uuid4())
    content = Codec().pack(TaskContent(url=target.url))
    lane = f"default/{target.endpoint}"
    return NewTask(
        Task(
            id=task_id,
            tenant="default",
            lane=lane,
            key=task_id,
            fingerprint=b"",
            packed_content=content,
        ),
        0,
    )


async def _add_tasks(database: Path, urls: list[str]) -> None:
    store = SqliteTaskStore(database)
    await store.open()
    for start in range(0, len(urls), BATCH_SIZE):
        await store.add([_build_task(url) for url in urls[start : start + BATCH_SIZE]])
    await store.close()


class RecoveredTarget:
    """A recovered target that records the time and the concurrency of its requests."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.opened_at = 0.0
        self.arrivals: list[tuple[float, int]] = []
        """The time of each request, and the number of running requests including it."""
        self._running_requests = 0
        self._lock = threading.Lock()

    def respond(self, _path: str, _number: int) -> int:
        """Wait until the gate opens, then respond slowly."""
        with self._lock:
            self._running_requests += 1
            self.arrivals.append((time.monotonic(), self._running_requests))
        self.gate.wait(60)
        time.sleep(0.05)
        with self._lock:
            self._running_requests -= 1
        return 200

    def open(self) -> None:
        """Open the gate."""
        self.opened_at = time.monotonic()
        self.gate.set()


def _get_lane(running_service: Service, url: str) -> dict[str, Any]:
    lanes = running_service.request("GET", "/downstreams")[1]["items"]
    return next(lane for lane in lanes if lane["lane"] == parse_target(url).endpoint)


def _count_attempts(running_service: Service, outcome: str) -> int:
    lines = running_service.request("GET", "/metrics")[1].splitlines()
    samples = [line for line in lines if line.startswith("retry_attempts_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in samples if f'"{outcome}"' in line)


@pytest.mark.timeout(240)
def test_dead_lane_is_parked_and_drained_slowly(tmp_path: Path) -> None:
    """Other lanes are served, a parked lane is only probed, and its drain ramps up."""
    database, port = tmp_path / "tarry.db", free_port()
    dead = f"http://127.0.0.1:{port}"
    with target() as one, target() as two:
        urls = [f"{dead}/{n}" for n in range(DEAD_LANE_TASKS)]
        urls += [
            f"{healthy.url}/before/{n}" for healthy in (one, two) for n in range(HEALTHY_LANE_TASKS)
        ]
        asyncio.run(_add_tasks(database, urls))
        with service(tmp_path) as running_service:
            # The tasks of the healthy lanes were added after 100,000 tasks that are all due.
            running_service.wait_for(lambda: _get_lane(running_service, dead)["state"] == "PARKED")
            running_service.wait_for(
                lambda: (
                    len(one.received_requests) == len(two.received_requests) == HEALTHY_LANE_TASKS
                )
            )
            lane = _get_lane(running_service, dead)
            attempts_before = _count_attempts(running_service, "transient")
            assert (
                attempts_before <= MAX_ATTEMPTS_BEFORE_PARKING + PROBES * lane["consecutiveOpens"]
            )

            # Between probes, other lanes are served.
            ids = [
                running_service.post(targetUrl=f"{one.url}/{n}")["taskId"]
                for n in range(HEALTHY_LANE_TASKS)
            ]
            assert {"SUCCEEDED"} == {
                running_service.wait_until_finished(task_id)["status"] for task_id in ids
            }
            assert {1} == {running_service.task(task_id)["attemptNumber"] for task_id in ids}
            lane = _get_lane(running_service, dead)
            assert DEAD_LANE_TASKS == lane["pending"] + lane["inFlight"]
            attempts = _count_attempts(running_service, "transient")
            assert attempts <= MAX_ATTEMPTS_BEFORE_PARKING + PROBES * lane["consecutiveOpens"]

            _check_recovery(running_service, dead, port, one.url)


def _check_recovery(running_service: Service, dead: str, port: int, healthy: str) -> None:
    recovered = RecoveredTarget()
    with target(recovered.respond, port):
        running_service.wait_for(lambda: len(recovered.arrivals) == PROBES)
        # After more claims, only the probes have been sent, because none of them has a result yet.
        running_service.wait_until_finished(
            running_service.post(targetUrl=f"{healthy}/during-probes", delayMs=1500)["taskId"]
        )
        assert PROBES == len(recovered.arrivals)
        assert "PROBING" == _get_lane(running_service, dead)["state"]

        recovered.open()
        running_service.wait_for(lambda: recovered.arrivals[-1][1] >= RAMPED_UP_ATTEMPTS)
        running_service.wait_until_finished(
            running_service.post(targetUrl=f"{healthy}/after-probes")["taskId"]
        )
        assert "ACTIVE" == _get_lane(running_service, dead)["state"]
        first_second = [at for at, _ in recovered.arrivals if at < recovered.opened_at + 1]
        assert len(first_second) <= MAX_FIRST_SECOND_ATTEMPTS
        assert 200 == running_service.request("GET", "/readyz")[0]
        recovered.open()
