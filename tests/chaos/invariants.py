"""The invariants of the service, checked during and after a simulation with faults.

0. The counters of the store match its tasks.
1. An accepted task is never lost, and reaches a terminal status.
2. For a task that SUCCEEDED, a 2xx response was received.
3. The attempt log is complete. Besides lost attempts, it has at most `maxAttempts` of them since
   the last replay. Only a process that was killed, stopped or suspended loses attempts, unless
   calls of the store have failed.
4. A finished task is not sent again.
5. A task keeps its id and its idempotency key.
6. No attempt starts before it is due.
7. All tasks that the store has leased to a live process are known to this process, except for a
   short time after a lost reply.
8. The first attempt of a new task starts within `10 + 2.5 (n + 1) + p (n / 3 + 1)` seconds after
   the task is due and the faults have ended. In this time, n other first attempts of the lane
   (also after a replay) start, and the lane is parked for up to p seconds at a time, because no
   attempt succeeds.
9. A replay ends, and counts every task that it has replayed.
10. A task is not EXHAUSTED before it was sent, unless its total budget has ended.
11. A task for a healthy target is sent within `World.max_wait_s` after it is due and the faults of
    the service have ended, even if other targets hang.
12. An open breaker admits probes only. No attempt starts while the breaker of its process is open,
    no task of a parked lane is claimed, and a half-open lane has at most as many leases as probes.

Users rely on 1 to 6 and 12; the others are checks of counters, replays and waiting times.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.breaker import BreakerState
from tarry.core.verdict import Reason
from tarry.service.delivery import Fault
from tarry.service.model import LOST, Status, Task
from tarry.service.store import (
    AddStatus,
    CancelStatus,
    FinishStatus,
    RetryNowStatus,
    StoredTaskFilter,
)
from tests.chaos.simulated_stores import run_synchronously

if TYPE_CHECKING:
    from tarry.service.delivery import DeliveryRequest, DeliveryResult
    from tarry.service.store import AddResult, ClaimResult, Store
    from tests.chaos.environment import Environment, SimulatedProcess

_ROUNDING_MS = 0.001
"""Tolerance for floating-point times."""
_ALL_TASKS = StoredTaskFilter()


class AcceptedTask(NamedTuple):
    """A task that was accepted with 200 or 201."""

    tenant: str
    id: str
    key: str
    max_attempts: int


class InvariantViolation(AssertionError):
    """An invariant does not hold. The message ends with the last lines of the history."""


class InvariantChecker:
    """Records accepted tasks, attempts and store calls, and checks them.

    The name of a task is the last part of its URL, which is unique in the simulation.
    """

    def __init__(self, store: Store, environment: Environment) -> None:
        self._store = store
        self._environment = environment
        self.accepted_tasks: dict[str, AcceptedTask] = {}
        """By name."""
        self.attempts: dict[str, int] = defaultdict(int)
        """Number of attempts, by task name."""
        self.first_attempt_times: dict[str, list[float]] = defaultdict(list)
        """The start times of first attempts, by lane."""
        self.parkings: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """The start and the end of each time for which a lane was parked, by lane."""
        self.key_headers: dict[str, str] = {}
        """`Idempotency-Key` header of the first attempt, by task name."""
        self.confirmed: set[str] = set()
        """Names of tasks for which the service has received a 2xx response."""
        self.finished: dict[str, str] = {}
        """The status of each finished task, by id."""
        self.retried_now: set[str] = set()
        """Ids of tasks that `retry_now` may have made due."""
        self.replaced: set[str] = set()
        """Names of tasks that were cancelled and created again; `attempts` counts both tasks."""
        self.lessees: dict[str, set[SimulatedProcess]] = defaultdict(set)
        """The processes to which a task was leased, by its id."""
        self.late_leases: set[str] = set()
        """Ids of tasks that a late effect has leased: the process does not know of the lease."""
        self.history: list[str] = []
        self.violation: InvariantViolation | None = None
        """The first violation. It is raised again at the end, because the engine may catch it."""

    # --- recording --------------------------------------------------------------------------------

    def record_accepted(self, name: str, task: AcceptedTask) -> None:
        """Record a task that was accepted."""
        first = self.accepted_tasks.setdefault(name, task)
        if first.id == task.id:
            return
        if run_synchronously(self._store.get_task(task.tenant, first.id)) is not None:
            self._fail(5, f"{name} has two tasks: {first.id} and {task.id}")
        # The first task was cancelled before the POST was repeated, and was replaced.
        self.accepted_tasks[name] = task
        self.replaced.add(name)

    def record_attempt(self, request: DeliveryRequest, process: SimulatedProcess) -> None:
        """Record the start of an attempt, and check it."""
        name, key_header = _task_name(request), dict(request.headers)["Idempotency-Key"]
        self._add_to_history(f"{process.name} starts an attempt of {name}")
        self.attempts[name] += 1
        # A replayed task sends a new callback task each time it finishes. The callback tasks have
        # the same URL, and thus the same name, but different keys.
        first_key_header = self.key_headers.setdefault(name, key_header)
        if first_key_header != key_header and not name.startswith("callback"):
            self._fail(5, f"{name} was sent with the keys {first_key_header} and {key_header}")
        task = self._find_task(request)
        if task is None:
            return
        lane = None if process.lanes is None else process.lanes.get(task.lane)
        if lane is not None and lane.breaker.state is BreakerState.OPEN:
            self._fail(12, f"{name} was sent although the breaker of its lane is open")
        if task.id in self.finished:
            self._fail(4, f"{name} was sent although it was {self.finished[task.id]}")
        now_ms = int(self._environment.now_s() * 1000 + _ROUNDING_MS)
        if now_ms < task.next_attempt_at and task.id not in self.retried_now:
            self._fail(6, f"{name} was sent {task.next_attempt_at - now_ms} ms early")
        if task.last_outcome_kind is None:  # no attempt has failed since the last replay
            self._check_first_wait(name, task)

    def _check_first_wait(self, name: str, task: Task) -> None:
        """Check how long a new task has waited for its first attempt, and count the attempt.

        Replayed tasks are counted, because the store claims them like new tasks. Their own wait is
        not checked: it depends on when the replay made them due.
        """
        environment, now = self._environment, asyncio.get_running_loop().time()
        due = now - environment.now_s() + task.next_attempt_at / 1000
        since = max(due, environment.faults_end_at)
        times = self.first_attempt_times[task.lane]
        before = len(times) - bisect_left(times, since)
        times.append(now)
        parkings = (end - start for start, end in self.parkings[task.lane] if end > since)
        parked_s = max(parkings, default=0.0)
        is_new = task.attempts == task.lost_attempts
        if is_new and now - since > 10 + 2.5 * (before + 1) + parked_s * (before / 3 + 1):
            wait = f"{now - since:.1f} s, while {before} others started"
            self._fail(8, f"{name} has waited for {wait}")

    def check_wait(
        self, request: DeliveryRequest, process: SimulatedProcess, dns_error: str | None = None
    ) -> None:
        """Check an attempt of a healthy target: its wait, and that its name was resolved."""
        task = self._find_task(request)
        if task is None:
            return
        environment, now = self._environment, asyncio.get_running_loop().time()
        # Before this process, the task may have waited in another one. There, its lane counts as
        # slow until the first attempt of the target has ended.
        processes = self.lessees[task.id] | {process}
        fast_since = max(each.steady_fast_since for each in processes)
        due = now - environment.now_s() + task.next_attempt_at / 1000
        since = max(
            due, environment.service_faults_end_at, fast_since if fast_since <= now else due
        )
        max_wait_s = environment.world.max_wait_s(is_new_lane=fast_since > now)
        if dns_error is not None or now - since > max_wait_s:
            reason = "" if dns_error is None else f", and was not resolved: {dns_error}"
            self._fail(11, f"{_task_name(request)} has waited for {now - since:.3f} s{reason}")

    def log_target_response(self, request: DeliveryRequest, result: DeliveryResult) -> None:
        """Add the response of a target to the history; the service may not receive it."""
        self._add_to_history(
            f"the target responds to {_task_name(request)}: {result.status or result.fault}"
        )

    def record_received_result(self, request: DeliveryRequest, result: DeliveryResult) -> None:
        """Record the result that the service receives for an attempt."""
        if result.fault is Fault.INTERNAL or result.pause_s is not None:
            # A failure that the target did not cause is not counted as an attempt.
            self.attempts[_task_name(request)] -= 1
        if isinstance(result.status, int) and 200 <= result.status < 300:
            self.confirmed.add(_task_name(request))

    def record_store_call(
        self,
        process: SimulatedProcess,
        method: str,
        args: tuple[Any, ...],
        returned: Any,
        *,
        is_late: bool = False,
    ) -> None:
        """Record the changes that a call of a store method has made."""
        for task in _leased_tasks(method, returned):
            self.lessees[task.id].add(process)
            if is_late:
                self.late_leases.add(task.id)
        if method == "claim":
            self._check_claimed_lanes(returned)
        elif method == "add" and is_late:
            self._record_late_tasks(returned)
        elif method == "finish":
            for result, finish_status in zip(args[0], returned, strict=True):
                if finish_status is FinishStatus.APPLIED and result.status.is_finished:
                    self.finished[result.task.id] = result.status.name
                elif finish_status is FinishStatus.CANCELLED:
                    self.finished[result.task.id] = "CANCELLED"
        elif method == "cancel" and returned is CancelStatus.CANCELLED:
            self.finished[args[1]] = "CANCELLED"
        elif method == "retry_now" and returned is RetryNowStatus.DUE:
            self.finished.pop(args[1], None)
            self.retried_now.add(args[1])
        elif method == "park":
            lane, until = args
            parked_s = until / 1000 - self._environment.now_s()
            now = asyncio.get_running_loop().time()
            self.parkings[lane].append((now, now + parked_s))
        elif method == "replay_step":
            for task in self._list_tasks():
                if task.status is Status.PENDING:
                    self.finished.pop(task.id, None)
        self._add_call_to_history(f"late {method}" if is_late else method, args, returned)

    def _check_claimed_lanes(self, claim: ClaimResult) -> None:
        """Check that a claim has leased only probes of half-open lanes, and none of parked ones."""
        for name in {task.lane for task in claim.tasks}:
            lane = run_synchronously(self._store.get_lane(name))
            if lane is None or lane.parked_until is None:
                continue
            leased = [
                task
                for task in self._list_tasks(StoredTaskFilter(lane=name, status=Status.IN_FLIGHT))
                if task.wake_at > claim.now
            ]
            if lane.parked_until > claim.now:
                self._fail(12, f"tasks of {name} were claimed although it is parked")
            if len(leased) > lane.probes:
                self._fail(12, f"{name} has {len(leased)} leases, but {lane.probes} probes")

    def _record_late_tasks(self, results: list[AddResult]) -> None:
        """Record tasks that replace cancelled ones, because a request had its effect late."""
        for result in results:
            name = result.task.key.removeprefix("key-")
            accepted = self.accepted_tasks.get(name)
            if result.status is AddStatus.ADDED and accepted is not None:
                self.accepted_tasks[name] = accepted._replace(id=result.task.id)
                self.replaced.add(name)

    def _add_call_to_history(self, method: str, args: tuple[Any, ...], returned: Any) -> None:
        name = method.removeprefix("late ")
        if name == "claim":
            details = [f"{task.key} v{task.version}" for task in returned.tasks]
        elif name == "add":
            details = [f"{added.task.key} {added.status} {added.leased}" for added in returned]
        elif name == "finish":
            pairs = zip(args[0], returned, strict=True)
            details = [
                f"{result.task.key} v{result.task.version} {result.status.name} {finish_status}"
                for result, finish_status in pairs
            ]
        elif name == "release":
            details = [f"{release.task.key} v{release.task.version}" for release in args[0]]
        elif name in {"cancel", "retry_now", "park", "resume", "release_unknown_leases"}:
            details = [*map(str, args), str(returned)]
        else:
            return
        if details:
            self._add_to_history(f"{method}: {', '.join(details)}")

    # --- checks after the faults ------------------------------------------------------------------

    def check_leases(self, worker: str, known_ids: Collection[str]) -> None:
        """Check that a process, whose worker has this name, knows its leases in the store."""
        for task in self.list_leases(worker):
            if task.id not in known_ids and task.id not in self.late_leases:
                self._fail(7, f"{worker} does not know its lease of {task.key}")

    def list_leases(self, worker: str) -> list[Task]:
        """Return the tasks that are leased to a process, whose worker has this name."""
        leased = self._list_tasks(StoredTaskFilter(status=Status.IN_FLIGHT))
        return [task for task in leased if task.worker == worker]

    def all_tasks_finished(self) -> bool:
        """Return whether every task has a terminal status, and every replay has ended."""
        replays = run_synchronously(self._store.list_replays(running=True))
        return not replays and not self.unfinished_keys()

    def unfinished_keys(self) -> list[str]:
        """Return the idempotency keys of the tasks without a terminal status."""
        return [task.key for task in self._list_tasks() if not task.status.is_finished]

    async def check_final_state(self) -> None:
        """Check the final state of all tasks, after the faults have stopped."""
        tasks = {task.id: task for task in self._list_tasks()}
        for name, (_, task_id, key, max_attempts) in self.accepted_tasks.items():
            task = tasks.get(task_id)
            if task is None:
                self._fail(1, f"{name} was accepted and is missing")
                continue
            if not task.status.is_finished:
                self._fail(1, f"{name} is still {task.status.name} at the end: {task}")
            if task.status is Status.SUCCEEDED and name not in self.confirmed:
                self._fail(2, f"{name} is SUCCEEDED without a 2xx response")
            is_unsent = not self.attempts[name] and task.reason != Reason.TOTAL_BUDGET
            if task.status is Status.EXHAUSTED and is_unsent:
                self._fail(10, f"{name} is EXHAUSTED ({task.reason}), but was never sent")
            if task.key != key:
                self._fail(5, f"{name} was accepted with the key {key}, but has {task.key}")
            await self._check_attempt_log(name, task, max_attempts)
        for replay in await self._store.list_replays(running=False):
            if replay.status != "done" or replay.replayed != sum(replay.finished.values()):
                self._fail(9, f"a replay is not done, or has not counted its tasks: {replay}")
        expected_counts: dict[Status, int] = defaultdict(int)
        for task in tasks.values():
            expected_counts[task.status] += 1
        counters = await self._store.counters()
        stored_counts = {status: count for status, count in counters.task_counts.items() if count}
        if stored_counts != dict(expected_counts):
            self._fail(0, f"the counters are {stored_counts}, expected {dict(expected_counts)}")

    async def _check_attempt_log(self, name: str, task: Task, max_attempts: int) -> None:
        attempt_log = await self._store.list_attempts(task.tenant, task.id, limit=1000)
        numbers = [attempt.attempt_number for attempt in attempt_log]
        if numbers != list(range(1, task.attempts + 1)):
            self._fail(3, f"{name} has {task.attempts} attempts, but its log has {numbers}")
        if self.attempts[name] > task.attempts and name not in self.replaced:
            self._fail(3, f"{name} was sent {self.attempts[name]} times, but its log has {numbers}")
        # A lost attempt of a task that was being cancelled is not in `lost_attempts`.
        lost = task.lost_attempts + (task.status is Status.CANCELLED)
        if task.attempts - task.attempts_before_replay - lost > max_attempts:
            self._fail(3, f"{name} has {task.attempts} attempts, but a maximum of {max_attempts}")
        for attempt in attempt_log:
            if attempt.outcome == LOST and not self._may_lose_leases(attempt.worker):
                self._fail(
                    3, f"{attempt.worker} has lost attempt {attempt.attempt_number} of {name}"
                )

    def _may_lose_leases(self, worker: str | None) -> bool:
        return self._environment.has_store_faults or any(
            process.may_lose_leases
            for process in self._environment.processes
            if process.name == worker
        )

    def _find_task(self, request: DeliveryRequest) -> Task | None:
        tenant, key = request.tenant, dict(request.headers)["Idempotency-Key"]
        accepted = self.accepted_tasks.get(_task_name(request))
        if accepted is not None:  # faster than a list of all tasks
            task = run_synchronously(self._store.get_task(tenant, accepted.id))
            if task is not None:
                return task
        page = run_synchronously(self._store.list_tasks(tenant, StoredTaskFilter(key=key), limit=1))
        return page.items[0] if page.items else None

    def _list_tasks(self, task_filter: StoredTaskFilter = _ALL_TASKS) -> list[Task]:
        tenants = self._environment.world.tenants
        pages = (self._store.list_tasks(name, task_filter, limit=10_000) for name in tenants)
        return [task for page in pages for task in run_synchronously(page).items]

    def _add_to_history(self, line: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {line}")

    def _fail(self, number: int, message: str) -> None:
        history = "\n".join(self.history[-400:])
        self.violation = self.violation or InvariantViolation(
            f"invariant {number}: {message}\n{history}"
        )
        raise self.violation


def _leased_tasks(method: str, returned: Any) -> list[Task]:
    """Return the tasks that a call of a store method has leased to its process."""
    if method == "add":
        return [added.task for added in returned if added.leased]
    return list(returned.tasks) if method == "claim" else []


def _task_name(request: DeliveryRequest) -> str:
    return request.url.rsplit("/", 1)[1]
