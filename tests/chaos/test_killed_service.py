"""A real service that is killed, suspended or terminated, with a real file and sockets."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.integration.service import TERMINAL, Service, Target, service, target

ROUNDS = int(os.environ.get("ROUNDS", "5"))


def _fail_every_fifth_task(path: str, number: int) -> int:
    """Fail the first attempt of every fifth task."""
    return 503 if number == 1 and int(path.rsplit("/", 1)[1]) % 5 == 0 else 200


class Callers:
    """Threads that post tasks one after the other, and record which were accepted."""

    def __init__(self, running: Service, to: Target, count: int = 4) -> None:
        self.accepted: dict[str, str] = {}
        """The key of each accepted task, by the path of its target."""
        self._running, self._to = running, to
        self._numbers = iter(range(1_000_000))
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._threads = [threading.Thread(target=self._post) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _post(self) -> None:
        while not self._is_stopping.is_set():
            with self._lock:
                path = f"/t/{next(self._numbers)}"
            task = {
                "targetUrl": self._to.url + path,
                "idempotencyKey": f"key{path}",
                "body": "hello",
                "policy": {"maxAttempts": 40, "maxDelayMs": 500},
            }
            while True:  # until it is accepted
                try:
                    status, answer = self._running.request("POST", "/retry-tasks", task)
                except (OSError, HTTPException):
                    time.sleep(0.02)
                    continue
                if status in {200, 201}:
                    with self._lock:
                        self.accepted[path] = answer["idempotencyKey"]
                    break
                time.sleep(0.02)

    def stop(self) -> None:
        """Stop after each thread's current task was accepted."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()


def _all_tasks_ended(running: Service) -> bool:
    return all(task["status"] in TERMINAL for task in running.all_tasks())


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_kill_9_at_random_moments_under_load(tmp_path: Path) -> None:
    """Every 201 is delivered at least once, no key changes, and the logs match what was sent."""
    rng = random.Random(7)
    with target(_fail_every_fifth_task) as to, service(tmp_path) as running:
        callers = Callers(running, to)
        for _ in range(ROUNDS):
            time.sleep(rng.random() * 1.5)
            running.kill()
            running.start()
        time.sleep(0.5)
        callers.stop()
        running.wait_for(lambda: _all_tasks_ended(running))

        tasks = {task["targetUrl"].removeprefix(to.url): task for task in running.all_tasks()}
        assert len(callers.accepted) > 10 * ROUNDS
        for path, key in callers.accepted.items():
            task, sent = tasks[path], to.seen[path]
            assert "SUCCEEDED" == task["status"]
            assert sent
            assert {f'"{key}"'} == {request["Idempotency-Key"] for request in sent}
            log = running.request("GET", f"/retry-tasks/{task['taskId']}/attempts")[1]["items"]
            numbers = [attempt["attemptNumber"] for attempt in log]
            assert list(range(1, task["attemptNumber"] + 1)) == numbers
            answered = [attempt for attempt in log if attempt["responseStatus"] is not None]
            assert len(answered) <= len(sent) <= len(log)
            assert "success" == log[-1]["outcome"]


@pytest.mark.timeout(180)
def test_process_suspended_past_its_lease_overwrites_nothing(tmp_path: Path) -> None:
    """Another process takes over the task; the first one's result is discarded and counted."""
    gate = threading.Event()

    def respond_slowly(_path: str, number: int) -> int:
        if number == 1:
            gate.wait(60)
        return 200

    flags = ("--set", "max_attempt_timeout_ms=1000", "--set", "lease_ms=6000")
    with target(respond_slowly) as to, service(tmp_path, *flags) as first:
        task = {"targetUrl": f"{to.url}/t/1", "policy": {"attemptTimeoutMs": 1000}}
        task_id = first.request("POST", "/retry-tasks", task)[1]["taskId"]
        first.wait_for(lambda: bool(to.seen["/t/1"]))
        os.kill(first.process.pid, signal.SIGSTOP)
        with service(tmp_path, *flags) as second:
            second.wait_for(
                lambda: second.request("GET", f"/retry-tasks/{task_id}")[1]["status"] == "SUCCEEDED"
            )
            ended = second.request("GET", f"/retry-tasks/{task_id}")[1]
            log = second.request("GET", f"/retry-tasks/{task_id}/attempts")[1]["items"]
            assert ["lost", "success"] == [attempt["outcome"] for attempt in log]

            os.kill(first.process.pid, signal.SIGCONT)
            gate.set()
            first.wait_for(
                lambda: "retry_superseded_total 1.0" in first.request("GET", "/metrics")[1]
            )
            assert ended == second.request("GET", f"/retry-tasks/{task_id}")[1]


@pytest.mark.timeout(120)
def test_sigterm_finishes_attempts_and_releases_other_tasks(tmp_path: Path) -> None:
    """The attempt in flight is recorded, and nothing stays leased."""
    gate = threading.Event()

    def respond_slowly(_path: str, _number: int) -> int:
        gate.wait(30)
        return 200

    with target(respond_slowly) as to, service(tmp_path, "--set", "lane_in_flight=1") as running:
        for number in range(3):
            task = {"targetUrl": f"{to.url}/t/{number}"}
            running.request("POST", "/retry-tasks", task)
        running.wait_for(lambda: len(to.seen) == 1)
        threading.Timer(1.0, gate.set).start()
        assert 0 == running.stop()
        assert 1 == len(to.seen)

        running.start()
        running.wait_for(lambda: _all_tasks_ended(running))
        assert {1} == {task["attemptNumber"] for task in running.all_tasks()}
