"""The invariants of the service, checked during and after a simulation with faults.

1. An accepted task is never lost, and ends.
2. SUCCEEDED means that a 2xx response was received.
3. The attempt log is complete.
4. A task that has ended is not sent again.
5. A task keeps its id and its idempotency key.
6. No attempt is early.
0. Counters match the stored tasks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.service.delivery import Fault
from tarry.service.model import Status, Task
from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus, TaskFilter

if TYPE_CHECKING:
    from tarry.service.delivery import DeliveryRequest, DeliveryResult
    from tarry.service.store import Store
    from tests.chaos.environment import Environment

_CLOCK_JUMP_GRACE_S = 10.0
"""A worker notices a clock jump at its next claim, and claims may be refused a few times."""
_ROUNDING_MS = 0.001
"""The difference that floating-point times of two clocks may have."""
T = TypeVar("T")


class InvariantViolation(AssertionError):
    """An invariant does not hold; the message has the end of the history."""


class InvariantChecker:
    """Records accepted tasks, attempts and store calls, and checks them.

    A task is identified by the last part of its URL, which is unique in the simulation.
    """

    def __init__(self, store: Store, environment: Environment) -> None:
        self._store = store
        self._environment = environment
        self.accepted_tasks: dict[str, tuple[str, str]] = {}
        """Id and key of each task that was accepted with 201 or 200, by its name."""
        self.attempts: dict[str, int] = defaultdict(int)
        """Number of attempts, by task name."""
        self.keys: dict[str, str] = {}
        self.confirmed: set[str] = set()
        """Names of tasks for which the service has received a 2xx response."""
        self.ended: dict[str, str] = {}
        """Ids of tasks that are terminal or whose cancellation was confirmed, with the status."""
        self.retried_now: set[str] = set()
        self.history: list[str] = []
        self.violation: InvariantViolation | None = None
        """The first violation: raised again at the end, because the engine may catch it."""

    # --- recording --------------------------------------------------------------------------------

    def record_accepted(self, name: str, task_id: str, key: str) -> None:
        """Record a task that was accepted."""
        before, _ = self.accepted_tasks.setdefault(name, (task_id, key))
        if before != task_id:
            self._fail(5, f"{name} has two tasks: {before} and {task_id}")

    def record_attempt(self, request: DeliveryRequest, process: str) -> None:
        """Record the start of an attempt, and check it."""
        name, key = _name(request), dict(request.headers)["Idempotency-Key"]
        self._log(f"{process} begins {name}")
        self.attempts[name] += 1
        # A task that is replayed has two callbacks, which are different tasks.
        if self.keys.setdefault(name, key) != key and not name.startswith("callback"):
            self._fail(5, f"{name} went out with the keys {self.keys[name]} and {key}")
        task = self._task(key)
        if task is None:
            return
        # A clock jump ends leases, or makes a due attempt look early.
        recent = (
            asyncio.get_running_loop().time() - self._environment.jumped_at < _CLOCK_JUMP_GRACE_S
        )
        if task.id in self.ended and not recent:
            self._fail(4, f"{name} was sent after it was {self.ended[task.id]}")
        now = int(self._environment.epoch() * 1000 + _ROUNDING_MS)
        if now < task.next_attempt_at and task.id not in self.retried_now and not recent:
            self._fail(6, f"{name} was sent {task.next_attempt_at - now} ms early")

    def record_response(self, request: DeliveryRequest, answer: DeliveryResult) -> None:
        """Record the response of a target."""
        self._log(f"{_name(request)} is answered {answer.status or answer.fault}")

    def record_delivery(self, request: DeliveryRequest, answer: DeliveryResult) -> None:
        """Record the result that the service gets for an attempt."""
        if answer.fault is Fault.INTERNAL:
            self.attempts[_name(request)] -= 1  # an internal failure does not count
        if isinstance(answer.status, int) and 200 <= answer.status < 300:
            self.confirmed.add(_name(request))

    def record_store_call(self, call: str, args: tuple[Any, ...], answer: Any) -> None:
        """Record what a call has changed in the store."""
        if call == "finish":
            for result, status in zip(args[0], answer, strict=True):
                if status is FinishStatus.APPLIED and result.status.is_finished:
                    self.ended[result.task.id] = result.status.name
                elif status is FinishStatus.CANCELLED:
                    self.ended[result.task.id] = "CANCELLED"
        elif call == "cancel" and answer is CancelStatus.CANCELLED:
            self.ended[args[1]] = "CANCELLED"
        elif call == "retry_now" and answer is RetryNowStatus.DUE:
            self.ended.pop(args[1], None)
            self.retried_now.add(args[1])
        elif call == "replay_step":
            for task in self._tasks():
                if task.status is Status.PENDING:
                    self.ended.pop(task.id, None)
        self._log_store_call(call, args, answer)

    def _log_store_call(self, call: str, args: tuple[Any, ...], answer: Any) -> None:
        if call == "claim":
            details = [f"{task.key} v{task.version}" for task in answer.tasks]
        elif call == "add":
            details = [f"{added.task.key} {added.status} {added.leased}" for added in answer]
        elif call == "finish":
            pairs = zip(args[0], answer, strict=True)
            details = [
                f"{result.task.key} v{result.task.version} {result.status.name} {status}"
                for result, status in pairs
            ]
        elif call == "release":
            details = [f"{release.task.key} v{release.task.version}" for release in args[0]]
        elif call in {"cancel", "retry_now", "park", "resume"}:
            details = [*map(str, args), str(answer)]
        else:
            return
        if details:
            self._log(f"{call}: {', '.join(details)}")

    # --- checks at the end ------------------------------------------------------------------------

    def all_tasks_ended(self) -> bool:
        """Return whether every task has a terminal status."""
        return all(task.status.is_finished for task in self._tasks())

    async def check_end(self) -> None:
        """Check the final state of all tasks, after the faults have stopped."""
        tasks = {task.id: task for task in self._tasks()}
        for name, (task_id, key) in self.accepted_tasks.items():
            task = tasks.get(task_id)
            if task is None:
                self._fail(1, f"{name} was accepted and is missing")
                continue
            if not task.status.is_finished:
                self._fail(1, f"{name} is {task.status.name} after all this time: {task}")
            if task.status is Status.SUCCEEDED and name not in self.confirmed:
                self._fail(2, f"{name} is SUCCEEDED without a 2xx response")
            if task.key != key:
                self._fail(5, f"{name} changed its key")
            log = await self._store.list_attempts(task.tenant, task.id, limit=1000)
            numbers = [attempt.number for attempt in log]
            if numbers != list(range(1, task.attempts + 1)):
                self._fail(3, f"{name} has {task.attempts} attempts and the log {numbers}")
            if self.attempts[name] > task.attempts:
                self._fail(3, f"{name} was sent {self.attempts[name]} times, log {numbers}")
        counted: dict[Status, int] = defaultdict(int)
        for task in tasks.values():
            counted[task.status] += 1
        counters = await self._store.counters()
        stored = {status: count for status, count in counters.task_counts.items() if count}
        if stored != dict(counted):
            self._fail(0, f"the counters say {stored}, and there are {dict(counted)}")

    def _task(self, key: str) -> Task | None:
        return next((task for task in self._tasks() if f'"{task.key}"' == key), None)

    def _tasks(self) -> list[Task]:
        return run_synchronously(self._store.list_tasks("default", TaskFilter(), limit=1000)).items

    def _log(self, line: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {line}")

    def _fail(self, number: int, message: str) -> None:
        history = "\n".join(self.history[-400:])
        self.violation = self.violation or InvariantViolation(
            f"invariant {number}: {message}\n{history}"
        )
        raise self.violation


def run_synchronously(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    msg = "the coroutine waits"
    raise AssertionError(msg)


def _name(request: DeliveryRequest) -> str:
    return request.url.rsplit("/", 1)[1]
