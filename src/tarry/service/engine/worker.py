"""The worker: runs due attempts, applies the decision of `tarry.core` and records the result.

    Scheduler, Engine ──add──▶ Worker ──send──▶ Delivery
                               │ ▲  │
                           add │ │  │ post(result), release
                               ▼ │  ▼
      LeasedTasks ──on_due───────┘  ResultWriter ──▶ Store, then Reporter
           ▲                             │
           └─────── requeue, drop ───────┘

An arrow points to the object whose method is called. In addition, the result writer calls the
`ClaimWakeup` of the scheduler when more tasks can be claimed.

An attempt is admitted by its lane, sent, classified by the core, written in a group with other
results, and reported only when it is stored. Callbacks connect these steps: at thousands of
attempts a second, a coroutine for each attempt would be the largest cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from msgspec import MsgspecError

from tarry.core.call import Defer
from tarry.core.outcome import SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.verdict import Attempt as StartAttempt
from tarry.core.verdict import Reason, Wait
from tarry.errors import StoreUnavailable
from tarry.service.defaults import LEASE_GRACE_MS
from tarry.service.delivery import DeliveryResult, Fault, call_when_done, start_function
from tarry.service.delivery.secret_sources import SecretUnavailable
from tarry.service.delivery.vendor_headers import QSTASH, cloud_tasks_headers, qstash_headers
from tarry.service.encryption import DecryptionFailed
from tarry.service.engine import attempts
from tarry.service.engine.attempt_slots import AttemptSlots
from tarry.service.engine.attempts import RunningAttempt
from tarry.service.engine.context import BODY_STORE, FIRST_STORE_RETRY_PAUSE_S, STORE
from tarry.service.engine.lanes import MAX_FAST_ATTEMPT_MS
from tarry.service.engine.leased_tasks import LeasedTasks
from tarry.service.engine.result_writer import ResultWriter
from tarry.service.model import Status
from tarry.service.payloads import BodyStoreUnavailable, BodyUnavailable
from tarry.service.shutdown import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Mapping, Sequence
    from typing import Any

    from tarry.core.policy import Policy
    from tarry.service.delivery import DeliveryCallback, PendingDelivery
    from tarry.service.engine.claim_wakeup import ClaimWakeup
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.endpoint_caps import EndpointCap
    from tarry.service.engine.lanes import LeasedTask, LocalLane
    from tarry.service.engine.policies import PolicyKey
    from tarry.service.engine.secrets import ResolvedSecrets
    from tarry.service.model import AttemptRecord, Task, TaskContent
    from tarry.service.store import TaskResult
    from tarry.wire.tasks import WaitReason

_logger = logging.getLogger("tarry.service")
_DEFAULT_ATTEMPT_TIMEOUT_S = 30.0
_INTERNAL_FAILURE_PAUSE_MS = 1_000  # after an attempt that failed in the service or its proxy
_UNSTARTABLE_TASK_PAUSE_MS = 60_000  # after a failure to decrypt or to start a task
_ENCRYPTION_RECOVERY_S = 150.0
"""Encryption is healthy again after this time without a task that cannot be decrypted. Such a task
is retried every 60 s."""
_MAX_LOST_ATTEMPTS = 10  # then a task is EXHAUSTED: it probably crashes its workers
_MAX_READ_ATTEMPTS = 100
"""Earlier attempts that are read for the headers of Cloud Tasks."""
_MAX_READ_WAIT_S = 1.0
"""How long an attempt waits for these, at most half of its timeout. A store that hangs must not
use up the timeout: the attempt would fail, although its target works."""
_MAX_TASK_ATTEMPTS = 10_000_000
"""Attempts of a task, including those before its replays; then the task is EXHAUSTED. Lost attempts
are also numbered, and the numbers must stay below `MAX_ATTEMPT_NUMBER`."""
_MIN_SEND_TIMEOUT_S = 0.001
_MAX_SECRET_WAIT_S = 2.0
"""Tasks that wait longer for their secrets are released, so that their leases do not expire."""
_SLOW_SECRET_PAUSE_S = 1.0
_MIN_SECRET_PAUSE_S = 0.1
_SECRET = "secret"  # noqa: S105 - the reason of a deferral
_REJECTED_SECRET_STATUSES = frozenset({401, "UNAUTHENTICATED"})
_MIN_RATE_TIMER_S = 0.001  # at a high rate, a timer starts several attempts
_MAX_CONSECUTIVE_STARTS = 16
"""Attempts that are started before the event loop handles other events. A start takes 60 us, and
another 0.3 ms if it needs a new connection: 64 of these would stall API requests for 25 ms."""
_STARTS_PER_TIME_CHECK = 8
"""After this number of starts (0.5 ms), tasks that have become due meanwhile join the rotation."""
_THROTTLED = Outcome(Kind.THROTTLED)
# To read a member of an enum takes 0.27 us in Python 3.11, a constant 0.01 us.
_SUCCEEDED, _BLOCKED, _TIMEOUT = Status.SUCCEEDED, Fault.BLOCKED, Fault.TIMEOUT
_KIND_THROTTLED = Kind.THROTTLED


class Worker:
    """Runs attempts of leased tasks, up to the in-flight limit of the process."""

    def __init__(self, context: EngineContext, claim_wakeup: ClaimWakeup) -> None:
        self._context = context
        self._slots = AttemptSlots(context.limits.max_running_attempts)
        self._slow_attempt_timer: asyncio.TimerHandle | None = None
        self._encryption_timer: asyncio.TimerHandle | None = None
        self._max_attempt_duration_s = (context.lease_terms.length_ms - LEASE_GRACE_MS) / 1000
        self.leased_tasks: LeasedTasks = LeasedTasks(
            context.lanes,
            self._slots,
            context.clock.now_ms,
            max_leased=context.limits.max_leased,
            lease_ms=context.lease_terms.length_ms,
            on_due=self._start_due_tasks,
        )
        self.result_writer: ResultWriter = ResultWriter(context, self.leased_tasks, claim_wakeup)
        self._is_stopping = False
        self._is_start_scheduled = False
        self._start_delivery = start_function(context.delivery_client)
        self._deliveries: dict[LeasedTask, PendingDelivery] = {}  # attempts in flight
        self._has_no_deliveries = asyncio.Event()  # only set while the worker stops
        self._jobs: set[asyncio.Task[None]] = set()  # loads of policies, signers and secrets
        self._waiting_for_load: dict[PolicyKey, list[LeasedTask]] = {}
        """Tasks that wait for their policy and signers, for each load that is in progress."""
        self._waiting_for_secrets: dict[tuple[str, ...], list[LeasedTask]] = {}
        """Tasks that wait for secrets, by the tenant and the names of the secrets."""
        self._waiting_for_cap: dict[EndpointCap, deque[LocalLane]] = {}
        """Lanes that wait until the cap that they share admits an attempt, longest wait first."""
        self._cap_timers: dict[EndpointCap, asyncio.TimerHandle] = {}

    @property
    def running_count(self) -> int:
        """The number of attempts in flight."""
        return self._slots.running_count

    def add(self, tasks: Sequence[Task], contents: Mapping[str, TaskContent] = {}) -> None:
        """Start each of these tasks, which were leased to this process, when it is due.

        `contents` are the unpacked contents that are known, by the ids of tasks.
        """
        if self._is_stopping:
            self.result_writer.release_unadded(tasks)
        else:
            self.leased_tasks.add(tasks, contents)

    def delay_starts(self) -> None:
        """Start no task before the second next iteration of the event loop."""
        if not self._is_start_scheduled:
            self._is_start_scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._continue_starting)

    def adopt_renewed(self, tasks: Sequence[Task]) -> None:
        """Adopt the new ends of leases that the store has renewed; release unknown leases.

        A lease is unknown if the store's reply with the lease was lost, or if the result of its
        task could not be written.
        """
        for task in tasks:
            leased_task = self.leased_tasks.get(task.id)
            if leased_task is not None and leased_task.task.version == task.version:
                leased_task.task.wake_at = task.wake_at
            else:  # has no effect if a release or result of the task is already being written
                self.result_writer.release_unadded([task])

    def _start_due_tasks(self, lane: LocalLane | None = None) -> None:
        """Start due tasks, while `AttemptSlots` admits their lanes.

        `lane` is a lane that may start a task now, and is not in the rotation.
        """
        started_count, slots, leased_tasks = 0, self._slots, self.leased_tasks
        while slots.free_count and not (self._is_start_scheduled or self._is_stopping):
            if started_count == _MAX_CONSECUTIVE_STARTS:
                # A claim returns many due tasks. If all started now, API requests would wait.
                self._is_start_scheduled = True
                asyncio.get_running_loop().call_soon(self._continue_starting)
                break
            if started_count % _STARTS_PER_TIME_CHECK == 0 and started_count:
                leased_tasks.queue_due_tasks(self._context.clock.now_ms())
            leased_task = leased_tasks.pop_next_due(lane)
            if leased_task is None:
                return
            started_count += 1
            lane = leased_task.lane
            try:
                if not self._start(leased_task):
                    lane = None
            except Exception:  # the task is released, so that it does not block other tasks
                task_id = leased_task.task.id
                _logger.exception("task could not be started, will retry, task=%s", task_id)
                self._release_unstartable(leased_task)
        if lane is not None:
            leased_tasks.add_to_rotation(lane)

    def _continue_starting(self) -> None:
        self._is_start_scheduled = False
        self._start_due_tasks()

    def _start(self, leased_task: LeasedTask) -> bool:
        """Start, defer or finish a task; return whether its lane may start other tasks."""
        context, task, lane = self._context, leased_task.task, leased_task.lane
        content = leased_task.content or self._unpack(leased_task)
        if content is None:
            return True
        effective_policy = context.policies.get_cached(task, content.overrides)
        # The clock is read once: `now` is in whole milliseconds, the core needs unrounded seconds.
        unrounded_ms = context.clock.unrounded_ms()
        now = int(unrounded_ms)
        signers = context.signers.get_cached(task.tenant, now)
        if effective_policy is None or signers is None:
            leased_task.is_busy = True  # so that `cancel` and `retry_now` leave the task alone
            self._begin_load(task).append(leased_task)
            return True
        policy = effective_policy.policy
        timeout_s = policy.attempt_timeout or _DEFAULT_ATTEMPT_TIMEOUT_S
        timeout_s = min(timeout_s, self._max_attempt_duration_s)
        if now >= effective_policy.stale_at:
            self._begin_load(task)
        # Another attempt has just failed for a local reason, or the lease could expire during the
        # attempt.
        if (
            now < max(lane.waits_until, lane.blocked_until)
            or now + timeout_s * 1000 >= task.wake_at
        ):
            self.result_writer.release(leased_task)
            return True
        if now < task.next_attempt_at:  # the store's clock was set back after the task was due
            self.leased_tasks.requeue(leased_task)
            return True
        # `attempts` includes lost attempts, so a new task needs neither check.
        if task.attempts and (
            task.lost_attempts >= _MAX_LOST_ATTEMPTS or task.attempts >= _MAX_TASK_ATTEMPTS
        ):
            self._exhaust(leased_task, str(Reason.ATTEMPTS))
            return True
        secrets: ResolvedSecrets | None = None
        if content.secret_headers is not None:
            secrets = self._resolve_secrets(leased_task, content.secret_headers, policy, now)
            if secrets is None:
                return True
        context.secrets.fetch_unknown(task.lane)
        call = attempts.build_call(task, policy, lane.downstream)
        is_retry = call.attempts > 0
        suspect = lane.should_limiter_ignore(now, is_retry)
        # The retry budget distinguishes throttling from any other failure.
        is_throttled = is_retry and task.last_outcome_kind == _KIND_THROTTLED
        last_outcome = _THROTTLED if is_throttled else TRANSIENT
        command = call.start_or_defer(unrounded_ms / 1000, last_outcome, suspect=suspect)
        if isinstance(command, StartAttempt):
            leased_task.is_busy = True
            context.store.record_start(self.leased_tasks.assign_start_slot(leased_task), task)
            slot = self._slots.acquire(lane, now)
            if self._slow_attempt_timer is None and not slot.is_slow:
                self._set_slow_attempt_timer()
            self._send(
                RunningAttempt(
                    leased_task,
                    content,
                    effective_policy,
                    signers,
                    secrets,
                    call,
                    slot,
                    timeout_s,
                    now,
                )
            )
            return True
        if isinstance(command, Defer):
            return self._defer(leased_task, command)
        self._exhaust(leased_task, str(command.reason))
        return True

    def _unpack(self, leased_task: LeasedTask) -> TaskContent | None:
        """Return the unpacked content of a task, or None if the task was released or finished."""
        task = leased_task.task
        try:
            leased_task.content = self._context.unpack(task.packed_content)
        except DecryptionFailed as error:
            self._report_missing_key(error)
            self._release_unstartable(leased_task)
        except MsgspecError:  # it can never be decoded
            _logger.exception("task content is damaged, task=%s", task.id)
            self._exhaust(leased_task, str(Reason.PERMANENT))
        return leased_task.content

    def _resolve_secrets(
        self, leased_task: LeasedTask, secret_headers: dict[str, str], policy: Policy, now: int
    ) -> ResolvedSecrets | None:
        """Return the secrets for an attempt; None: the task waits for them, or is finished."""
        task, pause_s = leased_task.task, None
        try:
            resolved = self._context.secrets.get_cached(task.tenant, task.lane, secret_headers)
            if resolved is not None:
                return resolved
        except SecretUnavailable as error:
            pause_s = error.pause_s
        total_budget = policy.total_budget
        if total_budget is not None and now >= task.first_due_at + total_budget * 1000:
            self._exhaust(leased_task, str(Reason.TOTAL_BUDGET))
        elif pause_s is not None:
            self._release_without_secret(leased_task, pause_s)
        else:
            leased_task.is_busy = True
            key = (task.tenant, *secret_headers.values())
            if key not in self._waiting_for_secrets:
                self._waiting_for_secrets[key] = []
                self._spawn(self._load_secrets(key))
            self._waiting_for_secrets[key].append(leased_task)
        return None

    async def _load_secrets(self, key: tuple[str, ...]) -> None:
        """Load secrets, then requeue the tasks that wait for them, or release these tasks."""
        tenant, *names = key
        pause_s: float | None = None
        try:
            async with asyncio.timeout(_MAX_SECRET_WAIT_S):
                await self._context.secrets.load(tenant, names)
        except TimeoutError:  # the load continues; meanwhile, the leases must not expire
            pause_s = _SLOW_SECRET_PAUSE_S
        except SecretUnavailable as error:
            pause_s = error.pause_s
        finally:
            waiting_tasks = self._waiting_for_secrets.pop(key)
        for leased_task in waiting_tasks:
            if pause_s is None:
                self.result_writer.requeue_or_release(leased_task)
            elif not leased_task.is_dropped:
                self._release_without_secret(leased_task, pause_s)

    def _release_without_secret(self, leased_task: LeasedTask, pause_s: float) -> None:
        """Release a task whose secret is not available; neither task nor lane are charged."""
        self._context.reporter.report_deferred(leased_task.task, _SECRET)
        pause_ms = ceil(max(pause_s, _MIN_SECRET_PAUSE_S) * 1000)
        self._release_deferred(leased_task, pause_ms, "secret")

    def _release_deferred(self, leased_task: LeasedTask, pause_ms: int, reason: WaitReason) -> None:
        now, task = self._context.clock.now_ms(), leased_task.task
        leased_task.lane.record_deferral(reason, task.next_attempt_at, now + pause_ms, now)
        self.result_writer.release(leased_task, now + pause_ms)

    def _report_missing_key(self, error: DecryptionFailed) -> None:
        """Mark the encryption as failing, until `_ENCRYPTION_RECOVERY_S` without such an error."""
        health = self._context.health
        health.mark_failing("encryption", error)
        if self._encryption_timer is not None:
            self._encryption_timer.cancel()
        self._encryption_timer = asyncio.get_running_loop().call_later(
            _ENCRYPTION_RECOVERY_S, health.mark_healthy, "encryption"
        )

    def _release_unstartable(self, leased_task: LeasedTask) -> None:
        """Release a task that cannot be started; it is due again after a minute."""
        self._release_deferred(leased_task, _UNSTARTABLE_TASK_PAUSE_MS, "local-failure")

    def _exhaust(self, leased_task: LeasedTask, reason: str) -> None:
        leased_task.is_busy = True
        result = attempts.final_result(leased_task.task, None, Status.EXHAUSTED, reason)
        self.result_writer.post(result, leased_task, None)

    def _defer(self, leased_task: LeasedTask, command: Defer) -> bool:
        """Postpone a task that the downstream rejects; return whether its lane may start others."""
        lane = leased_task.lane
        lane.was_held_back = True
        if command.reason is Reason.LIMIT:
            self.leased_tasks.return_to_front(leased_task)
            cap = lane.downstream.cap
            if command.delay is not None and self._context.lanes.hand_over(
                lane, self._context.clock.now_ms()
            ):
                self.release_lane(lane.name)
            elif command.delay is not None:
                delay = max(command.delay, _MIN_RATE_TIMER_S)
                loop = asyncio.get_running_loop()
                lane.rate_timer = loop.call_later(delay, self.end_rate_delay, lane)
            elif cap is not None and not lane.downstream.limiter.is_full:
                lane.waits_for_cap = True
                self._waiting_for_cap.setdefault(cap, deque()).append(lane)
                self._set_cap_timer(cap)
            # `_continue_lane` adds the lane again: after the delay, or when an attempt ends.
            return False
        self.result_writer.store_breaker_state(lane)
        self._context.reporter.report_deferred(leased_task.task, str(command.reason))
        if command.reason is Reason.BUDGET_EMPTY:
            now = self._context.clock.now_ms()
            self._release_deferred(leased_task, lane.reserve_retry_time(now) - now, "retry-budget")
        else:
            self.result_writer.release(leased_task)
        return True

    def end_rate_delay(self, lane: LocalLane) -> None:
        """Start tasks of a lane after the delay of its limiter, or after a reset of the limiter."""
        if lane.rate_timer is not None:
            lane.rate_timer.cancel()
            lane.rate_timer = None
        self._continue_lane(lane, self._context.clock.now_ms())

    def _continue_lane(self, lane: LocalLane, now: int) -> None:
        """Start more tasks of a lane, after an attempt or the delay of its limiter has ended."""
        leased_tasks = self.leased_tasks
        leased_tasks.on_slot_released(lane.tenant, now)
        if (cap := lane.downstream.cap) is not None:
            self._continue_waiting_for_cap(cap)
        if self._is_start_scheduled:
            leased_tasks.add_to_rotation(lane)
        elif lane.due_first_attempts or lane.due_retries or leased_tasks.has_startable_lanes:
            self._start_due_tasks(lane)

    def _continue_waiting_for_cap(self, cap: EndpointCap) -> None:
        """Start tasks of lanes that wait for a cap, while it admits attempts."""
        waiting = self._waiting_for_cap.get(cap)
        if waiting is None:
            return
        while waiting and cap.admits(self._context.clock.unrounded_ms() / 1000):
            lane = waiting.popleft()
            lane.waits_for_cap = False
            self.leased_tasks.add_to_rotation(lane)
            if self._is_start_scheduled:
                # Nothing starts now, so the cap would admit all lanes, and later reject all but a
                # few: with 200 lanes and a concurrency of 1, 99 of 100 times. The timer of the cap
                # adds the next lane.
                break
            self._start_due_tasks()
        if waiting:
            self._set_cap_timer(cap)
        else:
            del self._waiting_for_cap[cap]

    def _set_cap_timer(self, cap: EndpointCap) -> None:
        if cap.is_full or cap in self._cap_timers:  # or: continued when an attempt ends
            return
        delay = cap.delay(self._context.clock.unrounded_ms() / 1000)
        self._cap_timers[cap] = asyncio.get_running_loop().call_later(
            max(delay, _MIN_RATE_TIMER_S), self._on_cap_timer, cap
        )

    def _on_cap_timer(self, cap: EndpointCap) -> None:
        del self._cap_timers[cap]
        self._continue_waiting_for_cap(cap)

    def _begin_load(self, task: Task) -> list[LeasedTask]:
        """Load the policy and signers of a task, if no load of them is in progress.

        Returns the list of tasks that are started when the load has ended.
        """
        key = (task.tenant, task.policy_id, task.policy_version)
        if key not in self._waiting_for_load:
            self._waiting_for_load[key] = []
            self._spawn(self._load_policy_and_signers(task, key))
        return self._waiting_for_load[key]

    async def _load_policy_and_signers(self, task: Task, key: PolicyKey) -> None:
        """Load the policy and signers of a task, then requeue the tasks that wait for them."""
        context, can_start = self._context, True
        try:
            try:
                await context.policies.load_for_task(task)
            except StoreUnavailable:  # also call `load`: if it fails, cached signers stay usable
                await context.signers.load(task.tenant)
                raise
            await context.signers.load(task.tenant)
        except DecryptionFailed as error:
            self._report_missing_key(error)
            can_start = False  # the tasks must not be sent without a signature
        except StoreUnavailable as error:
            context.health.mark_failing(STORE, error)
            await asyncio.sleep(FIRST_STORE_RETRY_PAUSE_S)
        except Exception:  # for example, a newer version of the service has stored the policy
            message = "policy or secrets could not be loaded, will retry, tenant=%s policy=%s"
            _logger.exception(message, task.tenant, task.policy_id)
            can_start = False
            await asyncio.sleep(_INTERNAL_FAILURE_PAUSE_MS / 1000)  # limits the number of logs
        finally:
            waiting_tasks = self._waiting_for_load.pop(key)
        for leased_task in waiting_tasks:
            if can_start:
                self.result_writer.requeue_or_release(leased_task)
            elif not leased_task.is_dropped:
                self._release_unstartable(leased_task)

    def _set_slow_attempt_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._slow_attempt_timer = loop.call_later(
            MAX_FAST_ATTEMPT_MS / 1000, self._mark_slow_lanes
        )

    def _mark_slow_lanes(self) -> None:
        """Mark lanes with an attempt that has not ended within a second as slow."""
        self._slow_attempt_timer = None
        for lane in self._slots.mark_slow_lanes(self._context.clock.now_ms()):
            self.leased_tasks.add_to_rotation(lane)
        if self._slots.has_fast_slots and not self._is_stopping:
            self._set_slow_attempt_timer()

    def _send(self, attempt: RunningAttempt) -> None:
        leased_task, content, context = attempt.leased_task, attempt.content, self._context
        lane = leased_task.lane
        if lane.was_held_back:
            lane.was_held_back, lane.startable_since = False, attempt.started_at
        leased_task.startable_since = lane.startable_since
        if lane.downstream.transitions:  # half-open: the attempt is a probe
            self.result_writer.store_breaker_state(lane)
        tracer = context.tracer
        on_done: DeliveryCallback = partial(self._on_attempt_done, attempt)
        delivery: PendingDelivery
        try:
            if tracer is not None:
                span, content = tracer.start_span(leased_task.task, content)
                attempt.content = content
                if span is not None:
                    policy = attempt.effective_policy.policy
                    on_done = partial(tracer.report_and_end_span, span, policy, on_done)
            if content.body_ref is None and attempt.secrets is None and content.vendor is None:
                body, signers = content.body, attempt.signers
                signatures = signers.sign(leased_task.task, body) if signers.by_lane else []
                request = attempts.build_request(attempt, body, attempt.timeout_s, signatures)
                delivery = self._start_delivery(request, on_done)
            else:
                delivery = call_when_done(self._load_and_send(attempt), on_done)
        except Exception as error:  # noqa: BLE001 - handled by `_on_attempt_done`
            failed: asyncio.Future[DeliveryResult] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            delivery = call_when_done(failed, on_done)
        self._deliveries[leased_task] = delivery

    async def _load_and_send(self, attempt: RunningAttempt) -> DeliveryResult:
        """Send a task that has a stored body or secrets, or was created through a vendor's API.

        If the target rejects a secret (401), and a newer value can be obtained, the request is sent
        again with this value. This is the same attempt: the target has not processed the request.
        """
        context, loop = self._context, asyncio.get_running_loop()
        task, content, secrets = attempt.leased_task.task, attempt.content, attempt.secrets
        deadline = loop.time() + attempt.timeout_s
        body = content.body
        if content.body_ref is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    body = await context.read_body(content)
            except TimeoutError:
                msg = "a body could not be read within the timeout of the attempt"
                raise BodyStoreUnavailable(msg) from None
        signatures = attempt.signers.sign(task, body)
        vendor_headers = await self._build_vendor_headers(attempt, body, deadline)

        def send(secret_headers: dict[str, str] | None) -> Awaitable[DeliveryResult]:
            remaining_s = max(deadline - loop.time(), _MIN_SEND_TIMEOUT_S)
            request = attempts.build_request(
                attempt, body, remaining_s, signatures, secret_headers, vendor_headers
            )
            return context.delivery_client.send(request)

        if secrets is None or content.secret_headers is None:
            return await send(None)
        result = await send(secrets.headers)
        result.sent_secrets = secrets.texts
        if result.status not in _REJECTED_SECRET_STATUSES:
            return result
        try:
            async with asyncio.timeout_at(deadline):
                renewed = await context.secrets.renew(
                    task.tenant, task.lane, content.secret_headers, secrets
                )
        except TimeoutError:
            msg = "a secret could not be renewed within the timeout of the attempt"
            raise SecretUnavailable(msg) from None
        if renewed is None:
            return result
        result = await send(renewed.headers)
        result.sent_secrets = secrets.texts + renewed.texts
        return result

    async def _build_vendor_headers(
        self, attempt: RunningAttempt, body: bytes, deadline: float
    ) -> dict[str, str] | None:
        task, content = attempt.leased_task.task, attempt.content
        if content.vendor is None or not content.url.startswith("http"):
            return None
        if content.vendor == QSTASH:
            timestamp, token_key = int(self._context.unix_time()), attempt.signers.token_key(task)
            return qstash_headers(task, content, body, timestamp, token_key)
        previous: Sequence[AttemptRecord] = ()
        if task.attempts:
            remaining_s = deadline - asyncio.get_running_loop().time()
            # Fewer headers are better than no attempt.
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(min(_MAX_READ_WAIT_S, remaining_s / 2)):
                    previous = await self._context.store.list_attempts(
                        task.tenant, task.id, after=max(0, task.attempts - _MAX_READ_ATTEMPTS)
                    )
        return cloud_tasks_headers(task, previous)

    def _on_attempt_done(
        self, attempt: RunningAttempt, delivery_result: DeliveryResult | BaseException
    ) -> None:
        context, leased_task, call = self._context, attempt.leased_task, attempt.call
        task, lane = leased_task.task, leased_task.lane
        del self._deliveries[leased_task]
        if self._is_stopping and not self._deliveries:
            self._has_no_deliveries.set()
        error: BaseException | None = None
        if isinstance(delivery_result, BaseException):
            if isinstance(delivery_result, asyncio.CancelledError):
                call.cancel_attempt(context.clock.now_s())
                return
            error, delivery_result = delivery_result, _failed_delivery(task, delivery_result)
        unrounded_ms = context.clock.unrounded_ms()
        now = int(unrounded_ms)
        context.secrets.add_texts_of_lane(task.lane, delivery_result)
        if delivery_result.fault is _BLOCKED:
            delivery_result.pause_s = context.blocked_pause_s
        policy = attempt.effective_policy.policy
        outcome = attempts.classify(delivery_result, policy, context.unix_time)
        self._slots.release(attempt.slot)
        if outcome is None:
            call.cancel_attempt(unrounded_ms / 1000)
            if isinstance(error, SecretUnavailable):
                self._release_without_secret(leased_task, error.pause_s)
            else:
                component = BODY_STORE if isinstance(error, BodyStoreUnavailable) else "delivery"
                self._release_uncounted(leased_task, delivery_result, component)
            self._continue_lane(lane, now)
            return
        if lane.wait_reason is not None:
            self.result_writer.end_wait(lane)
        lane.record_result(
            now - attempt.started_at,
            delivery_result.fault is _TIMEOUT,
            None if call.attempts > 1 else outcome is not SUCCESS,
            outcome is SUCCESS if call.attempts > 1 else None,
        )
        if context.health.failing:
            context.health.mark_healthy("delivery")
        result = self._build_result(attempt, delivery_result, outcome, unrounded_ms)
        if lane.downstream.transitions:
            lane.was_held_back = True  # the breaker was not closed before, or is not closed now
            self.result_writer.store_breaker_state(lane, result.attempt)
        self.result_writer.post(result, leased_task, delivery_result)
        self._continue_lane(lane, now)

    def _build_result(
        self,
        attempt: RunningAttempt,
        delivery_result: DeliveryResult,
        outcome: Outcome,
        unrounded_ms: float,
    ) -> TaskResult:
        """Return what is written after an attempt: its log entry, and the decision of the core."""
        context, leased_task, call = self._context, attempt.leased_task, attempt.call
        task, worker = leased_task.task, context.lease_terms.worker
        now_s, random_number = unrounded_ms / 1000, context.draw()
        if outcome is SUCCESS:
            call.record_success(now_s, random_number)
            decision = attempts.success_decision(attempt.effective_policy.version)
            record = attempts.build_record(attempt, delivery_result, outcome, decision, worker)
            return attempts.final_result(task, record, _SUCCEEDED)
        verdict = call.record_failure(outcome, now_s, random_number)
        decision = attempts.build_decision(attempt, verdict, outcome)
        record = attempts.build_record(attempt, delivery_result, outcome, decision, worker)
        attempts.add_error_and_excerpt(record, delivery_result, leased_task.content)
        if isinstance(verdict, Wait):
            lease_terms = context.lease_terms if self._can_keep_lease(leased_task.lane) else None
            now = int(unrounded_ms)
            return attempts.retry_result(task, record, verdict, outcome, now, lease_terms)
        return attempts.final_result(task, record, Status.EXHAUSTED, str(verdict.reason))

    def _release_uncounted(
        self, leased_task: LeasedTask, delivery_result: DeliveryResult, component: str
    ) -> None:
        """Release a task whose attempt failed for a local reason; the attempt is not counted.

        The lane is parked, or blocked in this process, for `delivery_result.pause_s`. If that is
        None, the `component` of the service is marked as failing instead.
        """
        context, pause_s, error = self._context, delivery_result.pause_s, delivery_result.error
        lane = leased_task.lane
        if pause_s is None:
            context.health.mark_failing(component, error)
            self._release_deferred(leased_task, _INTERNAL_FAILURE_PAUSE_MS, "local-failure")
        else:  # other lanes are not affected: the service is healthy
            if delivery_result.fault is Fault.INTERNAL and lane.wait_reason is None:
                _logger.error("lane parked for a local reason, lane=%s: %s", lane.name, error)
            context.reporter.report_deferred(leased_task.task, str(delivery_result.fault))
            if delivery_result.fault is _BLOCKED:
                self._block(lane, pause_s, error or "")
            else:
                self.result_writer.park_waiting_lane(lane, pause_s, error or "")
            self.result_writer.release(leased_task)

    def _block(self, lane: LocalLane, pause_s: float, reason: str) -> None:
        """Leave the tasks of a lane to processes that allow its target, for `pause_s`.

        If too many lanes are blocked already, the lane is parked for all processes.
        """
        lanes = self._context.lanes
        was_blocked = lanes.is_target_blocked(lane.name)
        if not lanes.block(lane, self._context.clock.now_ms() + ceil(pause_s * 1000)):
            self.result_writer.park_waiting_lane(lane, pause_s, reason)
            return
        if not was_blocked:
            _logger.warning("lane waits, its target is not allowed, lane=%s: %s", lane.name, reason)
        lane.wait_reason = reason
        self.release_lane(lane.name)

    def _can_keep_lease(self, lane: LocalLane) -> bool:
        """Return whether a task that has failed may keep its lease until its retry."""
        # If other tasks of the lane may be waiting in the store, the task is released, and the next
        # claim selects the tasks to lease. Otherwise, a few tasks that always fail could keep all
        # leases of the lane. In the same way, tasks of tenants whose targets hang could keep all
        # leases of the process, while a tenant without a lease waits.
        lanes, free_leases = self._context.lanes, self.leased_tasks.free_leases
        is_limited = (
            lane.is_tripped
            or lanes.lease_capacity(lane) <= 0
            or lanes.is_at_lease_limit(lane.tenant, free_leases)
        )
        return not (self._is_stopping or lane.is_paused or is_limited)

    def release_expiring(self) -> None:
        """Release due tasks that have waited for a slot for half of their lease.

        If the lease of a waiting task expired, the store would count an attempt as lost. Tasks are
        also released if more tasks of their lane are leased than its rate allows now.
        """
        lanes = self._context.lanes
        now, half_lease_ms = self._context.clock.now_ms(), self._context.lease_terms.length_ms // 2
        for leased_task in tuple(self.leased_tasks.values()):
            is_expiring = leased_task.task.wake_at - now < half_lease_ms
            if not leased_task.is_busy and (
                is_expiring or lanes.lease_capacity(leased_task.lane) < 0
            ):
                self.result_writer.release(leased_task)

    def release_lane(self, lane_name: str) -> None:
        """Release the waiting tasks of a paused or blocked lane; attempts in flight continue."""
        self._context.lanes[lane_name].was_held_back = True
        for leased_task in tuple(self.leased_tasks.values()):
            if leased_task.lane.name == lane_name and not leased_task.is_busy:
                self.result_writer.release(leased_task)

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._on_job_done)

    def _on_job_done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            _logger.error("background job of the worker failed", exc_info=error)

    def stop_starting_attempts(self) -> None:
        """Start no more attempts; tasks that are leased from now on are released."""
        self._is_stopping = True
        self.leased_tasks.stop_timer()
        self.result_writer.stop_lingering()
        for timer in (self._slow_attempt_timer, self._encryption_timer):
            if timer is not None:
                timer.cancel()

    async def stop(self, timeout_s: float) -> None:
        """Start no more attempts, release waiting tasks, and wait for attempts in flight."""
        self.stop_starting_attempts()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain()
        except TimeoutError:  # attempts are cancelled; their leases expire by themselves
            deliveries = tuple(self._deliveries.values())
            if deliveries:
                _logger.warning(
                    "attempts cancelled at stop, tasks wait until their leases expire, count=%d",
                    len(deliveries),
                )
            for delivery in deliveries:
                delivery.cancel()
            # Futures call back later. Other deliveries have called back within `cancel`.
            cancelled: list[asyncio.Future[Any]] = [
                each for each in deliveries if isinstance(each, asyncio.Future)
            ]
            await cancel_and_wait([*self._jobs, *cancelled])
            await self.result_writer.stop()
        else:
            if self.result_writer.has_pending_writes:
                await self.result_writer.stop()

    async def _drain(self) -> None:
        """Release waiting tasks, also those whose attempt ends meanwhile, until none is left.

        Writes to a partition that fails may be left.
        """
        while True:
            for leased_task in tuple(self.leased_tasks.values()):
                if not leased_task.is_busy:
                    self.result_writer.release(leased_task)
            if self._jobs:
                await asyncio.wait(tuple(self._jobs))
            elif self._deliveries:
                self._has_no_deliveries.clear()
                await self._has_no_deliveries.wait()
            elif self.result_writer.has_pending_writes:
                if not await self.result_writer.flush():
                    return
            else:
                return


def _failed_delivery(task: Task, error: BaseException) -> DeliveryResult:
    """Return the result of a delivery that raised an error instead of returning a result."""
    if isinstance(error, BodyUnavailable):
        # The request can never be sent, so this counts as a permanent failure. After any other
        # error, the task is released and no attempt is counted.
        return DeliveryResult(fault=Fault.INVALID, error=str(error))
    if isinstance(error, (BodyStoreUnavailable, SecretUnavailable)):
        return DeliveryResult(fault=Fault.INTERNAL, error=str(error))
    message = "attempt failed inside the service, task=%s attempt=%d"
    _logger.error(message, task.id, task.attempts + 1, exc_info=error)
    return DeliveryResult(fault=Fault.INTERNAL, error=f"{type(error).__name__}: {error}")
