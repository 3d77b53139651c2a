"""The simulated environment of a service: clocks, targets, a faulty network, and processes.

A process can crash, and can be suspended for longer than its leases. See `faulty_store` for the
faults of the store.

All random decisions come from one seed, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar
from math import inf
from random import Random
from typing import Any, NoReturn

from tarry.service.api.auth import DEFAULT_TENANT, api_key_digest
from tarry.service.delivery import DeliveryError, DeliveryRequest, DeliveryResult, Fault
from tarry.service.delivery.dns import DEADLINE_PAUSE_S, DnsCache
from tarry.service.engine.context import EngineLimits
from tarry.service.engine.lanes import MAX_FAST_ATTEMPT_MS, Lanes
from tarry.service.model import ApiKeyRecord
from tarry.service.records.api_keys import put_api_key
from tarry.service.store import Store
from tarry.service.stores.sqlite.clock import AnchoredClock
from tests.chaos.invariants import InvariantChecker
from tests.chaos.simulated_stores import SimulatedStores, run_synchronously
from tests.core.limiter_model import SlidingWindowTarget

_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)
EPOCH_S = 1_800_000_000.0
FAULT_EFFECT_S = 20.0
"""How long most faults have effects: a lease lasts 15 s, an open breaker up to 16.5 s."""
MAX_SUSPENSION_S = 40.0
"""A process may be suspended for this long, which is longer than its leases."""
ATTEMPT_TIMEOUT_MS = 5_000
HORIZON_MS = 2_000
"""A task is leased at most this long before it is due."""
STEADY_TENANT, STEADY_HOST = "steady", "steady.example"
NEIGHBOURS_SHARE = 0.2
"""The share of runs in which some tenants have targets that hang. Such a run takes longer."""


class Faults:
    """The probability of each fault; `stop` sets all to 0."""

    def __init__(self, rng: Random) -> None:
        store_failure = rng.choice([0.0, 0.01, 0.05, 0.2])
        self.crash = rng.choice([0.0, 0.001, 0.005, 0.02])
        """The process crashes before or after it calls the store or the network."""
        self.suspension = rng.choice([0.0, 0.0, 0.001, 0.005])
        """The process is suspended at these points, as by SIGSTOP, and continues later."""
        self.store_rejection = store_failure
        """The store rejects a call without a change."""
        self.store_reply_loss = store_failure / 2
        """The store applies a call, but its reply is lost."""
        self.store_late_effect = rng.choice([0.0, store_failure / 4])
        """A call of the store fails, and has its effect later."""
        self.delay = rng.choice([0.0, 0.1, 0.5])
        self.network_fault = rng.choice([0.0, 0.1, 0.3])
        self.max_clock_jump_s = rng.choice([0.0, 0.0, 200.0, 7200.0])
        """Not a probability: the wall clock is set to a time within a range of this length."""
        self.hosts_may_fail = bool(self.delay or self.network_fault or self.store_rejection)
        """Whether the targets of the tenant `default` change their state."""
        self.are_stopped = False

    def stop(self) -> None:
        """Inject no more faults; targets do not fail any more, either."""
        self.limit_to_hosts()
        self.hosts_may_fail, self.are_stopped = False, True

    def limit_to_hosts(self) -> None:
        """Inject no more faults; targets may still fail."""
        self.crash = self.suspension = 0.0
        self.store_rejection = self.store_reply_loss = self.store_late_effect = 0.0
        self.delay = self.network_fault = self.max_clock_jump_s = 0.0


class SimulatedProcess:
    """One process of the service.

    It can crash, or be suspended, whenever it calls the store or the network.
    """

    def __init__(self, environment: Environment, name: str, clock_skew_s: float) -> None:
        self.environment = environment
        self.name = name
        self.clock_skew_s = clock_skew_s
        self.is_alive = True
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.lanes: Lanes | None = None
        """The lanes of its engine."""
        self.on_wakeup: Callable[[], None] | None = None
        """The callback of `Store.listen`."""
        self.is_suspended = False
        self.may_lose_leases = False
        """Whether it was killed, stopped or suspended."""
        self._suspended_handles: list[asyncio.Handle] = []
        """Callbacks that became ready while the process was suspended."""
        self._context = Context()
        self._context.run(_process.set, self)
        environment.processes.append(self)
        self.steady_fast_since = inf
        """The time at which the first attempt of the steady target has ended in this process, so
        that its lane counts as fast; infinity: not yet."""

    def monotonic(self) -> float:
        """Return the local monotonic time, which is unrelated to the store's clock."""
        return asyncio.get_running_loop().time() + self.clock_skew_s

    async def reach_fault_point(self) -> None:
        """Delay, suspend or crash the process, according to the faults."""
        faults, rng = self.environment.faults, self.environment.rng
        if self.is_alive and rng.random() < faults.delay:
            self.environment.record_fault()
            await asyncio.sleep(rng.random() * rng.choice([0.01, 1.0]))
        if self.is_alive and rng.random() < faults.suspension:
            self.suspend(rng.uniform(1.0, MAX_SUSPENSION_S))
            await asyncio.sleep(0)  # returns after the suspension
        if self.is_alive and rng.random() < faults.crash:
            self.kill()
        if not self.is_alive:
            await wait_forever()

    def suspend(self, seconds: float) -> None:
        """Run no callback of this process for some seconds; see `run_unless_suspended`."""
        self.is_suspended = self.may_lose_leases = True
        self.environment.record_fault(seconds + FAULT_EFFECT_S)
        asyncio.get_running_loop().call_later(seconds, self.resume, context=Context())

    def resume(self) -> None:
        """End the suspension: the callbacks that are due run now, in the order of their times."""
        self.is_suspended = False
        loop: Any = asyncio.get_running_loop()
        loop._ready.extend(self._suspended_handles)
        self._suspended_handles.clear()

    def wake_after(self, seconds: float) -> None:
        """Deliver a wake-up from another process after some seconds, if this process runs then."""
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._wake, context=self._context)

    def _wake(self) -> None:
        if self.is_alive and self.on_wakeup is not None:
            self.on_wakeup()

    def kill(self) -> None:
        """Crash as by `kill -9`: from now on, no call of this process has an effect."""
        if self.is_alive:
            self.is_alive, self.may_lose_leases = False, True
            self.resume()  # so that the tasks of the process can be cancelled
            self.environment.record_fault()
            self.crashed.set_result(None)
            current = asyncio.current_task()
            for task in tuple(self.tasks):
                if task is not current:
                    task.cancel()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this process; return its result, or None if the process crashes."""
        token = _process.set(self)
        try:
            task = asyncio.get_running_loop().create_task(work)
        finally:
            _process.reset(token)
        await asyncio.wait([task, self.crashed], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return None if task.cancelled() else task.result()


async def wait_forever() -> NoReturn:
    """Never return: the process that calls this has crashed."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


