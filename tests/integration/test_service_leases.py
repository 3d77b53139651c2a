"""Leases of a running service whose slots are taken for longer than a lease."""

from __future__ import annotations

import signal
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
