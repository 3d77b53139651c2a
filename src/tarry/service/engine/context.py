"""Shared by the components of an engine: limits, health, clock, dependencies, store retries."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service import defaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.delivery import DeliveryClient
    from tarry.service.engine.claim_turns import ClaimTurns
    from tarry.service.engine.lanes import Lanes
    from tarry.service.engine.limits import LimitTable
    from tarry.service.engine.policies import PolicyCache
    from tarry.service.engine.reporting import Reporter
    from tarry.service.engine.secrets import SecretResolver
    from tarry.service.engine.signers import SignerCache
    from tarry.service.engine.tracing import AttemptTracer
    from tarry.service.model import AttemptRecord, Task, TaskContent, WorkerRecord
    from tarry.service.store import LeaseTerms, Retention, Store, TaskResult
    from tarry.service.task_search import TaskFinder

T = TypeVar("T")

_logger = logging.getLogger("tarry.service")
FIRST_STORE_RETRY_PAUSE_S = 0.05
_MAX_STORE_RETRY_PAUSE_S = 2.0
_CHECK_TIMEOUT_S = 5.0
BODY_STORE = "bodies"
"""The component of `Health` for the storage of large bodies."""
_UNKNOWN_OFFSET_MS = -1e15  # far in the past: no task is due before `StoreClock.synchronize`


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much work one engine accepts at a time."""

    max_running_attempts: int = defaults.MAX_IN_FLIGHT  # of this process at a time
    max_lane_running_attempts: int = defaults.MAX_LANE_IN_FLIGHT  # of one lane at a time
    max_leased: int = 4096  # tasks that are leased to this process
    max_lane_leased: int = 1024  # tasks of one lane that are leased to this process
    max_unwritten: int = 10_000  # new tasks that wait to be written
    max_claimed: int = defaults.MAX_TRANSACTION_TASKS
    """Tasks that one call of `Store.claim` leases; more if several processes claim, see
    `ClaimTurns.claim_factor`."""
    max_lane_claimed: int = defaults.MAX_LANE_CLAIMED  # of one lane, by one call of `Store.claim`
    max_tenant_unfinished_tasks: int | None = defaults.MAX_TENANT_UNFINISHED_TASKS
    """PENDING or IN_FLIGHT tasks of one tenant (setting `tenant_pending`); None: no limit."""
    max_tenant_lanes: int | None = defaults.MAX_TENANT_LANES
    """Lanes of one tenant (setting `tenant_lanes`); None: no limit."""
    tenant_tasks_per_s: float | None = None
    """Tasks that a tenant may add, retry and replay per second on average (setting `tenant_rate`);
    None: no limit."""
    tenant_burst: float = 1_000.0
    """Tasks that a tenant may add at once in spite of `tenant_tasks_per_s`."""


class Health:
    """The failing components of this process. Each failure and each recovery is logged once."""

    def __init__(self) -> None:
        self.failing: dict[str, str] = {}  # the last error by component

    def mark_failing(self, component: str, error: object) -> None:
        """Mark a component as failing."""
        if component not in self.failing:
            _logger.error("%s is failing: %s", component, error)
        self.failing[component] = str(error)

    def mark_healthy(self, component: str) -> None:
        """Mark a component as healthy."""
        if self.failing and self.failing.pop(component, None) is not None:
            _logger.warning("%s has recovered", component)


class HealthCheck:
    """Checks one component and records the result in `health`, at most every `interval_s`.

    While the component is failing, the interval is `failing_interval_s`. The intervals bound the
    number of checks, because `/readyz` needs no API key and each check makes a write.
    """

    def __init__(
        self,
        health: Health,
        component: str,
        check: Callable[[], Awaitable[object]],
        monotonic: Callable[[], float],
        *,
        interval_s: float,
        failing_interval_s: float,
    ) -> None:
        self._health = health
        self._component = component
        self._check = check
        self._monotonic = monotonic
        self._interval_s = interval_s
        self._failing_interval_s = failing_interval_s
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def run_if_due(self) -> None:
        """Check the component, unless the last check is recent; wait for a check that runs."""
        async with self._lock:
            is_failing = self._component in self._health.failing
            interval_s = self._failing_interval_s if is_failing else self._interval_s
            if self._monotonic() - self._checked_at < interval_s:
                return
            try:
                async with asyncio.timeout(_CHECK_TIMEOUT_S):
                    await self._check()
            except StoreUnavailable as error:
                self._health.mark_failing(self._component, error)
            except TimeoutError:
                self._health.mark_failing(
                    self._component, f"no response for {_CHECK_TIMEOUT_S:g} s"
                )
            else:
                self._health.mark_healthy(self._component)
            self._checked_at = self._monotonic()


