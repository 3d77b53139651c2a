"""Leases of a service whose slots are taken: it is suspended for longer than a lease, or killed."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from tests.integration.service import service, target

LEASE_S = 6.0
TASKS = 40
SETTINGS = ("in_flight=2", "max_attempt_timeout_ms=1000", f"lease_ms={LEASE_S * 1000:.0f}")


def test_waiting_tasks_are_sent_and_not_lost(tmp_path: Path) -> None:
    """Each attempt in the log was received, also if the process was stopped for a lease."""

    def respond_slowly(_path: str, _number: int) -> int:
        time.sleep(0.4)
        return 200

    flags = [flag for setting in SETTINGS for flag in ("--set", setting)]
    with target(respond_slowly) as slow_target, service(tmp_path, *flags) as running_service:
        urls = [f"{slow_target.url}/{number}" for number in range(TASKS)]
        task_ids = [running_service.post(targetUrl=url)["taskId"] for url in urls]
        time.sleep(1.0)
        running_service.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 1.0)
        running_service.process.send_signal(signal.SIGCONT)

        finished = [running_service.wait_until_finished(task_id) for task_id in task_ids]

        assert {"SUCCEEDED"} == {task["status"] for task in finished}
        logs = [running_service.attempts(task_id) for task_id in task_ids]
        assert "lost" not in {attempt["outcome"] for log in logs for attempt in log}
        received = [len(slow_target.received_requests[f"/{number}"]) for number in range(TASKS)]
        assert [len(log) for log in logs] == received


def test_waiting_tasks_of_a_killed_process_are_not_lost(tmp_path: Path) -> None:
    """Only attempts that were received are logged, although all tasks were leased and due."""
    can_respond = threading.Event()

    def hang(_path: str, _number: int) -> int:
        can_respond.wait(60)
        return 200

    with (
        target(hang) as hanging_target,
        service(tmp_path, "--set", "in_flight=2") as running_service,
    ):
        urls = [f"{hanging_target.url}/{number}" for number in range(10)]
        task_ids = [running_service.post(targetUrl=url)["taskId"] for url in urls]
        while len(hanging_target.received_requests) < 2:
            time.sleep(0.01)
        running_service.kill()
        can_respond.set()
        running_service.start()

        for task_id in task_ids:
            assert "SUCCEEDED" == running_service.wait_until_finished(task_id)["status"]
        logs = [running_service.attempts(task_id) for task_id in task_ids]
        received = [len(hanging_target.received_requests[f"/{number}"]) for number in range(10)]
        assert received == [len(log) for log in logs]
        assert 2 == sum(attempt["outcome"] == "lost" for log in logs for attempt in log)