def run_unless_suspended(handle: asyncio.Handle, run: Callable[[asyncio.Handle], None]) -> None:
    """Run a callback of the event loop, unless it belongs to a process that is suspended.

    The context of a callback has the process that has scheduled it. So all code of a suspended
    process stops: tasks, timers and network callbacks.
    """
    process = handle._context.get(_process)  # type: ignore[attr-defined]
    if process is not None and process.is_suspended:
        process._suspended_handles.append(handle)
    else:
        run(handle)


class FakeHost:
    """A target of tasks, which is in one of several states.

    * healthy, slow, or down (refuses connections);
    * overloaded: responds to most requests with 429, 500 or 503;
    * rejecting: responds to some requests with a permanent failure;
    * hanging: never responds;
    * unanswered: DNS servers answer late or never for its name.

    It may have a capacity in calls per second, and a share of its tasks are poison tasks, which it
    never accepts.
    """

    def __init__(
        self,
        name: str,
        rng: Random,
        state: str = "healthy",
        *,
        capacity: float = inf,
        poison_share: float = 0.0,
    ) -> None:
        self.name = name
        self.state = state
        self.poison_share = poison_share
        self._rng = rng
        self._window = SlidingWindowTarget(lambda _: capacity)
        throttled = DeliveryResult(status=429, headers=[("retry-after", "1")])
        self._refusal = rng.choice([DeliveryResult(status=503), throttled])

    def next_response(self, name: str) -> tuple[DeliveryResult, float]:
        """Return the response to a task, and the seconds until it is sent."""
        rng, state = self._rng, self.state
        if state == "hanging":
            return DeliveryResult(status=200), inf
        if state == "down":
            return DeliveryResult(fault=Fault.REFUSED, error="refused"), 0.001
        if not self._window.accept(asyncio.get_running_loop().time()):
            return self._refusal, 0.01
        if name.startswith("poison"):
            return DeliveryResult(status=503), 0.01
        if state == "overloaded" and rng.random() < 0.8:
            headers = [("retry-after", str(rng.randrange(8)))] if rng.random() < 0.3 else []
            return DeliveryResult(status=rng.choice([503, 429, 500]), headers=headers), 0.01
        if state == "slow":
            return DeliveryResult(status=200), rng.random() * 8
        if state == "rejecting" and rng.random() < 0.1:
            return DeliveryResult(status=rng.choice([404, 302, 410])), 0.01
        return DeliveryResult(status=rng.choice([200, 201, 204])), rng.random() * 0.05


