"""Shared by the components of an engine: limits, health, clock, dependencies, store retries."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service import defaults
from tarry.service.store import StoreLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

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
_CHECK_TIMEOUT_S = 4.0  # below the timeout of the readiness probe in deploy/kubernetes
_PARTITION_CHECK_TIMEOUT_S = 3.8
"""Below `_CHECK_TIMEOUT_S`, so that a partition that hangs fails alone."""
_RECOVERY_S, _MAX_RECOVERY_S = 3.0, 30.0
"""How long a component must work before it has recovered: at first, and at most."""
_RELAPSE_S = 60.0
"""A component that fails again in this time after it has recovered must then work twice as long."""
STORE = "store"
"""The component of `ServiceHealth` for claims, results and maintenance."""
ADDING = "adding"
"""The component of `ServiceHealth` for adding tasks to the store. A store with full memory refuses
only this."""
DATA = "data"
"""The component of `ServiceHealth` for a store that was emptied or replaced after it was opened."""
BODY_STORE = "bodies"
"""The component of `ServiceHealth` for the storage of large bodies."""
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


class ServiceHealth:
    """The failing components of this process. Each failure and each recovery is logged once.

    A component has recovered when a call has succeeded since the last failure, and no call has
    failed for `_RECOVERY_S`. If it fails again soon, it needs twice as long, and so on: a component
    of which some calls fail and some succeed would otherwise fail and recover with each call.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.partition_count: int = 1
        """The partitions of the store; each is a component of its own if there are several."""
        self._monotonic = monotonic
        self._failing: dict[str, str] = {}
        self._failed_at: dict[str, float] = {}
        self._recoveries: dict[str, tuple[float, float]] = {}
        """For each component that has failed: when it has recovered, and how long that takes."""
        self._succeeded: set[str] = set()
        """The failing components of which a call has succeeded since the last failure."""
        self._implied: set[str] = set()
        """The failing components that were not logged: to a partition that does not respond, no
        tasks can be added either. The log of an outage of 16 partitions would have 32 lines."""

    @property
    def failing(self) -> dict[str, str]:
        """The last error by failing component."""
        if self._succeeded:
            self._end_recovered()
        return self._failing

    def mark_failing(self, component: str, error: object) -> None:
        """Mark a component as failing, because a call has failed.

        A lost store is the component `DATA`, whichever call has found it. An error of one of
        several partitions makes only this partition fail.
        """
        if isinstance(error, StoreLost):
            component = DATA
        if isinstance(error, StoreUnavailable):
            component = self._name(component, error.partition)
        now = self._monotonic()
        if component not in self.failing:
            recovered_at, recovery_s = self._recoveries.get(component, (float("-inf"), 0.0))
            has_relapsed = now - recovered_at < _RELAPSE_S
            recovery_s = min(_MAX_RECOVERY_S, recovery_s * 2) if has_relapsed else _RECOVERY_S
            self._recoveries[component] = (recovered_at, recovery_s)
            if self._store_partition_of(component) in self._failing:
                self._implied.add(component)
            else:
                _logger.error("%s is failing: %s", component, error)
        self._failing[component] = str(error)
        self._failed_at[component] = now
        self._succeeded.discard(component)

    @property
    def blocking(self) -> dict[str, str]:
        """The failing components without which the process is not ready.

        A partition that fails does not make it unready, because the others would not be served
        either, unless all partitions fail or tasks are lost.
        """
        failing = self.failing
        optional: set[str] = set()
        for component in (STORE, ADDING):
            names = {self._name(component, number) for number in range(self.partition_count)}
            if not names <= failing.keys() and self.partition_count > 1:
                optional |= names
        return {name: error for name, error in failing.items() if name not in optional}

    def is_failing(self, component: str, partition: int) -> bool:
        """Return whether a component fails in a partition."""
        return self._name(component, partition) in self.failing

    def is_partition_failing(self, partition: int) -> bool:
        """Return whether one of several partitions fails."""
        components = (STORE, ADDING)
        return self.partition_count > 1 and any(
            self.is_failing(component, partition) for component in components
        )

    def _name(self, component: str, partition: int | None) -> str:
        if partition is None or self.partition_count == 1:
            return component
        return f"{component} partition {partition}"

    def _store_partition_of(self, component: str) -> str | None:
        """Return the component whose failure implies that no tasks can be added to a partition."""
        prefix = f"{ADDING} partition "
        return STORE + component.removeprefix(ADDING) if component.startswith(prefix) else None

    def mark_healthy(self, component: str, partition: int | None = None) -> None:
        """Record that a call has succeeded; the component recovers unless a call fails soon."""
        if not self._failing:
            return
        component = self._name(component, partition)
        if component in self._failing:
            self._succeeded.add(component)
            self._end_recovered()

    def _end_recovered(self) -> None:
        now = self._monotonic()
        for component in sorted(self._succeeded):
            recovery_s = self._recoveries[component][1]
            if now - self._failed_at[component] >= recovery_s:
                self._succeeded.discard(component)
                del self._failing[component]
                self._recoveries[component] = (now, recovery_s)
                if component in self._implied:
                    self._implied.discard(component)
                    continue
                _logger.warning("%s has recovered", component)
                for adding in [
                    each for each in self._implied if self._store_partition_of(each) == component
                ]:
                    self._implied.discard(adding)
                    _logger.error("%s is failing: %s", adding, self._failing[adding])