class StoreClock:
    """An estimate of the store's clock: the local monotonic clock plus an offset, in epoch ms.

    The wall clock of this machine is not used, because tasks would wait longer or shorter if an
    operator set it.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._offset_ms = _UNKNOWN_OFFSET_MS

    def unrounded_ms(self) -> float:
        """Return the store's time in milliseconds, not rounded."""
        return self._monotonic() * 1000 + self._offset_ms

    def now_ms(self) -> int:
        """Return the store's time in milliseconds, rounded down so that no task is early."""
        return int(self.unrounded_ms())

    def now_s(self) -> float:
        """Return the store's time in seconds, the unit of the core."""
        return self.unrounded_ms() / 1000

    def local_ms(self) -> float:
        """Return the local monotonic time in milliseconds, to be passed to `synchronize`."""
        return self._monotonic() * 1000

    def synchronize(self, sent_at: float, store_now: int) -> None:
        """Update the offset from a reply of the store, which contains its time `store_now`.

        `sent_at` is `local_ms` when the request was sent. The store read its clock between then and
        now, so the offset has a lower and an upper bound. The highest lower bound of all replies is
        kept: the estimate is never ahead of the store, and behind it by at most the round trip of
        the fastest reply. If it is above the upper bound, the store's clock was set back.
        """
        # The store rounds its time down, so its exact time is up to one millisecond later.
        lower, upper = store_now - self.local_ms(), store_now + 1 - sent_at
        self._offset_ms = lower if self._offset_ms > upper else max(self._offset_ms, lower)


class EngineContext(msgspec.Struct, frozen=True, kw_only=True):
    """The dependencies of engine, scheduler, worker and maintenance; `Service` creates them."""

    store: Store
    delivery_client: DeliveryClient
    policies: PolicyCache
    lanes: Lanes
    limit_table: LimitTable
    claim_turns: ClaimTurns
    clock: StoreClock
    reporter: Reporter
    health: Health
    body_store_check: HealthCheck
    process: WorkerRecord
    """This process, as its heartbeats describe it."""
    lease_terms: LeaseTerms
    limits: EngineLimits
    retention: Retention
    task_finder: TaskFinder
    draw: Callable[[], float]  # returns a random number in [0, 1)
    unix_time: Callable[[], float]  # to compare with dates of targets; not the store's time
    unpack: Callable[[bytes], TaskContent]  # decodes (and decrypts) the content of a task
    read_body: Callable[[TaskContent], Awaitable[bytes]]  # fetches a body and verifies it
    delete_bodies: Callable[[list[str]], Awaitable[None]]
    delete_unreferenced_bodies: Callable[[], Awaitable[int]]  # no task was added for them
    signers: SignerCache
    secrets: SecretResolver
    build_callback_task: Callable[[Task, TaskContent, TaskResult], Task]  # for `callbackUrl`
    blocked_pause_s: float | None = None
    """How long a lane whose target is not allowed is parked, before its target is tried again.
    None: its tasks become dead letters."""
    encrypt_attempt: Callable[[AttemptRecord], AttemptRecord] | None = None
    """Encrypts the texts of an attempt for the store; None if no keys are configured."""
    tracer: AttemptTracer | None = None
    """Records a span for each attempt; None if `traces` is off."""

    @property
    def delivers(self) -> bool:
        """Whether this process leases tasks and delivers them."""
        return self.process.role != "api"

    @property
    def accepts_tasks(self) -> bool:
        """Whether this process accepts new tasks; such a process also advances replays."""
        return self.process.role != "worker"


async def retry_until_stored(write: Callable[[], Awaitable[T]], health: Health) -> T:
    """Repeat a write until the store accepts it, with pauses that double up to two seconds.

    Used to record what has already happened: results, released leases, parked lanes.
    Until the write is accepted, the store is marked as failing in `health`.
    """
    pause = FIRST_STORE_RETRY_PAUSE_S
    while True:
        try:
            result = await write()
        except StoreUnavailable as error:
            health.mark_failing("store", error)
            await asyncio.sleep(pause)
            pause = min(_MAX_STORE_RETRY_PAUSE_S, pause * 2)
        else:
            health.mark_healthy("store")
            return result
