"""Clients that create tasks while faults happen, a target, and checks of its requests.

The invariants are numbered as in `invariants`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from itertools import count
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from tests.integration.service import TERMINAL_STATUSES, Service, Target

MAX_ATTEMPTS = 30
POLICY = {
    "maxAttempts": MAX_ATTEMPTS,
    "initialDelayMs": 50,
    "maxDelayMs": 500,
    "attemptTimeoutMs": 1000,
}
DELAY_MS = 900
"""Less than `horizon_ms`: a delayed task is leased at once and waits in a worker."""
PAUSE_S = 0.1
LIVE = ("PENDING", "IN_FLIGHT")
CLOCK_TOLERANCE_S = 0.005
"""Times are in milliseconds, and the anchored clock of SQLite may differ by some."""


FailureRule: TypeAlias = Callable[[int, int], bool]
"""Return whether the target fails a delivery, by the numbers of the task and of the delivery."""


def fail_some_first_deliveries(task_number: int, delivery_number: int) -> bool:
    """Fail the first delivery of every fifth task."""
    return delivery_number == 1 and task_number % 5 == 0


def fail_first_deliveries(_task_number: int, delivery_number: int) -> bool:
    """Fail the first delivery of each task."""
    return delivery_number == 1


def fail_half_of_deliveries(task_number: int, delivery_number: int) -> bool:
    """Fail half of the deliveries, at random."""
    return random.Random(f"{task_number}, {delivery_number}").random() < 0.5


class Delivery(NamedTuple):
    """A request that the target has received."""

    received_at: float
    """In epoch seconds."""
    status: int


class AcceptedTask(NamedTuple):
    """A task that the service has acknowledged."""

    id: str
    due_at: float
    """The earliest time at which it may be delivered, in epoch seconds."""
    is_cancelled: bool
    """Whether the service has confirmed that the task is cancelled."""


class Totals(NamedTuple):
    """Counts of a run."""

    accepted: int
    deliveries: int
    duplicates: int
    """Deliveries after a delivery to which the target had responded with 200."""
    lost_attempts: int
    late_responses: int


class Load:
    """Threads that create tasks one after the other, and a target that records deliveries.

    The target fails deliveries by a rule. Every seventh task is delayed, and half of the delayed
    tasks are cancelled. `name` is unique in the store.
    """

    def __init__(
        self,
        apis: list[Service],
        name: str,
        fails: FailureRule = fail_some_first_deliveries,
        thread_count: int = 3,
    ) -> None:
        self._name = name
        self._fails = fails
        self.accepted: dict[str, AcceptedTask] = {}
        """By the path of the target URL."""
        self.deliveries: dict[str, list[Delivery]] = defaultdict(list)
        self.target = Target(self._respond)
        self._apis = apis
        self._numbers = count()
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._create_tasks, args=(n,), daemon=True)
            for n in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def _respond(self, path: str, number: int) -> int:
        """Record a delivery, and return its status."""
        status = 503 if self._fails(int(path.rsplit("/", 1)[1]), number) else 200
        self.deliveries[path].append(Delivery(time.time(), status))
        return status

    def create_burst(self, count: int) -> None:
        """Create tasks without a pause between them."""
        rng = random.Random(count)
        for _ in range(count):
            self._create_task(rng)

    def _create_tasks(self, thread_number: int) -> None:
        rng = random.Random(thread_number)
        while not self._is_stopping.is_set():
            self._create_task(rng)
            time.sleep(PAUSE_S)

    def _create_task(self, rng: random.Random) -> None:
        number = next(self._numbers)
        path = f"/{self._name}/{number}"
        is_delayed = number % 7 == 0
        delay_ms = DELAY_MS if is_delayed else 0
        task = {
            "targetUrl": self.target.url + path,
            "idempotencyKey": f"key{path}",
            "body": "hello",
            "policy": POLICY,
            "delayMs": delay_ms,
        }
        due_at = time.time() + delay_ms / 1000
        task_id = self._request_until(rng, {200, 201}, "POST", "/retry-tasks", task)["taskId"]
        is_cancelled = False
        if is_delayed and number % 2:
            # 202 and 409: an attempt runs, or the task is finished.
            status = self._request_until(
                rng, {200, 202, 409}, "DELETE", f"/retry-tasks/{task_id}"
            ).get("status")
            is_cancelled = status == "CANCELLED" and not self.deliveries[path]
        self.accepted[path] = AcceptedTask(task_id, due_at, is_cancelled)

    def _request_until(
        self, rng: random.Random, statuses: set[int], method: str, path: str, body: Any = None
    ) -> dict[str, Any]:
        """Repeat a request, to any process, until its response has one of these statuses."""
        while True:
            with suppress(OSError, HTTPException):
                status, response = rng.choice(self._apis).request(method, path, body)
                if status in statuses:
                    found: dict[str, Any] = response
                    return found
                assert 503 == status, response
            time.sleep(PAUSE_S)

    def stop(self) -> None:
        """Stop the threads; each waits until its current task is accepted."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_until_finished(self, api: Service) -> None:
        """Wait until all tasks are finished."""
        api.wait_for(lambda: not self.unfinished_tasks(api))

    def unfinished_tasks(self, api: Service) -> list[dict[str, Any]]:
        """Return some tasks that are not finished; an empty list if all are finished."""
        # A task may change its status between two requests. The search by status is only faster.
        found = [task for name in LIVE for task in self._list(api, "/retry-tasks", status=name)]
        return found or [
            task
            for task in self._list(api, "/retry-tasks")
            if task["status"] not in TERMINAL_STATUSES
        ]

    def _list(
        self, api: Service, path: str, *, status: str | None = None, limit: int = 500
    ) -> list[dict[str, Any]]:
        """Return tasks or attempts of this target; an unfinished task if the store is unavailable.

        With a `status`, return at most `limit` of them.
        """
        items: list[dict[str, Any]] = []
        lane = quote(self.target.url.replace("//", ""))
        query = f"limit={limit}&lane={lane}" + (f"&status={status}" if status else "")
        cursor = ""
        while True:
            code, page = api.request("GET", f"{path}?{query}{cursor}")
            if code == 503:
                return [{"status": "unknown"}]
            items += page["items"]
            if page["nextCursor"] is None or status:
                return items
            cursor = f"&cursor={page['nextCursor']}"

    def check(self, api: Service) -> Totals:
        """Check the invariants, when all tasks are finished."""
        tasks = {task["taskId"]: task for task in self._list(api, "/retry-tasks")}
        logs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for attempt in self._list(api, "/attempts"):
            logs[attempt["taskId"]].append(attempt)
        duplicates = lost_attempts = late_responses = 0
        for path, accepted in self.accepted.items():
            task = tasks.pop(accepted.id, None)
            deliveries = self.deliveries[path]
            assert task is not None, f"invariant 1: {path} was accepted and is missing"
            assert task["idempotencyKey"] == f"key{path}", f"invariant 5: {task}"
            log = sorted(logs[accepted.id], key=lambda attempt: int(attempt["attemptNumber"]))
            details = f"{task}\n{deliveries}\n" + "\n".join(map(str, log))
            successes = [delivery for delivery in deliveries if delivery.status == 200]
            if accepted.is_cancelled:
                assert "CANCELLED" == task["status"], f"invariant 4: {details}"
                assert not deliveries, f"invariant 4: {details}"
            elif task["status"] == "CANCELLED":  # an attempt was running
                assert int(path.rsplit("/", 1)[1]) % 7 == 0, details
            else:
                assert "SUCCEEDED" == task["status"], f"invariant 1: {details}"
                assert successes, f"invariant 2: {details}"
                assert "success" == log[-1]["outcome"], f"invariant 2: {details}"
            numbers = [attempt["attemptNumber"] for attempt in log]
            assert list(range(1, task["attemptNumber"] + 1)) == numbers, f"invariant 3: {details}"
            lost = sum(attempt["outcome"] == "lost" for attempt in log)
            assert len(deliveries) <= len(log) <= MAX_ATTEMPTS + lost, f"invariant 3: {details}"
            # A delivery after a success is explained by a worker that has lost its lease, or on a
            # busy machine by a response that has arrived after the timeout of the attempt.
            late = sum(attempt["errorClass"] == "timeout" for attempt in log)
            assert len(successes) <= 1 + lost + late, f"invariant 4: {details}"
            headers = self.target.received_requests[path]
            assert {f"key{path}"} >= {each["Idempotency-Key"] for each in headers}, details
            sent_numbers = [each["X-Retry-Attempt"] for each in headers]
            assert len(set(sent_numbers)) == len(sent_numbers), f"invariant 3: {details}"
            for delivery in deliveries:
                early_s = accepted.due_at - delivery.received_at
                assert early_s <= CLOCK_TOLERANCE_S, f"invariant 6: {early_s} {details}"
            for attempt in log:
                assert attempt["scheduledAt"] <= attempt["startedAt"], f"invariant 6: {details}"
            duplicates += max(0, len(successes) - 1)
            lost_attempts += lost
            late_responses += late
        assert not tasks, f"invariant 5: tasks that no client has created: {tasks}"
        deliveries_count = sum(map(len, self.deliveries.values()))
        return Totals(
            len(self.accepted), deliveries_count, duplicates, lost_attempts, late_responses
        )


@contextmanager
def load(
    apis: list[Service],
    name: str,
    fails: FailureRule = fail_some_first_deliveries,
    thread_count: int = 3,
) -> Iterator[Load]:
    """Create tasks for the duration of a block."""
    running = Load(apis, name, fails, thread_count)
    try:
        yield running
    finally:
        running.stop()
        running.target.close()