class HealthCheck:
    """Runs a check at most every `interval_s`, and records its result in `health`.

    If the check fails, the first of `components` is failing. If it succeeds, all of them work.

    While a component is failing, the interval is `failing_interval_s`. The intervals bound the
    number of checks, because `/readyz` needs no API key and each check makes a write.
    """

    def __init__(
        self,
        health: ServiceHealth,
        components: Sequence[str],
        check: Callable[[], Awaitable[object]],
        monotonic: Callable[[], float],
        *,
        interval_s: float,
        failing_interval_s: float,
    ) -> None:
        self._health = health
        self._component = components[0]
        self._components = components
        self._check = check
        self._monotonic = monotonic
        self._interval_s = interval_s
        self._failing_interval_s = failing_interval_s
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def run_if_due(self) -> None:
        """Run the check, unless the last one is recent; wait for a check that is running."""
        async with self._lock:
            is_failing = not self._health.failing.keys().isdisjoint(self._components)
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
                for component in self._components:
                    self._health.mark_healthy(component)
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
    health: ServiceHealth
    store_check: HealthCheck
    """Checks whether the store accepts a write, which new tasks need (components `ADDING` and
    `DATA`)."""
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


async def check_partitions(store: Store, health: ServiceHealth) -> None:
    """Check whether each partition accepts a write; `health` has the results of several."""
    if store.partition_count == 1:
        await store.ping()
        return

    async def ping(partition: int) -> int:
        try:
            async with asyncio.timeout(_PARTITION_CHECK_TIMEOUT_S):
                return await store.ping(partition)
        except TimeoutError:
            error = StoreUnavailable(f"no response for {_PARTITION_CHECK_TIMEOUT_S:g} s")
            error.partition = partition
            raise error from None

    partitions = range(store.partition_count)
    results = await asyncio.gather(*map(ping, partitions), return_exceptions=True)
    for partition, result in zip(partitions, results, strict=True):
        if isinstance(result, StoreUnavailable):
            health.mark_failing(ADDING, result)
        elif isinstance(result, BaseException):
            raise result
        else:
            for component in (STORE, ADDING, DATA):
                health.mark_healthy(component, partition)


async def retry_until_stored(
    write: Callable[[], Awaitable[T]], health: ServiceHealth, partition: int
) -> T:
    """Repeat a write until its partition accepts it, with pauses that double up to two seconds.

    Used to record what has already happened: results, released leases, parked lanes.
    Until the write is accepted, the store is marked as failing in `health`.
    """
    pause = FIRST_STORE_RETRY_PAUSE_S
    while True:
        try:
            result = await write()
        except StoreUnavailable as error:
            health.mark_failing(STORE, error)
            await asyncio.sleep(pause)
            pause = min(_MAX_STORE_RETRY_PAUSE_S, pause * 2)
        else:
            health.mark_healthy(STORE, partition)
            return result
