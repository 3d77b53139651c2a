"""What came of tasks: written down in groups, and only then told to anybody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from tarry.service.delivery.targets import parse_target
from tarry.service.engine import attempts
from tarry.service.engine.context import retry_until_stored
from tarry.service.engine.reporting import TaskCompletion
from tarry.service.group_commit import AsyncGroupCommit
from tarry.service.model import Status, Task, TaskContent
from tarry.service.store import FinishStatus
from tarry.wire.tasks import STATUS_NAMES, TaskEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.store import TaskResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.delivery.messages import DeliveryResult
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.lanes import LeasedTask
    from tarry.service.engine.leased_tasks import LeasedTasks
    from tarry.service.engine.reporting import Reporter
    from tarry.service.store import TaskResult

_logger = logging.getLogger("tarry.service")
GROUP = 500


class _End(Struct, gc=False):
    """A result on its way into the store; without `held` somebody else waits for the answer."""

    finish: TaskResult
    held: LeasedTask | None = None
    delivered: DeliveryResult | None = None


class ResultWriter:
    """Writes results, then lets tasks `wait` for more or go; `room` is called for the latter."""

    def __init__(
        self,
        context: EngineContext,
        hold: LeasedTasks,
        reporter: Reporter,
        *,
        wait: Callable[[LeasedTask], None],
        room: Callable[[], None],
    ) -> None:
        self._context = context
        self._hold = hold
        self._reporter = reporter
        self._wait = wait
        self._room = room
        self._commits: AsyncGroupCommit[_End, FinishStatus] = AsyncGroupCommit(
            self._write, max_items=GROUP, max_pending=None
        )

    async def flushed(self) -> None:
        """Return when all are written."""
        await self._commits.flush()

    async def stop(self) -> None:
        """Write nothing more."""
        await self._commits.stop()

    @property
    def waiting(self) -> int:
        """How many wait, or are being written."""
        return self._commits.pending

    @property
    def posted(self) -> int:
        """How many there have been so far, written or not."""
        return self._commits.submitted

    def post(self, finish: TaskResult, held: LeasedTask, delivered: DeliveryResult | None) -> None:
        """Have what came of a task that is held written down, in a group with others."""
        content = held.content
        if content is not None and content.callback_url is not None and finish.status.is_terminal:
            finish.callback = self._context.callback(finish.task, content, finish)
        self._commits.post(_End(finish, held, delivered))

    async def put(self, finish: TaskResult) -> FinishStatus:
        """Write an end that nobody attempted: a cancelled task that was held here."""
        return (await self._commits.submit([_End(finish)]))[0]

    def tell(self, task: Task) -> None:
        """Tell that a task was cancelled by hand."""
        now = self._context.clock.now()
        self._reporter.ended(Status.CANCELLED, task, task.attempts, None, now)

    async def _write(self, ends: Sequence[_End]) -> Sequence[FinishStatus]:
        finishes, context = [end.finish for end in ends], self._context
        try:
            answers = await retry_until_stored(
                lambda: context.store.finish(finishes), context.health
            )
        except BaseException as error:
            if isinstance(error, Exception) and len(ends) > 1:
                return await self._write_singly(ends)
            for end in ends:  # their leases end by themselves, and somebody takes them up
                if end.held is not None:
                    self._hold.drop(end.held)
            raise
        now, before = context.clock.now(), len(self._hold)
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
            self._reporter.attempt(finish, now)
            self._wait(held)
            return
        self._hold.drop(held)
        if finished is FinishStatus.SUPERSEDED:
            _logger.warning("task %s was taken over: our result of it is void", task.id)
            self._reporter.superseded(task, now)
            return
        self._reporter.attempt(finish, now)
        status = Status.CANCELLED if finished is FinishStatus.CANCELLED else finish.status
        if status.is_terminal:
            made = task.attempts + (finish.attempt is not None)
            self._reporter.ended(status, task, made, finish.reason, now)
            if task.id in self._context.waiters.waiting:
                self._context.waiters.tell(
                    task.id, TaskCompletion(status, finish.reason, delivered)
                )


_encode = msgspec.json.Encoder().encode


def build_callback_task(
    task: Task,
    content: TaskContent,
    finish: TaskResult,
    *,
    new_id: Callable[[], str],
    pack: Callable[[TaskContent], bytes],
) -> Task:
    """Return the task that posts how `task` ended to its `callbackUrl`."""
    url = content.callback_url
    assert url is not None  # noqa: S101 - asked for with one
    target = parse_target(url)
    attempt = finish.attempt
    body = _encode(
        TaskEnd(
            task_id=task.id,
            idempotency_key=task.key,
            target_url=content.url.partition("?")[0],
            status=STATUS_NAMES[finish.status],
            reason=finish.reason,
            attempt_number=task.attempts + (attempt is not None),
            response_status=None if attempt is None else attempt.status,
            created_at=task.created_at,
        )
    )
    told = TaskContent(
        url=target.url,
        headers={"content-type": "application/json"},
        body=body,
        body_size=len(body),
        trace=content.trace,
    )
    return Task(
        id=new_id(),
        tenant=task.tenant,
        lane=f"{task.tenant}/{target.origin}",
        # One end, one callback; a replay that ends again tells it again.
        key=f"{task.id}-callback-{task.replays}",
        fingerprint=b"",
        content=pack(told),
    )
