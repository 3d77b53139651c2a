"""The worker: it starts what is due, obeys the core, and writes down what came of it.

The order of an attempt's life: admitted by its lane, sent, judged by the core, written in a group
with others, and only then told to anybody. Between these it waits in callbacks, not in a coroutine
of its own: at thousands of attempts a second those are what costs.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from msgspec import MsgspecError

from tarry.core.durable_call import Defer
from tarry.core.outcome import SUCCESS, TRANSIENT
from tarry.core.verdict import Attempt as Go
from tarry.core.verdict import Reason, Wait
from tarry.errors import StoreUnavailable, TarryError
from tarry.service.defaults import LEASE_GRACE_MS
from tarry.service.delivery.messages import DeliveryResult, Fault
from tarry.service.engine import attempts
from tarry.service.engine.context import FIRST_PAUSE, retry_until_stored
from tarry.service.engine.lane_parking import LaneParking
from tarry.service.engine.leased_tasks import LeasedTasks
from tarry.service.engine.reporting import Reporter, TaskCompletion
from tarry.service.engine.result_writer import GROUP, ResultWriter
from tarry.service.group_commit import AsyncGroupCommit
from tarry.service.model import Decision, Status
from tarry.service.payloads import BodyUnavailable
from tarry.service.store import FinishStatus, Release

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import Any

    from tarry.core.durable_call import DurableCall
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.lanes import LaneState, LeasedTask
    from tarry.service.engine.policies import EffectivePolicy
    from tarry.service.model import Task, TaskContent

_logger = logging.getLogger("tarry.service")
_TIMEOUT = 30.0
_OURS_AGAIN = 1_000
"""Milliseconds after which a task is tried again that our own side has failed."""
_UNREADABLE_AGAIN = 60_000
_MOST_LOST = 10
"""Attempts of a task that may be lost: one that brings the process down each time must end."""
_INSTANT = 0.001


class Worker:
    """Runs attempts, at most `most_running` at a time. `room` is called when a task has left."""

    def __init__(self, context: EngineContext, room: Callable[[], None]) -> None:
        self._context = context
        self._room = room
        self._reporter = Reporter(context.events, context.metrics, context.clock)
        self._parking = LaneParking(context, self._reporter, room)
        self._most_running = context.limits.in_flight
        self._longest = (context.lease.length - LEASE_GRACE_MS) / 1000
        self.hold: LeasedTasks = LeasedTasks(
            context.lanes, context.clock, most=context.limits.held, ready=self._pump
        )
        self.running: int = 0
        self._stopping = False
        self._jobs: set[asyncio.Future[Any]] = set()
        self.ends: ResultWriter = ResultWriter(
            context, self.hold, self._reporter, wait=self.wait, room=room
        )
        self._releases: AsyncGroupCommit[Release, None] = AsyncGroupCommit(
            self._release, max_items=GROUP, max_pending=None
        )

    # --- starting ---------------------------------------------------------------------------------

    def take(
        self, tasks: Sequence[Task], contents: Sequence[TaskContent | None] | None = None
    ) -> None:
        """Hold tasks that are leased to this process, and start each when its time comes."""
        if not self._stopping:
            self.hold.take(tasks, contents)
        elif tasks:
            self._spawn(self._hand_back([Release(task) for task in tasks]))

    def _pump(self) -> None:
        """Start what is due, lane by lane in turn, while there is room.

        A task that cannot be started is let go of: it must not stand in others' way.
        """
        while self.running < self._most_running and not self._stopping:
            held = self.hold.next_due()
            if held is None:
                return
            try:
                goes_on = self._start(held)
            except Exception:
                _logger.exception("task %s could not be started, and is tried again", held.task.id)
                self._give_back(held, self._context.clock.now() + _UNREADABLE_AGAIN)
                goes_on = True
            if goes_on:
                self.hold.queue(held.lane)

    def _start(self, held: LeasedTask) -> bool:
        """Start a task, or do what its downstream says; whether to go on with its lane."""
        context, task, lane, content = self._context, held.task, held.lane, held.content
        if content is None:
            try:
                content = held.content = context.unpack(task.content)
            except (TarryError, MsgspecError) as error:  # a key is missing: our own fault
                context.health.failed("encryption", error)
                self._give_back(held, context.clock.now() + _UNREADABLE_AGAIN)
                return True
        chosen = context.policies.known(task, content.overrides)
        if chosen is None:
            held.started = True  # nobody else may take it up meanwhile
            self._spawn(self._look_up_policy(held))
            return True
        timeout = min(chosen.policy.attempt_timeout or _TIMEOUT, self._longest)
        exact = context.clock.exact()
        now = int(exact)
        if now >= chosen.old_at and context.policies.is_first(task):
            self._spawn(self._refresh_policy(task))
        if now < task.next_attempt_at:
            self.hold.wait(held)  # the store's clock was set back since it was due
            return True
        if now + timeout * 1000 >= task.wake_at:
            self._give_back(held, None)  # we were held up: the lease would end before the attempt
            return True
        if task.lost >= _MOST_LOST:
            held.started = True
            self.ends.post(attempts.exhausted(task, None, str(Reason.ATTEMPTS)), held, None)
            return True
        call = attempts.call_of(task, chosen.policy, lane.downstream)
        last = attempts.last_outcome(task) if task.attempts else TRANSIENT
        answer = call.start_or_defer(exact / 1000, last)
        if isinstance(answer, Go):
            held.started = True
            lane.running += 1
            self.running += 1
            self._run(held, content, chosen, call, timeout, now)
            return True
        if isinstance(answer, Defer):
            return self._defer(held, answer)
        held.started = True
        self.ends.post(attempts.exhausted(task, None, str(answer.reason)), held, None)
        return True

    def _defer(self, held: LeasedTask, answer: Defer) -> bool:
        """Put a task off that its downstream does not admit; nothing is charged."""
        lane = held.lane
        if answer.reason is Reason.LIMIT:
            self.hold.put_back(held)
            if answer.delay is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(answer.delay, self._look_again, lane)
            else:
                lane.refused(self._context.clock.now())
            return False  # an attempt that ends makes room
        self._parking.look_at(lane)
        later = None
        if answer.reason is Reason.BUDGET_EMPTY:
            later = lane.put_off(self._context.clock.now())
        self._reporter.deferred(held.task, str(answer.reason))
        self._give_back(held, later)
        return True

    def _look_again(self, lane: LaneState) -> None:
        self._go_on(lane, self._context.clock.now())

    def _go_on(self, lane: LaneState, now: int) -> None:
        if lane.limit is not None:
            lane.ended(now)
        self.hold.queue(lane)
        if self.hold.turn:
            self._pump()

    async def _look_up_policy(self, held: LeasedTask) -> None:
        try:
            await self._context.policies.look_up(held.task)
        except StoreUnavailable as error:
            self._context.health.failed("store", error)
            await asyncio.sleep(FIRST_PAUSE)
        self.wait(held)

    async def _refresh_policy(self, task: Task) -> None:
        try:
            await self._context.policies.look_up(task)
        except StoreUnavailable as error:
            self._context.health.failed("store", error)

    # --- an attempt -------------------------------------------------------------------------------

    def _run(
        self,
        held: LeasedTask,
        content: TaskContent,
        chosen: EffectivePolicy,
        call: DurableCall,
        timeout: float,
        started_at: int,
    ) -> None:
        task, context = held.task, self._context
        sending: Awaitable[DeliveryResult]
        try:
            if content.body_ref is None:
                body = content.body
                request = attempts.request_for(
                    task, content, body, timeout, context.sign(task, body)
                )
                sending = context.delivery.send(request)
            else:
                sending = self._fetch_and_send(task, content, timeout)
            if not isinstance(sending, asyncio.Future):
                sending = asyncio.ensure_future(sending)
        except Exception as error:  # noqa: BLE001 - judged with those that come later
            sending = asyncio.get_running_loop().create_future()
            sending.set_exception(error)
        self._jobs.add(sending)
        sending.add_done_callback(partial(self._came_back, held, chosen, call, started_at))

    async def _fetch_and_send(
        self, task: Task, content: TaskContent, timeout: float
    ) -> DeliveryResult:
        context, loop = self._context, asyncio.get_running_loop()
        end = loop.time() + timeout
        try:
            async with asyncio.timeout_at(end):
                body = await context.read_body(content)
        except TimeoutError:
            return DeliveryResult(fault=Fault.INTERNAL, error="the body could not be read in time")
        more = context.sign(task, body)
        left = max(end - loop.time(), _INSTANT)
        return await context.delivery.send(attempts.request_for(task, content, body, left, more))

    def _came_back(
        self,
        held: LeasedTask,
        chosen: EffectivePolicy,
        call: DurableCall,
        started_at: int,
        sending: asyncio.Future[DeliveryResult],
    ) -> None:
        """Judge an attempt, have it written down, and make room for the next."""
        context, task, lane = self._context, held.task, held.lane
        self._jobs.discard(sending)
        if sending.cancelled():
            call.cancel_attempt(context.clock.seconds())
            return
        error = sending.exception()
        delivered = sending.result() if error is None else _ours(task, error)
        exact, u = context.clock.exact(), context.draw()
        now, at = exact / 1000, int(exact)
        outcome = attempts.outcome_of(delivered, chosen.policy, now)
        lane.running -= 1
        self.running -= 1
        if outcome is None:
            context.health.failed("delivery", delivered.error)
            call.cancel_attempt(now)
            self._go_on(lane, at)
            self._give_back(held, at + _OURS_AGAIN)
            return
        if context.health.failing:
            context.health.worked("delivery")
        attempt = attempts.attempt_of(task, delivered, outcome, started_at, context.lease.worker)
        if outcome is SUCCESS:
            call.record_success(now, u)
            attempt.decision = Decision(action="done", policy_version=chosen.version)
            finish = attempts.succeeded(task, attempt)
        else:
            verdict = call.record_failure(outcome, now, u)
            attempt.decision = attempts.decision_of(verdict, outcome, chosen, call.last_status)
            if isinstance(verdict, Wait):
                lease = None if self._stopping or lane.paused else context.lease
                finish = attempts.waiting(task, attempt, verdict, outcome, at, lease)
            else:
                finish = attempts.exhausted(task, attempt, str(verdict.reason))
        if lane.downstream.transitions:
            self._parking.look_at(lane)
        self.ends.post(finish, held, delivered)
        self._go_on(lane, at)

    # --- writing it down --------------------------------------------------------------------------

    def _give_back(self, held: LeasedTask, next_attempt_at: int | None) -> None:
        self.hold.drop(held)
        self._spawn(self._hand_back([Release(held.task, next_attempt_at)]))
        self._room()

    def wait(self, held: LeasedTask) -> None:
        """Let a task that was in somebody's hand wait for its time, unless its lane was stopped."""
        if held.gone:
            return
        if held.lane.paused:
            self._give_back(held, None)
        else:
            self.hold.wait(held)

    def empty(self, lane: str) -> None:
        """Hand back what waits here for a lane that was stopped."""
        for held in self.hold:
            if held.lane.name == lane and not held.started:
                self._give_back(held, None)

    async def _hand_back(self, releases: list[Release]) -> None:
        await self._releases.submit(releases)

    async def _release(self, releases: Sequence[Release]) -> Sequence[None]:
        await self._parking.settled()  # a task that goes back before its lane is parked returns
        context = self._context
        answers = await retry_until_stored(lambda: context.store.release(releases), context.health)
        for release, answer in zip(releases, answers, strict=True):
            if answer is FinishStatus.CANCELLED:
                context.waiters.tell(release.task.id, TaskCompletion(Status.CANCELLED, None, None))
                self.ends.tell(release.task)
        return [None] * len(releases)

    # --- the end ----------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._done)

    def _done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            _logger.error("a job of the worker failed", exc_info=error)

    def halt(self) -> None:
        """Start nothing more; whatever comes is handed back."""
        self._stopping = True
        self.hold.stop()

    async def stop(self, patience: float) -> None:
        """Start nothing more, hand back what has not begun, and wait for what runs."""
        self.halt()
        try:
            async with asyncio.timeout(patience):
                await self._drain()
        except TimeoutError:  # their leases end by themselves
            late = tuple(self._jobs)
            for job in late:
                job.cancel()
            if late:
                await asyncio.wait(late)
            await self.ends.stop()
            await self._releases.stop()
            await self._parking.stop()

    async def _drain(self) -> None:
        """Wait for what runs, and hand back what has not begun, now or when that has ended."""
        while True:
            unstarted = [held for held in self.hold if not held.started]
            for held in unstarted:
                self.hold.drop(held)
            if unstarted:
                self._spawn(self._hand_back([Release(held.task) for held in unstarted]))
            if self._jobs:
                await asyncio.wait(tuple(self._jobs))
            elif self.ends.waiting:
                await self.ends.flushed()
            else:
                return


def _ours(task: Task, error: BaseException) -> DeliveryResult:
    """Return what an error of our own side comes to: it charges nobody, but for a lost body."""
    if isinstance(error, BodyUnavailable):
        return DeliveryResult(fault=Fault.INVALID, error=str(error))
    if isinstance(error, StoreUnavailable):
        return DeliveryResult(fault=Fault.INTERNAL, error=str(error))
    number = task.attempts + 1
    _logger.error("attempt %d of task %s failed on our side", number, task.id, exc_info=error)
    return DeliveryResult(fault=Fault.INTERNAL, error=f"{type(error).__name__}: {error}")