class World:
    """The tenants of one run, and the targets of their tasks.

    The tenant `default` has two targets that change their state. In a world with neighbours, one
    target of the tenant `steady` is always healthy. The targets of one or two other tenants, or the
    other targets of `steady`, hang, or DNS servers answer late or never for their names.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.changing_hosts = [
            FakeHost(
                name,
                rng,
                capacity=rng.choice([inf, inf, 5, 20]),
                poison_share=rng.choice([0.0, 0.0, 0.25, 0.4, 0.75]),
            )
            for name in ("a.example", "b.example")
        ]
        self.hosts = {host.name: host for host in self.changing_hosts}
        """All targets, by host name."""
        self.hanging_hosts: dict[str, list[str]] = {}
        """The host names of the targets that hang, by tenant."""
        self.lookups_end_at = -inf
        """When the last slow DNS lookup is answered. Until then, slow lookups hold slots of their
        tenant, although the targets may be healthy again."""
        self.targets_begin_to_hang = rng.random() < 0.4
        """Whether the hanging targets respond at first, so that their lanes count as fast."""
        self.has_neighbours = rng.random() < NEIGHBOURS_SHARE
        self.tenants = [DEFAULT_TENANT]
        if self.has_neighbours:
            self.hosts[STEADY_HOST] = FakeHost(STEADY_HOST, rng)
            for tenant in rng.choice([["x"], ["x"], ["x", "y"], [STEADY_TENANT]]):
                self._add_hanging_targets(tenant)
            self.tenants += dict.fromkeys([STEADY_TENANT, *self.hanging_hosts])

    def _add_hanging_targets(self, tenant: str) -> None:
        rng, max_count, states = self._rng, 30, ["hanging", "unanswered"]
        if tenant == STEADY_TENANT:
            # The lanes of a tenant share its leases and DNS lookups. With more hanging targets, the
            # healthy target of the tenant would wait for them.
            max_count, states = 5, ["hanging"]
        names = [f"h{i}.{tenant}.example" for i in range(rng.choice([1, max_count]))]
        state = "healthy" if self.targets_begin_to_hang else rng.choice(states)
        self.hosts.update((name, FakeHost(name, rng, state)) for name in names)
        self.hanging_hosts[tenant] = names

    @property
    def can_exhaust_slots(self) -> bool:
        """Whether attempts of hanging targets may hold all slots that are free for `steady`.

        This is so if targets begin to hang, or if targets of two tenants or of `steady` hang.
        """
        return self.targets_begin_to_hang or self.hanging_hosts.keys() != {"x"}

    def max_wait_s(self, *, is_new_lane: bool) -> float:
        """Return how long a task of `steady` may wait, see docs/service-operations.md."""
        timeouts = 1 + is_new_lane if self.can_exhaust_slots else 0
        wait_s = (HORIZON_MS / 2 + MAX_FAST_ATTEMPT_MS + timeouts * ATTEMPT_TIMEOUT_MS) / 1000
        if is_new_lane and STEADY_TENANT in self.hanging_hosts:
            # While the lanes of the tenant have their turns, half of the lease may pass. Then the
            # task is released, perhaps just before its turn. In the process that leases it next,
            # it waits for its turn from the beginning.
            wait_s *= 2
        return wait_s

    def change_target_state(self) -> None:
        """Change one target of `default` to a random state."""
        states = ["healthy", "healthy", "down", "overloaded", "slow", "rejecting", "unanswered"]
        if not self.can_exhaust_slots:
            # Attempts of a second tenant must not hang: no slot is reserved for a third tenant,
            # because a sixteenth of the slots for slow attempts is less than one.
            states = [state for state in states if state not in {"slow", "unanswered"}]
        self._rng.choice(self.changing_hosts).state = self._rng.choice(states)

    def hang(self, tenant: str) -> None:
        """Make the healthy targets of a tenant hang."""
        for name in self.hanging_hosts[tenant]:
            if self.hosts[name].state == "healthy":
                self.hosts[name].state = "hanging"

    def make_targets_healthy(self) -> None:
        """Make all targets healthy."""
        for host in self.hosts.values():
            host.state = "healthy"

    def start_lookup(self, name: str, on_answer: Callable[[str, Any], None]) -> None:
        """Pass the addresses of a host name to `on_answer`, like `dns.start_lookup_thread`."""
        rng, seconds = self._rng, self._rng.random() * 0.05
        answer: tuple[str, ...] | None = ("192.0.2.1",)
        if self.hosts[name].state == "unanswered":
            answer, seconds = rng.choice([answer, None, None]), rng.random() * 40
            answered_at = asyncio.get_running_loop().time() + seconds
            self.lookups_end_at = max(self.lookups_end_at, answered_at)
        asyncio.get_running_loop().call_later(seconds, on_answer, name, answer)

    def draw_limits(self) -> EngineLimits:
        """Return the limits of one process."""
        choose = self._rng.choice
        if self.has_neighbours:  # shares of a few slots would be rounded to nothing
            return EngineLimits(
                max_running_attempts=choose([10, 20]),
                max_lane_running_attempts=choose([5, 20]),
                # Fewer than there are tasks for hanging targets of other tenants.
                max_leased=choose([60 if STEADY_TENANT in self.hanging_hosts else 20, 60]),
                max_lane_leased=choose([10, 50]),
                max_claimed=choose([5, 50]),
                max_lane_claimed=choose([5, 50]),
                max_unwritten=100,
            )
        return EngineLimits(
            max_running_attempts=choose([2, 50]),
            max_lane_running_attempts=choose([1, 20]),
            # `max_leased` limits all leased tasks, `max_claimed` the tasks of one claim.
            max_leased=choose([3, 100]),
            max_lane_leased=choose([2, 50]),
            max_claimed=choose([2, 50]),
            max_lane_claimed=choose([1, 50]),
            max_unwritten=10,  # new tasks that wait to be written
        )


class FaultyNetwork:
    """The network as seen by one process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._dns = DnsCache()

    def send(self, request: DeliveryRequest) -> Awaitable[DeliveryResult]:
        """Start an attempt, which is recorded at once; return its result."""
        if not self._process.is_alive:
            return wait_forever()
        self._process.environment.invariants.record_attempt(request, self._process)
        return self._deliver(request)

    async def _deliver(self, request: DeliveryRequest) -> DeliveryResult:
        """Make an attempt; the request or its response may be lost or late."""
        process, environment = self._process, self._process.environment
        await process.reach_fault_point()
        rng, faults = environment.rng, environment.faults
        if rng.random() < faults.network_fault / 3:
            environment.record_fault()
            result = DeliveryResult(fault=Fault.INTERNAL, error="egress proxy down")
            environment.invariants.record_received_result(request, result)
            return result
        if rng.random() < faults.network_fault / 3:
            environment.record_fault()
            return DeliveryResult(fault=Fault.DNS, error="no such name")
        host, name = request.url.split("/")[2:]
        try:
            async with asyncio.timeout(request.timeout):
                await self._dns.resolve(host, request.tenant)
        except (DeliveryError, TimeoutError) as error:
            result = DeliveryResult(fault=Fault.DNS, pause_s=DEADLINE_PAUSE_S)
            if isinstance(error, DeliveryError):
                result = error.to_result()
            # A suspension may be longer than the timeout of a lookup.
            if host == STEADY_HOST and not process.may_lose_leases:
                environment.invariants.check_wait(request, process, str(error))
            environment.invariants.record_received_result(request, result)
            return result
        if host == STEADY_HOST:
            environment.invariants.check_wait(request, process)
        result, seconds = environment.world.hosts[host].next_response(name)
        is_lost = rng.random() < faults.network_fault / 3
        is_late = seconds > request.timeout
        if is_lost or is_late:
            environment.record_fault(only_targets=not is_lost)
            await asyncio.sleep(request.timeout)
            result = DeliveryResult(fault=Fault.TIMEOUT, error="timed out")
        else:
            environment.invariants.log_target_response(request, result)
            await asyncio.sleep(seconds)
            if host == STEADY_HOST:
                now = asyncio.get_running_loop().time()
                process.steady_fast_since = min(process.steady_fast_since, now)
        await process.reach_fault_point()
        environment.invariants.record_received_result(request, result)
        return result

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class Environment:
    """The store, world, clock and faults, which survive the crashes of processes."""

    def __init__(self, seed: int, stores: SimulatedStores) -> None:
        self.rng = Random(seed)
        self.processes: list[SimulatedProcess] = []
        """All processes, in the order of their start."""
        self.faults = Faults(self.rng)
        self.world = World(self.rng)
        # Some runs have only faults of targets, so that waiting times are checked from the start.
        if self.rng.random() < (0.6 if self.world.has_neighbours else 0.3):
            self.faults.limit_to_hosts()
            self.faults.hosts_may_fail = self.world.has_neighbours and self.world.can_exhaust_slots
        self.has_store_faults = self.faults.store_rejection > 0
        self.clock_offset_s = 0.0
        self._faults_end_at = -inf
        self.service_faults_end_at = -inf
        """The time at which the effects of all faults, except those of targets, have ended."""
        self._loop = loop = asyncio.get_running_loop()
        self._stores = stores
        self._clock = AnchoredClock(
            unix_time=lambda: self.now_s() + self.clock_offset_s,
            boot_ms=lambda: int(loop.time() * 1000),
            boot_id=lambda: 1,
        )
        self.store = self.open_store()
        """A store object without faults, for the checks of invariants."""
        for tenant in self.world.tenants:
            key = ApiKeyRecord(id=tenant, tenant=tenant, digest=api_key_digest(tenant))
            run_synchronously(put_api_key(self.store, key))
        self.invariants = InvariantChecker(self.store, self)
        task_factory: Any = _create_task
        loop.set_task_factory(task_factory)

    def now_s(self) -> float:
        """Return the time in epoch seconds, which jumps of the wall clock do not change."""
        return EPOCH_S + self._loop.time()

    def open_store(self) -> Store:
        """Return a store object over the data of the simulation."""
        return self._stores.open_store(self._clock)

    def live_processes(self) -> list[SimulatedProcess]:
        """Return the processes that run or are suspended."""
        return [process for process in self.processes if process.is_alive]

    def jump_clock(self) -> None:
        """Set the wall clock of the machine to another time."""
        self.clock_offset_s = (self.rng.random() - 0.5) * self.faults.max_clock_jump_s

    def record_fault(self, seconds: float = FAULT_EFFECT_S, *, only_targets: bool = False) -> None:
        """Record a fault, or a fault of targets only, whose effects last for some seconds."""
        faults_end_at = asyncio.get_running_loop().time() + seconds
        self._faults_end_at = max(self._faults_end_at, faults_end_at)
        if not only_targets:
            self.service_faults_end_at = max(self.service_faults_end_at, faults_end_at)

    @property
    def faults_end_at(self) -> float:
        """The time at which the effects of all faults so far have ended."""
        is_lookup_slow = asyncio.get_running_loop().time() < self.world.lookups_end_at
        if is_lookup_slow or any(host.state != "healthy" for host in self.world.hosts.values()):
            self.record_fault(only_targets=True)
        return self._faults_end_at


def _create_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Create a task that is cancelled when the process that creates it crashes."""
    task = asyncio.Task(work, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if not process.is_alive:
            task.cancel()
    return task
