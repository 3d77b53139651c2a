"""One dead downstream among healthy ones in a running service."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tarry.service.delivery.targets import parse_target
from tarry.service.encryption import Codec
from tarry.service.model import Task, TaskContent
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteStore
from tests.integration.service import Service, free_port, service, target

DEAD = 100_000
HEALTHY = 100
GROUP = 1_000
PROBES = 3
MOST, RAMP = 128, 10.0
"""Attempts at a time of one lane, and the seconds in which a recovered one gets there."""
ENOUGH = 16


def _task(url: str) -> NewTask:
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


async def _fill(database: Path, urls: list[str]) -> None:
    store = SqliteStore(database)
    await store.open()
    for start in range(0, len(urls), GROUP):
        await store.add([_task(url) for url in urls[start : start + GROUP]])
    await store.close()


class RevivedTarget:
    """A recovered target that records concurrency and times of its requests."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.opened_at = 0.0
        self.arrivals: list[tuple[float, int]] = []
        """When each came, and how many were there then, itself included."""
        self._there = 0
        self._lock = threading.Lock()

    def answer(self, _path: str, _number: int) -> int:
        """Wait until the gate opens, then respond slowly."""
        with self._lock:
            self._there += 1
            self.arrivals.append((time.monotonic(), self._there))
        self.gate.wait(60)
        time.sleep(0.05)
        with self._lock:
            self._there -= 1
        return 200

    def open(self) -> None:
        """Open the gate."""
        self.opened_at = time.monotonic()
        self.gate.set()


def _lane(running: Service, url: str) -> dict[str, object]:
    lanes = running.request("GET", "/downstreams")[1]["items"]
    return next(lane for lane in lanes if lane["lane"] == parse_target(url).endpoint)


def _attempts(running: Service, outcome: str) -> int:
    lines = running.request("GET", "/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith("retry_attempts_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in found if f'"{outcome}"' in line)


@pytest.mark.timeout(240)
def test_dead_lane_is_parked_and_drained_slowly(tmp_path: Path) -> None:
    """Other lanes are served, a parked lane causes no attempts, and its drain ramps up."""
    database, port = tmp_path / "tarry.db", free_port()
    dead = f"http://127.0.0.1:{port}"
    with target() as one, target() as two:
        urls = [f"{dead}/{n}" for n in range(DEAD)]
        urls += [f"{to.url}/before/{n}" for to in (one, two) for n in range(HEALTHY)]
        asyncio.run(_fill(database, urls))
        with service(tmp_path) as running:
            # The healthy ones stand behind a hundred thousand others, all of them due.
            running.wait_for(lambda: _lane(running, dead)["state"] == "PARKED")
            running.wait_for(lambda: len(one.seen) == len(two.seen) == HEALTHY)
            running.wait_for(lambda: _lane(running, dead)["inFlight"] == 0)
            tried = _attempts(running, "transient")
            assert tried <= 2 * MOST
            assert DEAD == _lane(running, dead)["pending"]

            # While the lane is parked, nothing is written, and no other lane waits.
            with sqlite3.connect(database) as looking:
                version = "PRAGMA data_version"
                before = looking.execute(version).fetchone()
                time.sleep(3)
                assert before == looking.execute(version).fetchone()
            looking.close()
            ids = [running.post(targetUrl=f"{one.url}/{n}")["taskId"] for n in range(HEALTHY)]
            assert {"SUCCEEDED"} == {
                running.wait_until_finished(task_id)["status"] for task_id in ids
            }
            assert {1} == {running.task(task_id)["attemptNumber"] for task_id in ids}
            assert _attempts(running, "transient") - tried <= PROBES  # had its time come already

            _comes_back(running, dead, port, one.url)


def _comes_back(running: Service, dead: str, port: int, healthy: str) -> None:
    revived = RevivedTarget()
    with target(revived.answer, port):
        running.wait_for(lambda: len(revived.arrivals) == PROBES)
        # After more claims, only the probes have been sent, because none of them has a result yet.
        running.wait_until_finished(
            running.post(targetUrl=f"{healthy}/meanwhile", delayMs=1500)["taskId"]
        )
        assert PROBES == len(revived.arrivals)
        assert "PROBING" == _lane(running, dead)["state"]

        revived.open()
        running.wait_for(lambda: revived.arrivals[-1][1] >= ENOUGH)
        running.wait_until_finished(running.post(targetUrl=f"{healthy}/too")["taskId"])
        assert "ACTIVE" == _lane(running, dead)["state"]
        for at, there in revived.arrivals[PROBES:]:
            # The service began to count no earlier than the gate was opened.
            assert there <= 1 + (MOST - 1) * min(1.0, (at - revived.opened_at) / RAMP)
        assert 200 == running.request("GET", "/readyz")[0]
        revived.open()
