"""What must hold whatever goes wrong: the seven invariants, watched while a simulation runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.service.delivery.messages import Fault
from tarry.service.model import Status, Task
from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus, TaskFilter

if TYPE_CHECKING:
    from tarry.service.delivery.messages import DeliveryRequest, DeliveryResult
    from tarry.service.store import Store
    from tests.chaos.world import World

_HEARD_OF = 10.0
_ROUNDING = 0.001
"""Milliseconds: what floats of today's date, of two clocks, may differ by."""
T = TypeVar("T")


class Broken(AssertionError):
    """An invariant does not hold."""


class Oracle:
    """Sees everything from outside: what was promised, what the targets got, what is stored.

    A task is known by the last part of its URL, which the simulation makes unique.
    """

    def __init__(self, store: Store, world: World) -> None:
        self._store = store
        self._world = world
        self.promised: dict[str, tuple[str, str]] = {}
        """Id and key of the tasks that somebody was told are kept, by the end of their URL."""
        self.attempts: dict[str, int] = defaultdict(int)
        """Attempts that began, by task."""
        self.keys: dict[str, str] = {}
        self.well: set[str] = set()
        """Tasks whose target's 2xx came back to the service."""
        self.over: dict[str, str] = {}
        """Task ids that are terminal, or whose cancel was confirmed, and why."""
        self.hurried: set[str] = set()
        self.history: list[str] = []
        self.broken: Broken | None = None
        """The first thing that went wrong: raised again at the end, for the engine may catch it."""

    # --- what happens -----------------------------------------------------------------------------

    def promise(self, name: str, task_id: str, key: str) -> None:
        """Learn that a caller was answered 201 or 200."""
        before, _ = self.promised.setdefault(name, (task_id, key))
        if before != task_id:
            self._broken(5, f"{name} has two tasks: {before} and {task_id}")

    def began(self, request: DeliveryRequest, process: str) -> None:
        """Learn that a process has begun an attempt."""
        name, key = _name(request), dict(request.headers)["Idempotency-Key"]
        self._log(f"{process} begins {name}")
        self.attempts[name] += 1
        # The end of a task that was replayed is told again, by another task.
        if self.keys.setdefault(name, key) != key and not name.startswith("callback"):
            self._broken(5, f"{name} went out with the keys {self.keys[name]} and {key}")
        task = self._task(key)
        if task is None:
            return
        # A clock that jumps ends leases, or makes what is due look early, and a worker hears of it
        # by its next claim. A claim may be refused a few times.
        recent = asyncio.get_running_loop().time() - self._world.jumped_at < _HEARD_OF
        if task.id in self.over and not recent:
            self._broken(4, f"{name} was sent after it was {self.over[task.id]}")
        now = int(self._world.epoch() * 1000 + _ROUNDING)
        if now < task.next_attempt_at and task.id not in self.hurried and not recent:
            self._broken(6, f"{name} was sent {task.next_attempt_at - now} ms early")

    def arrived(self, request: DeliveryRequest, answer: DeliveryResult) -> None:
        """Learn what a target says to an attempt."""
        self._log(f"{_name(request)} is answered {answer.status or answer.fault}")

    def returned(self, request: DeliveryRequest, answer: DeliveryResult) -> None:
        """Learn what the service hears of it."""
        if answer.fault is Fault.INTERNAL:
            self.attempts[_name(request)] -= 1  # it was none: our own side failed
        if isinstance(answer.status, int) and 200 <= answer.status < 300:
            self.well.add(_name(request))

    def wrote(self, call: str, args: tuple[Any, ...], answer: Any) -> None:
        """Learn what a call has changed in the store."""
        if call == "finish":
            for finish, finished in zip(args[0], answer, strict=True):
                if finished is FinishStatus.DONE and finish.status.is_terminal:
                    self.over[finish.task.id] = finish.status.name
                elif finished is FinishStatus.CANCELLED:
                    self.over[finish.task.id] = "CANCELLED"
        elif call == "cancel" and answer is CancelStatus.CANCELLED:
            self.over[args[1]] = "CANCELLED"
        elif call == "retry_now" and answer is RetryNowStatus.DUE:
            self.over.pop(args[1], None)
            self.hurried.add(args[1])
        elif call == "replay_step":
            for task in self._tasks():
                if task.status is Status.PENDING:
                    self.over.pop(task.id, None)
        self._tell(call, args, answer)

    def _tell(self, call: str, args: tuple[Any, ...], answer: Any) -> None:
        if call == "claim":
            told = [f"{task.key} v{task.version}" for task in answer.tasks]
        elif call == "add":
            told = [f"{one.task.key} {one.status} {one.leased}" for one in answer]
        elif call == "finish":
            pairs = zip(args[0], answer, strict=True)
            told = [
                f"{end.task.key} v{end.task.version} {end.status.name} {done}"
                for end, done in pairs
            ]
        elif call == "release":
            told = [f"{one.task.key} v{one.task.version}" for one in args[0]]
        elif call in {"cancel", "retry_now", "park", "resume"}:
            told = [*map(str, args), str(answer)]
        else:
            return
        if told:
            self._log(f"{call}: {', '.join(told)}")

    # --- what must be true at the end -------------------------------------------------------------

    def all_is_over(self) -> bool:
        """Say whether every task has ended."""
        return all(task.status.is_terminal for task in self._tasks())

    async def check_end(self) -> None:
        """Check what can be said when nothing goes wrong any more and everything had its time."""
        tasks = {task.id: task for task in self._tasks()}
        for name, (task_id, key) in self.promised.items():
            task = tasks.get(task_id)
            if task is None:
                self._broken(1, f"{name} was promised and is gone")
                continue
            if not task.status.is_terminal:
                self._broken(1, f"{name} is {task.status.name} after all this time: {task}")
            if task.status is Status.SUCCEEDED and name not in self.well:
                self._broken(2, f"{name} is SUCCEEDED, and no 2xx came back")
            if task.key != key:
                self._broken(5, f"{name} changed its key")
            log = await self._store.list_attempts(task.tenant, task.id, limit=1000)
            numbers = [attempt.number for attempt in log]
            if numbers != list(range(1, task.attempts + 1)):
                self._broken(3, f"{name} has {task.attempts} attempts and the log {numbers}")
            if self.attempts[name] > task.attempts:
                self._broken(3, f"{name} was sent {self.attempts[name]} times, log {numbers}")
        counted: dict[Status, int] = defaultdict(int)
        for task in tasks.values():
            counted[task.status] += 1
        counters = await self._store.counters()
        kept = {status: count for status, count in counters.tasks.items() if count}
        if kept != dict(counted):
            self._broken(0, f"the counters say {kept}, and there are {dict(counted)}")

    def _task(self, key: str) -> Task | None:
        return next((task for task in self._tasks() if f'"{task.key}"' == key), None)

    def _tasks(self) -> list[Task]:
        return at_once(self._store.list_tasks("default", TaskFilter(), limit=1000)).items

    def _log(self, line: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {line}")

    def _broken(self, number: int, what: str) -> None:
        story = "\n".join(self.history[-400:])
        self.broken = self.broken or Broken(f"invariant {number}: {what}\n{story}")
        raise self.broken


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine comes to that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    msg = "it waits for something"
    raise AssertionError(msg)


def _name(request: DeliveryRequest) -> str:
    return request.url.rsplit("/", 1)[1]
