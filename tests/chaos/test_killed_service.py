"""A service in its own process that is killed, suspended or terminated."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.integration.service import TERMINAL_STATUSES, Service, Target, service, target

KILL_COUNT = int(os.environ.get("ROUNDS", "3"))


def _fail_every_fifth_task(path: str, number: int) -> int:
    """Fail the first attempt of every fifth task."""
    return 503 if number == 1 and int(path.rsplit("/", 1)[1]) % 5 == 0 else 200


class Callers:
    """Threads that post tasks one after the other, and record the accepted tasks."""

    def __init__(self, running_service: Service, receiver: Target, count: int = 4) -> None:
        self.accepted: dict[str, str] = {}
        """The idempotency key of each accepted task, by the path of its target."""
        self._service, self._target = running_service, receiver
        self._numbers = iter(range(1_000_000))
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._threads = [threading.Thread(target=self._post, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _post(self) -> None:
        while not self._is_stopping.is_set():
            with self._lock:
                path = f"/t/{next(self._numbers)}"
            task = {
                "targetUrl": self._target.url + path,
                "idempotencyKey": f"key{path}",
                "body": "hello",
                "policy": {"maxAttempts": 40, "maxDelayMs": 500},
            }
            while True:  # until the task is accepted
                try:
                    status, body = self._service.request("POST", "/retry-tasks", task)
                except (OSError, HTTPException):
                    time.sleep(0.02)
                    continue
                if status in {200, 201}:
                    with self._lock:
                        self.accepted[path] = body["idempotencyKey"]
                    break
                time.sleep(0.02)

    def stop(self) -> None:
        """Stop each thread once its current task is accepted."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()


def _all_tasks_finished(running_service: Service) -> bool:
    return all(task["status"] in TERMINAL_STATUSES for task in running_service.all_tasks())


@pytest.mark.timeout(120 + 30 * KILL_COUNT)
def test_kill_9_at_random_moments_under_load(tmp_path: Path) -> None:
    """Every accepted task is sent, its key does not change, and its attempt log is complete."""
    rng = random.Random(7)
    with target(_fail_every_fifth_task) as receiver, service(tmp_path) as running_service:
        callers = Callers(running_service, receiver)
        for _ in range(KILL_COUNT):
            time.sleep(rng.random() * 1.5)
            running_service.kill()
            running_service.start()
        time.sleep(0.5)
        callers.stop()
        running_service.wait_for(lambda: _all_tasks_finished(running_service))

        tasks = {
            task["targetUrl"].removeprefix(receiver.url): task
            for task in running_service.all_tasks()
        }
        assert len(callers.accepted) > 10 * KILL_COUNT
        for path, key in callers.accepted.items():
            task, sent = tasks[path], receiver.received_requests[path]
            assert "SUCCEEDED" == task["status"]
            assert sent
            assert {key} == {request["Idempotency-Key"] for request in sent}
            log = running_service.request("GET", f"/retry-tasks/{task['taskId']}/attempts")[1][
                "items"
            ]
            numbers = [attempt["attemptNumber"] for attempt in log]
            assert list(range(1, task["attemptNumber"] + 1)) == numbers
            answered = [attempt for attempt in log if attempt["responseStatus"] is not None]
            assert len(answered) <= len(sent) <= len(log)
            assert "success" == log[-1]["outcome"]


@pytest.mark.timeout(180)
def test_process_suspended_past_its_lease_overwrites_nothing(tmp_path: Path) -> None:
    """Another process repeats the attempt; the result of the first is discarded and counted."""
    may_respond = threading.Event()

    def respond_slowly(_path: str, number: int) -> int:
        if number == 1:
            may_respond.wait(60)
        return 200

    flags = ("--set", "max_attempt_timeout_ms=1000", "--set", "lease_ms=6000")
    with target(respond_slowly) as receiver, service(tmp_path, *flags) as first:
        task = {"targetUrl": f"{receiver.url}/t/1", "policy": {"attemptTimeoutMs": 1000}}
        task_id = first.request("POST", "/retry-tasks", task)[1]["taskId"]
        first.wait_for(lambda: bool(receiver.received_requests["/t/1"]))
        os.kill(first.process.pid, signal.SIGSTOP)
        with service(tmp_path, *flags) as second:
            second.wait_for(
                lambda: second.request("GET", f"/retry-tasks/{task_id}")[1]["status"] == "SUCCEEDED"
            )
            finished = second.request("GET", f"/retry-tasks/{task_id}")[1]
            log = second.request("GET", f"/retry-tasks/{task_id}/attempts")[1]["items"]
            assert ["lost", "success"] == [attempt["outcome"] for attempt in log]

            os.kill(first.process.pid, signal.SIGCONT)
            may_respond.set()
            first.wait_for(
                lambda: "retry_superseded_total 1.0" in first.request("GET", "/metrics")[1]
            )
            assert finished == second.request("GET", f"/retry-tasks/{task_id}")[1]


@pytest.mark.timeout(120)
def test_sigterm_finishes_attempts_and_releases_queued_tasks(tmp_path: Path) -> None:
    """On SIGTERM the running attempt is recorded, and queued tasks are released unsent."""
    may_respond = threading.Event()

    def respond_slowly(_path: str, _number: int) -> int:
        may_respond.wait(30)
        return 200

    with (
        target(respond_slowly) as receiver,
        service(tmp_path, "--set", "lane_in_flight=1") as running_service,
    ):
        for number in range(3):
            task = {"targetUrl": f"{receiver.url}/t/{number}"}
            running_service.request("POST", "/retry-tasks", task)
        running_service.wait_for(lambda: len(receiver.received_requests) == 1)
        threading.Timer(1.0, may_respond.set).start()
        assert 0 == running_service.stop()
        assert 1 == len(receiver.received_requests)

        running_service.start()
        running_service.wait_for(lambda: _all_tasks_finished(running_service))
        assert {1} == {task["attemptNumber"] for task in running_service.all_tasks()}
