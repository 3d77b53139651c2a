"""What came of tasks: written down in groups, and only then told to anybody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec import Struct

from tarry.service.engine import attempts
from tarry.service.engine.batches import Batches
from tarry.service.engine.persistence import until_taken
from tarry.service.engine.waiters import Settled
from tarry.service.model import Status
from tarry.service.store import FinishStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.delivery.messages import DeliveryResult
    from tarry.service.engine.hold import Hold
    from tarry.service.engine.lanes import LeasedTask
    from tarry.service.engine.parts import Parts
    from tarry.service.engine.telling import Teller
    from tarry.service.model import Task
    from tarry.service.store import TaskResult

_logger = logging.getLogger("tarry.service")
GROUP = 500
ENDLESS = 1 << 60
"""Ends are never refused: there are no more of them than attempts."""


class _End(Struct, gc=False):
    """A result on its way into the store; without `held` somebody else waits for the answer."""

    finish: TaskResult
    held: LeasedTask | None = None
    delivered: DeliveryResult | None = None


class Ends:
    """Writes results, then lets tasks `wait` for more or go; `room` is called for the latter."""

    def __init__(
        self,
        parts: Parts,
        hold: Hold,
        teller: Teller,
        *,
        wait: Callable[[LeasedTask], None],
        room: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._hold = hold
        self._teller = teller
        self._wait = wait
        self._room = room
        self._batches: Batches[_End, FinishStatus] = Batches(
            self._write, most=GROUP, waiting=ENDLESS
        )

    async def flushed(self) -> None:
        """Return when all are written."""
        await self._batches.flushed()

    async def stop(self) -> None:
        """Write nothing more."""
        await self._batches.stop()

    @property
    def waiting(self) -> int:
        """How many wait, or are being written."""
        return self._batches.waiting

    @property
    def posted(self) -> int:
        """How many there have been so far, written or not."""
        return self._batches.taken

    def post(self, finish: TaskResult, held: LeasedTask, delivered: DeliveryResult | None) -> None:
        """Have what came of a task that is held written down, in a group with others."""
        content = held.content
        if content is not None and content.callback_url is not None and finish.status.is_terminal:
            finish.callback = self._parts.callback(finish.task, content, finish)
        self._batches.post(_End(finish, held, delivered))

    async def put(self, finish: TaskResult) -> FinishStatus:
        """Write an end that nobody attempted: a cancelled task that was held here."""
        return (await self._batches.put([_End(finish)]))[0]

    def tell(self, task: Task) -> None:
        """Tell that a task was cancelled by hand."""
        now = self._parts.clock.now()
        self._teller.ended(Status.CANCELLED, task, task.attempts, None, now)

    async def _write(self, ends: Sequence[_End]) -> Sequence[FinishStatus]:
        finishes, parts = [end.finish for end in ends], self._parts
        try:
            answers = await until_taken(lambda: parts.store.finish(finishes), parts.health)
        except BaseException as error:
            if isinstance(error, Exception) and len(ends) > 1:
                return await self._write_singly(ends)
            for end in ends:  # their leases end by themselves, and somebody takes them up
                if end.held is not None:
                    self._hold.drop(end.held)
            raise
        now, before = parts.clock.now(), len(self._hold)
        for end, finished in zip(ends, answers, strict=True):
            if end.held is not None:
                try:
                    self._settled(end.held, end.finish, end.delivered, finished, now)
                except Exception:
                    _logger.exception(
                        "task %s is written, but not gone on with", end.finish.task.id
                    )
        if len(self._hold) < before:
            self._room()
        return answers

    async def _write_singly(self, ends: Sequence[_End]) -> Sequence[FinishStatus]:
        """Write results one by one: one that the store refuses takes no other with it."""
        answers: list[FinishStatus] = []
        for end in ends:
            try:
                answers += await self._write([end])
            except Exception:
                _logger.exception("what came of task %s is not written down", end.finish.task.id)
                answers.append(FinishStatus.SUPERSEDED)
        return answers

    def _settled(
        self,
        held: LeasedTask,
        finish: TaskResult,
        delivered: DeliveryResult | None,
        finished: FinishStatus,
        now: int,
    ) -> None:
        """Tell what was written, then go on with the task or let it go."""
        task = finish.task
        if finished is FinishStatus.DONE and finish.keep is not None:
            held.task = attempts.kept(task, finish)
            self._teller.attempt(finish, now)
            self._wait(held)
            return
        self._hold.drop(held)
        if finished is FinishStatus.SUPERSEDED:
            _logger.warning("task %s was taken over: our result of it is void", task.id)
            self._teller.superseded(task, now)
            return
        self._teller.attempt(finish, now)
        status = Status.CANCELLED if finished is FinishStatus.CANCELLED else finish.status
        if status.is_terminal:
            made = task.attempts + (finish.attempt is not None)
            self._teller.ended(status, task, made, finish.reason, now)
            if task.id in self._parts.waiters.waiting:
                self._parts.waiters.tell(task.id, Settled(status, finish.reason, delivered))
